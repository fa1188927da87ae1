"""RL in a learned world model: the recipe behind ``vla-rl imagine`` and its stages."""
