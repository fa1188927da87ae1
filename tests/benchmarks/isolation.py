"""What a process of its own costs an environment with images."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np

from sims.catalog import make
from tests.benchmarks.measure import Contender, Row, interleave, rate_row

THREADS = 2


def isolated_vs_inprocess(quick: bool = False) -> list[Row]:
    """Control steps per second of 32 environments with images, isolated and in this process, one step per call.

    Lift with one camera of 64x64 and of 224x224 pixels.  Both sides have two threads: the one worker, or two workers
    of one thread each, whose result is in the detail.
    """
    num_envs, steps, repeats, sizes = (2, 1, 1, (16, 32)) if quick else (32, 10, 7, (64, 224))
    return [_compare(num_envs, steps, repeats, size) for size in sizes]


def _compare(num_envs: int, steps: int, repeats: int, size: int) -> Row:
    def options(threads: int) -> dict[str, Any]:
        return {"image_size": size, "threads": threads}

    with ExitStack() as stack:
        envs = {"other": stack.enter_context(closing(make("lift", num_envs=num_envs, **options(THREADS))))}
        for workers in (1, 2):
            made = make("isolated", num_envs=num_envs, env="lift", options=options(THREADS // workers), workers=workers)
            envs[str(workers)] = stack.enter_context(closing(made))
        spec, env_ids = envs["other"].spec, np.arange(num_envs)
        shape = (steps, num_envs, 1, spec.action_dim)
        actions = np.random.default_rng(0).uniform(spec.action.low, spec.action.high, shape).astype(np.float32)
        last: dict[str, np.ndarray] = {}

        def play(name: str) -> None:
            for action in actions:
                step = envs[name].step(action)
            last[name] = step.obs.images[next(iter(spec.images))]

        seconds = interleave(
            {name: Contender(partial(play, name), partial(env.reset, env_ids, env_ids)) for name, env in envs.items()},
            repeats,
        )
    assert all(np.array_equal(last["other"], images) for images in last.values()), "other pictures were compared"
    total = num_envs * steps
    detail = {"num_envs": num_envs, "two_workers": round(total / seconds["2"])}
    pair = (seconds["1"], seconds["other"])
    return rate_row(f"isolated_vs_inprocess {size}x{size}", "isolated_vs_inprocess", total, pair, "steps/s", **detail)
