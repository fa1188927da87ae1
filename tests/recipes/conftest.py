"""The command line in this process, as in ``tests/cli``."""

from tests.cli.conftest import complaint, quick, untrained

__all__ = ["complaint", "quick", "untrained"]
