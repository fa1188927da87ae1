"""Training: the loops that join policies, algorithms, experience and evaluation."""
