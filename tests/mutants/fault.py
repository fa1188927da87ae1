"""What a fault is, and how it is put into a copy of the repository."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """``old`` occurs exactly once in ``file``; with ``new`` in its place, one of ``tests`` (pytest ids) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def occurrences(self, root: Path = ROOT) -> int:
        """How often ``old`` is found below ``root``; anything but 1 means that the fault is out of date."""
        path = root / self.file
        return path.read_text(encoding="utf-8").count(self.old) if path.exists() else 0

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """The fault is in ``root`` meanwhile."""
        path = root / self.file
        sound = path.read_text(encoding="utf-8")
        path.write_text(sound.replace(self.old, self.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(sound, encoding="utf-8")
