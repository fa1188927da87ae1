"""Evaluation on held-out seeds, in this process or shared by worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Protocol, cast

import numpy as np

from vla_rl.contract.batch import ExperienceSource, LendingSource
from vla_rl.contract.config import JsonObject, to_json
from vla_rl.contract.env import EnvSpec, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.evaluation.run import Outcomes, evaluate
from vla_rl.pretrained import save_own
from vla_rl.recipes.context import Trainable
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.workers import workers

Report = Callable[[int, int], None]


class Evaluator(Protocol):
    """Plays seeds, see :func:`vla_rl.evaluation.run.evaluate`."""

    def evaluate(self, policy: Policy, seeds: Sequence[int], noise_seed: int, report: Report = ...) -> Outcomes:
        """One episode for each seed; ``report(episodes, successes)`` is called whenever some end."""

    def close(self) -> None:
        """Close the environments."""


def new_evaluator(env: EnvFactory, num_envs: int, processes: int) -> Evaluator:
    """An evaluator with ``num_envs`` environments in all, in ``processes`` worker processes; 1: in this one."""
    return LocalEvaluator(env.make(num_envs)) if processes == 1 else ProcessEvaluator(env, num_envs, processes)


class LocalEvaluator:
    """Evaluates in ``env``, which it closes."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env

    def evaluate(
        self, policy: Policy, seeds: Sequence[int], noise_seed: int, report: Report = lambda episodes, successes: None
    ) -> Outcomes:
        return evaluate(self.env, policy, seeds, noise_seed, report=report)

    def close(self) -> None:
        self.env.close()


class ProcessEvaluator:
    """Evaluates in worker processes, each with its share of the environments and of the seeds.

    Outcomes are those of :func:`vla_rl.evaluation.run.evaluate`, in the order of the seeds; see there what that means.
    """

    def __init__(self, env: EnvFactory, num_envs: int, processes: int) -> None:
        """Raises UserError for an environment that another process cannot make."""
        self.env, self.num_envs, self.processes = remote_env(env), num_envs, processes

    def evaluate(
        self, policy: Policy, seeds: Sequence[int], noise_seed: int, report: Report = lambda episodes, successes: None
    ) -> Outcomes:
        count = max(1, min(self.processes, self.num_envs, len(seeds)))
        given = {"env": self.env, "num_envs": self.num_envs // count, "noise_seed": noise_seed}
        parts = [[int(seed) for seed in seeds[part::count]] for part in range(count)]
        with saved(policy) as folder:
            jobs = [{**given, "policy": folder, "seeds": part} for part in parts]
            found = workers(count).map("evaluate", jobs, summed(report, count))
        return _in_order([outcomes_of(part) for part in found])

    def close(self) -> None:
        """The processes are those of the whole run."""


def remote_env(env: EnvFactory) -> JsonObject:
    """``env`` as JSON for another process; raises UserError when it is more than a name and options."""
    if not isinstance(env, EnvConfig):
        raise UserError(
            f"{type(env).__name__} exists in this process alone, so others can neither collect nor evaluate in it; set "
            "collectors and evaluation.processes to 1."
        )
    return cast(JsonObject, to_json(env))


@contextmanager
def saved(policy: Policy) -> Iterator[str]:
    """A checkpoint folder of ``policy`` for other processes; raises UserError when it cannot be saved."""
    if not hasattr(policy, "save_pretrained"):
        raise UserError(
            f"{type(policy).__name__} has no save_pretrained, so other processes cannot load it; add it, or set "
            "evaluation.processes to 1."
        )
    with TemporaryDirectory(prefix="vla-rl-") as folder:
        save_own(cast(Trainable, policy), Path(folder))
        yield folder


def summed(report: Report, parts: int) -> list[Report]:
    """A report for each of ``parts``; what all of them have counted reaches ``report``."""
    ended, lock = [(0, 0)] * parts, Lock()

    def part_report(part: int) -> Report:
        def note(episodes: int, successes: int) -> None:
            with lock:
                ended[part] = (episodes, successes)
                report(*(sum(counts) for counts in zip(*ended, strict=True)))

        return note

    return [part_report(part) for part in range(parts)]


def outcomes_of(fields: JsonObject) -> Outcomes:
    """What a process returned, as arrays."""
    seeds, success, length, returns = (on_host(fields[name]) for name in ("seeds", "success", "length", "returns"))
    cause, family = (tuple(fields[name]) for name in ("cause", "family"))
    return Outcomes(seeds, success, cause, length, family, returns, fields["has_success"])


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


class SharedEnvs:
    """Makes the environments of a run (``EnvFactory``) and validates in those that it trains in (``Evaluator``).

    Validation has its own seeds and begins its own episodes; those of training are put aside meanwhile (see
    ``LendingSource``).  Where the environments have snapshots, results are the same, bit for bit, as with two sets.
    """

    def __init__(self, env: EnvFactory) -> None:
        """Raises UserError where training needs other environments than validation."""
        require_same(env)
        self.env = env
        self._made: list[VecEnv] = []
        self._source: LendingSource

    def make(self, num_envs: int) -> VecEnv:
        return self.env.make(num_envs)

    def make_training(self, num_envs: int) -> VecEnv:
        self._made.append(self.env.make_training(num_envs))
        return self._made[-1]

    def spec(self) -> EnvSpec:
        return self.env.spec()

    def lend(self, source: ExperienceSource) -> None:
        """Validate in the environments of ``source`` from now on; raises UserError unless it can lend them."""
        self._source = lending(source)

    def evaluate(
        self, policy: Policy, seeds: Sequence[int], noise_seed: int, report: Report = lambda episodes, successes: None
    ) -> Outcomes:
        (env,) = self._made
        with self._source.lent():
            return evaluate(env, policy, seeds, noise_seed, report=report)

    def close(self) -> None:
        """The environments are those of training, which closes them."""


def require_same(env: EnvFactory) -> None:
    """Raise UserError for ``env`` whose environments to train in are others than those to validate in."""
    if not isinstance(env, EnvConfig) or env.training_options:
        raise UserError(
            f"{type(env).__name__} trains in other environments than it validates in, so they cannot be shared; set "
            "evaluation.share_env to False."
        )


def lending(source: ExperienceSource) -> LendingSource:
    """``source``; raises UserError unless it can lend its environments."""
    if not isinstance(source, LendingSource):
        raise UserError(
            f"{type(source).__name__} cannot lend its environments between two rollouts, so validation cannot share "
            "them; leave collectors at 1 and staleness at 0 in one process, or set evaluation.share_env to False."
        )
    return source
