"""The pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@dataclass(frozen=True)
class Command:
    """One line of a ``sh`` or ``console`` block, without its comment, and the folder that it is given in."""

    page: str
    words: tuple[str, ...]
    folder: Path = ROOT

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def commands() -> Iterator[Command]:
    """Every command of every page, those that are joined by ``&&`` apart."""
    for page in PAGES:
        for block in re.findall(r"^ *```(?:sh|console)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S):
            folder, lines = ROOT, block.replace("\\\n", " ").splitlines()
            for part in [part for line in lines for part in re.split(r"&&", line)]:
                if words := shlex.split(part.strip().removeprefix("$ "), comments=True):
                    yield Command(page.relative_to(ROOT).as_posix(), tuple(words), folder)
                    if words[0] == "cd" and (ROOT / words[1]).is_dir():
                        folder = ROOT / words[1]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; an error of ``make docs`` fails the tests."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    out = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(out), strict=True))
    return out
