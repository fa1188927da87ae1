"""What is damaged in a dataset: which file, which column, which episodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class Problem:
    """``what`` is wrong with ``file`` (relative to the dataset) or one ``column`` of it; the text begins with a verb.

    ``episodes`` cannot be read because of it; () means that all can, with the loss that ``what`` states.
    """

    file: str
    what: str
    episodes: tuple[int, ...] = ()
    column: str = ""

    def __str__(self) -> str:
        where = f"{self.file!r}" + (f", column {self.column!r}," if self.column else "")
        lost = f", so {numbers(self.episodes)} cannot be read" if self.episodes else ""
        return f"{where} {self.what}{lost}"


class DamagedError(UserError):
    """Part of a dataset cannot be read; ``problem`` says which part."""

    def __init__(self, root: Path, problem: Problem) -> None:
        super().__init__(
            f"in the dataset {str(root)!r}, {problem}; copy the file again if its original is whole, or say "
            "explicitly that damaged episodes are to be left out."
        )
        self.problem = problem


def merged(problems: Iterable[Problem]) -> list[Problem]:
    """One entry per file, column and damage, with all the episodes that cannot be read."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for problem in problems:
        found.setdefault((problem.file, problem.column, problem.what), []).extend(problem.episodes)
    return [Problem(file, what, tuple(sorted(set(lost))), column) for (file, column, what), lost in found.items()]


def numbers(episodes: Sequence[int]) -> str:
    """``episode 3`` or ``episodes 0 to 4, 7``."""
    runs: list[list[int]] = []
    for episode in episodes:
        if runs and episode == runs[-1][-1] + 1:
            runs[-1].append(episode)
        else:
            runs.append([episode])
    text = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"episode{'s' if len(episodes) > 1 else ''} {text}"
