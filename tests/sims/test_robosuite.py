"""robosuite's instructions; ``make test-sims`` runs the real one, which needs an installation of its own."""

from __future__ import annotations

from sims.robosuite import INSTRUCTIONS


def test_every_task_has_an_instruction_of_its_own():
    assert len(set(INSTRUCTIONS.values())) == len(INSTRUCTIONS) == 17
