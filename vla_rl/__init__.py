"""vla-rl: improve imitation-trained vision-language-action policies by online reinforcement learning."""

__version__ = "0.1.0"
