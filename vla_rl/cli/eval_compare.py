"""``vla-rl eval RESULTS --against OTHER`` and ``vla-rl eval [RESULTS] --power DIFFERENCE``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import console
from vla_rl.recipes.suite_comparison import COMPARISON, compare, needed_between, power_table, read_results, row


@dataclass(frozen=True)
class Compare:
    """Compare two evaluations of one suite on the same seeds; say how many episodes a difference takes."""

    against: str = ""  # the other results' folder
    power: float = 0.0  # a difference of success rates, such as 0.05


def compare_results(arguments: Sequence[str]) -> None:
    """Print the comparison, the numbers of episodes, or both."""
    given = list(arguments)
    folder = Path(given.pop(0)) if given and not given[0].startswith("-") else None
    config: Compare = override(Compare(), given, "vla-rl eval RESULTS")
    found = _compared(folder, Path(config.against)) if config.against else None
    if config.power:
        _power(folder, found, _difference(config.power))


def _compared(folder: Path | None, other: Path) -> JsonObject:
    if folder is None:
        raise UserError("--against compares two folders and one was named; write vla-rl eval RESULTS --against OTHER.")
    found = compare(folder, other)
    console.print(f"{found['protocol']}\n  first   {found['first']['name']}\n  second  {found['second']['name']}")
    table = Table("task", "first", "second", "difference", "first alone", "second alone", "p")
    for name, task in found["tasks"].items():
        table.add_row(*("–" if cell is None else str(cell) for cell in row(name, task)))
    console.print(table)
    console.print(f"{folder / COMPARISON}, {folder / 'comparison.html'}")
    return found


def _power(folder: Path | None, found: JsonObject | None, difference: float) -> None:
    """By the measured discordance of two policies, by the measured rates of one, or for a few rates."""
    console.print(f"Episodes that show a difference of {difference:.1%} with probability 80 % (McNemar's test at 5 %):")
    if found is not None:
        for name, task in found["tasks"].items():
            if task["p_value"] is not None:
                console.print(f"  {name:<24} {needed_between(task, difference):,}, as often as these two disagree")
        return
    if folder is None:
        _print_table([(f"success {one[0]:.0%}", *one[1:]) for one in power_table(difference)])
        return
    rates = {name: task["success"] for name, task in read_results(folder)["tasks"].items() if "success" in task}
    _print_table([(name, *one[1:]) for name, rate in rates.items() for one in power_table(difference, [rate])])


def _print_table(rows: Sequence[tuple[str, int, int]]) -> None:
    table = Table("", "if outcomes are independent", "if one wins wherever the other does")
    for name, independent, alike in rows:
        table.add_row(name, f"{independent:,}", f"{alike:,}")
    console.print(table)


def _difference(given: float) -> float:
    if not 0 < given < 1:
        raise UserError(f"--power {given:g} is no difference of success rates; write for example --power 0.05.")
    return given
