"""The command line: it parses, calls recipes and prints."""

from vla_rl.cli.main import main

__all__ = ["main"]
