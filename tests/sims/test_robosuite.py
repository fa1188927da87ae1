"""robosuite's instructions and robots; ``make test-sims`` runs the real one, which needs an installation of its own."""

from __future__ import annotations

import pytest

from sims.robosuite import INSTRUCTIONS, _check_task
from vla_rl.contract.errors import UserError


def test_every_task_has_an_instruction_of_its_own():
    assert len(set(INSTRUCTIONS.values())) == len(INSTRUCTIONS) == 17


@pytest.mark.parametrize(
    ("task", "robots", "sentence"),
    [
        ("Lfit", ["Panda"], r"no task 'Lfit'.*did you mean 'Lift'\?"),
        ("Lift", ["Pamda"], r"'Pamda' is no robot .*did you mean 'Panda'\?"),
        ("Lift", ["Baxter"], r"'Baxter' is no robot of robosuite with one arm"),
        ("TwoArmLift", ["Panda"], r"by 2 robot\(s\) of one arm, not by \['Panda'\], .*robots=\[\"Panda\", \"Panda\"\]"),
        ("Lift", ["Panda", "Panda"], r"by 1 robot\(s\) of one arm, .*give robots=\"Panda\"\."),
    ],
)
def test_tasks_and_robots_that_do_not_fit_are_refused(task, robots, sentence):
    _check_task("Lift", ["Panda"])
    _check_task("TwoArmLift", ["Panda", "Sawyer"])
    with pytest.raises(UserError, match=sentence):
        _check_task(task, robots)
