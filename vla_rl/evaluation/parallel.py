"""An evaluation shared by threads: simulators and torch release Python's lock while they compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from vla_rl.contract.env import VecEnv
from vla_rl.contract.policy import Policy
from vla_rl.evaluation.run import Outcomes, evaluate


def evaluate_in_threads(
    make_env: Callable[[int], VecEnv],
    num_envs: int,
    threads: int,
    policy: Policy,
    seeds: Sequence[int],
    noise_seed: int = 0,
    report: Callable[[int, int], None] = lambda episodes, successes: None,
) -> Outcomes:
    """:func:`evaluate` with ``num_envs`` environments in all, of which each of ``threads`` has its share.

    ``make_env(E)`` makes, and the thread closes, ``E`` environments, because an OpenGL context belongs to
    one thread; a single thread is the caller's.  Outcomes are those of :func:`evaluate`, in the order of ``seeds``; see
    there what "those" means.
    """
    threads = max(1, min(threads, len(seeds), num_envs))
    ended, lock = [(0, 0)] * threads, threading.Lock()

    def play(part: int) -> Outcomes:
        def note(episodes: int, successes: int) -> None:
            with lock:
                ended[part] = (episodes, successes)
                report(*(sum(counts) for counts in zip(*ended, strict=True)))

        with closing(make_env(num_envs // threads)) as env:
            return evaluate(env, policy, seeds[part::threads], noise_seed, report=note)

    if threads == 1:
        return play(0)
    with ThreadPoolExecutor(threads) as pool:
        return _in_order(list(pool.map(play, range(threads))))


def _in_order(parts: Sequence[Outcomes]) -> Outcomes:
    """Outcomes of every ``len(parts)``-th seed each, put together in the order of all seeds."""
    count, step = sum(len(part.seeds) for part in parts), len(parts)

    def merge(name: str) -> np.ndarray:
        arrays = [np.asarray(getattr(part, name)) for part in parts]
        merged = np.empty(count, np.result_type(*arrays))
        for i, array in enumerate(arrays):
            merged[i::step] = array
        return merged

    cause, family = (tuple(str(text) for text in merge(name)) for name in ("cause", "family"))
    ends = merge("success"), cause, merge("length"), family, merge("returns")
    return Outcomes(merge("seeds"), *ends, has_success=parts[0].has_success)
