"""The faults of ``make mutants`` are up to date; that they are caught takes minutes and is its own target."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import fault as module
from tests.mutants.fault import ROOT, Fault, faults

FAULTS = faults()


@cache
def _tests(path: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / path).read_text(encoding="utf-8"), re.M))


def complaints(fault: Fault) -> list[str]:
    """What is out of date in ``fault``."""
    found = [str(path.relative_to(ROOT)) for path in fault.places()]
    wrong = [] if len(found) == 1 else [f"{fault.package} holds this {len(found)} times ({found}): {fault.old}"]
    named = [(test, *test.split("[")[0].split("::")) for test in fault.tests]
    return wrong + [f"there is no test {test}" for test, path, name in named if name not in _tests(path)]


def test_every_fault_can_be_put_in():
    found = {fault.name: wrong for fault in FAULTS if (wrong := complaints(fault))}
    assert not found, "\n".join(f"{name}: {'; '.join(wrong)}" for name, wrong in found.items())


def test_faults_differ_and_change_something():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.package, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    assert all(fault.old.strip() and fault.old != fault.new for fault in FAULTS)


def test_a_fault_is_taken_out_again(tmp_path: Path):
    fault = FAULTS[0]
    sound = fault.places()[0].read_text(encoding="utf-8")
    path = tmp_path / fault.places()[0].relative_to(ROOT)
    path.parent.mkdir(parents=True)
    path.write_text(sound, encoding="utf-8")
    with fault.applied(tmp_path):
        assert fault.new in path.read_text(encoding="utf-8") != sound
    assert path.read_text(encoding="utf-8") == sound


@pytest.mark.parametrize("line", ["a name alone", "a\tb\tc\td\te"])
def test_a_line_that_is_no_fault_is_named(tmp_path, monkeypatch, line):
    (tmp_path / "policies.tsv").write_text("fault\told\tnew\ttests\na\tb\tc\ttests/x.py::test_y\n" + line)
    monkeypatch.setattr(module, "TABLES", tmp_path)
    with pytest.raises(ValueError, match=r"policies\.tsv, line 3, has \d columns where 4 belong"):
        faults()
