"""The faults of ``make mutants`` are up to date; that they are caught takes minutes and is its own target."""

from __future__ import annotations

import pytest

from tests.mutants.fault import ROOT
from tests.mutants.faults import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_can_be_put_in(fault):
    assert fault.occurrences() == 1, f"{fault.file} does not hold this exactly once: {fault.old}"
    assert fault.new != fault.old and "\n" not in fault.old, "a fault is one line"
    for test in fault.tests:
        path, name = test.split("[")[0].split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"there is no test {test}"


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
