"""``python -m tests.simulators.warp_experts [EPISODES] [TASK ...]``: the scripted experts on MuJoCo and on MuJoCo-Warp.

Both play the same seeds; the table has success with its Wilson interval (95 %), and how many seeds end differently.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

import numpy as np

from sims import catalog
from vla_rl.contract.intervals import wilson
from vla_rl.evaluation.seed_ranges import TEST, held_out

HORIZONS = {"lift": 5, "place": 1, "push": 1}  # actions between two looks, as far as the experts can predict


def successes(env: Any, expert: Any, seeds: np.ndarray) -> np.ndarray:
    """bool [E]: which episodes of ``seeds`` [E] the expert ends with success, all at once."""
    obs, step = env.reset(np.arange(len(seeds)), seeds), None
    while step is None or not np.asarray(step.done).all():
        step = env.step(expert.act(obs))
        obs = step.obs
    return np.asarray(step.success)


def compare(task: str, episodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Success of ``task``'s expert in each of ``episodes`` episodes, on MuJoCo and on MuJoCo-Warp."""
    seeds = np.array(held_out(TEST, episodes))
    found = []
    for name, options in ((task, {}), ("warp", {"env": task})):
        with closing(catalog.make(name, num_envs=episodes, render=False, **options)) as env:
            found.append(successes(env, catalog.expert(task, HORIZONS[task]), seeds))
    return found[0], found[1]


def main(episodes: int, tasks: list[str]) -> None:
    print("| task | MuJoCo | MuJoCo-Warp | seeds that end differently |\n|---|---|---|---|")
    for task in tasks:
        pair = compare(task, episodes)
        cells = []
        for success in pair:
            low, high = wilson(int(success.sum()), episodes)
            cells.append(f"{success.mean():.1%} [{100 * low:.1f}, {100 * high:.1f}]")
        print(f"| `{task}` | {cells[0]} | {cells[1]} | {int((pair[0] != pair[1]).sum())} of {episodes} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 300, sys.argv[2:] or list(HORIZONS))
