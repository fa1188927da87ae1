"""What ``vla-rl serve`` and ``vla-rl fleet`` do."""
