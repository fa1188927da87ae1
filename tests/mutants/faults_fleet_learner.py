"""Faults in a fleet's learner that only show when it is killed: an episode is learnt from twice, or not at all."""

from __future__ import annotations

from tests.mutants.fault import Fault

_LEARNING = "vla_rl/recipes/fleet/learning.py"
_KILLED = (
    "tests/fleet/test_faults.py::test_whoever_is_killed_comes_back_and_all_is_stored_and_learnt_from_once_and_in_order",
)

FAULTS = (
    Fault(
        "a killed learner forgets how far in the ledger its state is",
        _LEARNING,
        'self.position, self.episodes = state["position"], state["episodes"]',
        'self.episodes = state["episodes"]',
        _KILLED,
    ),
    Fault(
        "a state holds the last record and says that it does not",
        _LEARNING,
        "self.position = position",
        "self.position = position - 1",
        _KILLED,
    ),
    Fault(
        "the steps of an episode that a state is in the middle of are not kept when they are passed over",
        "vla_rl/fleet/episodes.py",
        "if one := self._taken(record):",
        "if one := self._open.get(record.robot):",
        _KILLED,
    ),
)
