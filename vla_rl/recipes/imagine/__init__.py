"""A policy that gets better in a learned world: the command, its recipe, and what they are made of."""
