"""The faults of ``make mutants`` are up to date; that they are caught takes minutes and is its own target."""

from __future__ import annotations

from functools import cache

from tests.mutants.fault import ROOT, Fault
from tests.mutants.faults import FAULTS


@cache
def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def complaints(fault: Fault) -> list[str]:
    """What is out of date in ``fault``."""
    found = [] if fault.occurrences() == 1 else [f"{fault.file} does not hold this exactly once: {fault.old}"]
    if fault.new == fault.old or "\n" in fault.old:
        found.append("a fault is one line")
    named = [(test, *test.split("[")[0].split("::")) for test in fault.tests]
    return found + [f"there is no test {test}" for test, path, name in named if f"def {name}(" not in text(path)]


def test_every_fault_can_be_put_in():
    found = {fault.name: wrong for fault in FAULTS if (wrong := complaints(fault))}
    assert not found, "\n".join(f"{name}: {'; '.join(wrong)}" for name, wrong in found.items())


def test_there_are_enough_faults_with_names_of_their_own():
    assert len(FAULTS) >= 25 and all(fault.tests for fault in FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


def test_a_fault_is_taken_out_again(tmp_path):
    fault = FAULTS[0]
    path = tmp_path / fault.file
    path.parent.mkdir(parents=True)
    sound = (ROOT / fault.file).read_text(encoding="utf-8")
    path.write_text(sound, encoding="utf-8")
    with fault.applied(tmp_path):
        assert fault.new in path.read_text(encoding="utf-8") and fault.occurrences(tmp_path) == 0
    assert path.read_text(encoding="utf-8") == sound
