"""The command line: the only place that joins environments, policies, algorithms and evaluation."""

from vla_rl.cli.main import main

__all__ = ["main"]
