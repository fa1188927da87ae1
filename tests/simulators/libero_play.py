"""``python libero_play.py [TASKS]`` in LIBERO's installation: what its own code says of tasks of all suites, as JSON.

"played" are the instructions of TASKS tasks of each suite (5 unless given, 90 for all), "success" is what the rules say
of an object before and after it was put where it belongs: [[success, cause], [success, cause]].
"""

from __future__ import annotations

import json
import sys

import numpy as np

from sims.libero import TIME_LIMITS, _tasks, make_in_process


def play(suite: str, count: int) -> list[str]:
    """Start and move in ``count`` tasks of ``suite``, from its first to its last; raises what LIBERO raises."""
    names = _tasks(suite)
    tasks = range(0, len(names), max(1, len(names) // count))
    env = make_in_process(1, suite=suite, tasks=tasks, cameras=["agentview"], image_size=32)
    played = []
    for seed in range(len(tasks)):
        obs = env.reset([0], [seed])
        step = env.step(np.full((1, 5, 7), 0.5))
        assert step.obs.time[0] == 5 and step.obs.images["agentview"].std() > 0, names[tasks[seed]]
        assert np.abs(step.obs.state - obs.state).max() > 1e-3, f"nothing moved in {names[tasks[seed]]}"
        played.append(env.spec.tasks[int(obs.task[0])])
    env.close()
    return played


def success() -> list[list[object]]:
    """What happens when the object of the goal is moved into its region by hand."""
    env = make_in_process(1, suite="libero_object", tasks=[0], cameras=[])
    env.reset([0], [0])
    found = [env.step(np.zeros((1, 1, 7)))]
    world = env._simulators[0]._env.env  # type: ignore[attr-defined]
    ((_, thing, region),) = world.parsed_problem["goal_state"]
    place = world.sim.data.get_site_xpos(region)
    world.sim.data.set_joint_qpos(world.objects_dict[thing].joints[-1], [*place, 1, 0, 0, 0])
    found.append(env.step(np.zeros((1, 1, 7))))
    return [[bool(step.success[0]), step.cause[0]] for step in found]


if __name__ == "__main__":
    each = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(json.dumps({"played": {suite: play(suite, each) for suite in TIME_LIMITS}, "success": success()}))
