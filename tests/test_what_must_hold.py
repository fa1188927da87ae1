"""The table of what must hold names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [line for line in (TESTS / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]


def named(row: str) -> list[tuple[str, str]]:
    """(file, test) of everything in backquotes; ``::test`` means the file before it, "" the whole file."""
    found, file = [], ""
    for text in re.findall(r"`([^`]+)`", row.split("|")[2]):
        path, _, test = text.partition("::")
        if not path and not test:
            continue
        file = path or file
        found.append((file, test))
    return found


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_named_test_exists(row):
    if row.split("|")[2].strip() == "Tests":
        return
    tests = named(row)
    assert tests or "not yet: comes with" in row, "a line without a test must say when it will have one"
    for file, test in tests:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, f"{file} has no {test}"
