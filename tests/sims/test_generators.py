"""The numbers of many seeds at once are those of numpy's generators, and scenes do not depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest

from sims.mujoco.generators import Generators
from sims.mujoco.tasks.lift import LiftTask
from sims.mujoco.tasks.mixed import MixedTask
from sims.mujoco.tasks.place import PlaceTask
from sims.mujoco.tasks.so101 import So101Lift

SEEDS = np.array([0, 1, 2**32 - 1, 2**32, 2**40 + 7, 2**53 - 1, *range(1000, 1300)])
DRAWS = {
    "uniform": lambda rng: rng.uniform(-0.3, 0.5, (3, 2)),
    "uniform between bounds of each": lambda rng: rng.uniform(np.array([1.0, 2.0]), np.array([2.0, 2.5]), (2,)),
    "one uniform": lambda rng: rng.uniform(0.1, 0.2, ()),
    "integers": lambda rng: rng.integers(0, 3),
    "integers of one value": lambda rng: rng.integers(1, 2),
    "integers, a quarter of the draws again": lambda rng: rng.integers(0, 3 * 2**30),
    "permutation": lambda rng: rng.permutation(5),
}


def both():
    return Generators.of_seeds(SEEDS), [np.random.Generator(np.random.PCG64(int(seed))) for seed in SEEDS]


def test_every_draw_is_numpys():
    """One after the other: 32-bit draws leave half a number to the next of them, whatever comes between."""
    together, numpys = both()
    for name in [*DRAWS] * 3:
        expected = np.stack([DRAWS[name](rng) for rng in numpys])
        drawn = DRAWS[name](together)
        assert drawn.dtype == expected.dtype and np.array_equal(drawn, expected), name


def test_some_rows_go_on_where_all_were():
    (together, numpys), rows = both(), np.arange(0, 300, 3)
    assert np.array_equal(together[rows].integers(0, 9), [numpys[row].integers(0, 9) for row in rows])
    assert np.array_equal(together.uniform(0, 1), [rng.uniform(0, 1) for rng in numpys])


@pytest.mark.parametrize("task", [LiftTask, PlaceTask, MixedTask, So101Lift])
def test_a_scene_depends_on_its_seed_alone(task):
    task, seeds = task(), np.arange(100, 180)
    together = task.sample_episodes(Generators.of_seeds(seeds))
    for row in (0, 41, 79):
        alone = task.sample_episodes(Generators.of_seeds(seeds[[row]]))
        assert np.array_equal(alone.qpos[0], together.qpos[row]) and np.array_equal(alone.ctrl[0], together.ctrl[row])
        assert all(np.array_equal(value[0], together.task_state[name][row]) for name, value in alone.task_state.items())
