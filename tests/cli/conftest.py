"""Fixtures of ``tests/commands.py``."""

from tests.commands import complaint, quick, untrained

__all__ = ["complaint", "quick", "untrained"]
