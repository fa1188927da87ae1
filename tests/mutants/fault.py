"""What a fault is, where it is looked for, and how it is put into a copy of the repository."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).parent
HEAD = ("fault", "old", "new", "tests")  # tests: ids of pytest, with "; " between them
_LEAVES = ("sims", "world_models", "robot_drivers")


@dataclass(frozen=True)
class Fault:
    """``old`` occurs exactly once in ``package``; with ``new`` in its place, one of ``tests`` must fail."""

    package: str
    name: str
    old: str
    new: str
    tests: tuple[str, ...]

    def places(self, root: Path = ROOT) -> list[Path]:
        """The file that holds ``old``, once for each time; anything but one means that the fault is out of date."""
        return [path for path, text in sources(root, self.package) for _ in range(text.count(self.old))]

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """The fault is in ``root`` meanwhile."""
        (path,) = self.places(root)
        sound = path.read_text(encoding="utf-8")
        path.write_text(sound.replace(self.old, self.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(sound, encoding="utf-8")


@cache
def sources(root: Path, package: str) -> list[tuple[Path, str]]:
    """Every Python file of ``package`` with its text."""
    return [(path, path.read_text(encoding="utf-8")) for path in sorted((root / package).rglob("*.py"))]


def faults() -> list[Fault]:
    """All of them, table after table; raises ValueError for a line that has not four columns."""
    found = []
    for table in sorted(TABLES.glob("*.tsv")):
        package = table.stem if table.stem in _LEAVES else f"vla_rl/{table.stem}"
        head, *lines = table.read_text(encoding="utf-8").splitlines()
        if tuple(head.split("\t")) != HEAD:
            raise ValueError(f"{table.name} does not begin with the columns {', '.join(HEAD)}")
        for number, line in enumerate(lines, 2):
            columns = line.split("\t")
            if len(columns) != len(HEAD):
                raise ValueError(f"{table.name}, line {number}, has {len(columns)} columns where {len(HEAD)} belong")
            name, old, new, tests = columns
            found.append(Fault(package, name, old, new, tuple(tests.split("; "))))
    return found
