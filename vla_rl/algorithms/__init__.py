"""Algorithms: one file each with its equations and its own config; they know nothing of simulators."""
