"""Configs: Python files of functions that return a typed, frozen recipe."""
