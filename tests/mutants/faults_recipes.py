"""Faults in what configs build and how they run."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CONTEXT, _OFF = "vla_rl/recipes/context.py", "vla_rl/recipes/off_policy.py"
_ON_TRAINERS = "tests/recipes/test_trainers.py::"

FAULTS = (
    Fault(
        "all processes play the same seeds",
        _CONTEXT,
        "SeedStream(seeds.start + self.group.rank, seeds.stop, self.group.size)",
        "SeedStream(seeds.start, seeds.stop)",
        (f"{_ON_TRAINERS}test_processes_play_different_seeds",),
    ),
    Fault(
        "the seeds of a process overlap with the next one's",
        _CONTEXT,
        "SeedStream(seeds.start + self.group.rank, seeds.stop, self.group.size)",
        "SeedStream(seeds.start + self.group.rank, seeds.stop)",
        (f"{_ON_TRAINERS}test_processes_play_different_seeds",),
    ),
    Fault(
        "all processes explore with the same noise",
        _CONTEXT,
        "generator(self.seed, 5 + 100 * self.group.rank)",
        "generator(self.seed, 5)",
        (f"{_ON_TRAINERS}test_processes_explore_with_different_noise",),
    ),
    Fault(
        "off-policy training starts in several processes",
        _OFF,
        "if context.group.size > 1:",
        "if context.group.size > 2:",
        (f"{_ON_TRAINERS}test_off_policy_training_refuses_several_processes",),
    ),
)
