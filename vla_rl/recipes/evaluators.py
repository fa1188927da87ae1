"""Evaluation on held-out seeds, in this process or shared by worker processes, and what else those do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, cast

import numpy as np

from vla_rl.contract.config import Checked, JsonObject, at_least, from_json, to_json, within
from vla_rl.contract.env import VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import Outcomes, evaluate
from vla_rl.experience.worker import Report
from vla_rl.policies.pretrained import load_policy
from vla_rl.pretrained import save_own
from vla_rl.recipes.config_files import load_kept_files
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.terminal import bar, console
from vla_rl.recipes.trainers import Trainable
from vla_rl.recipes.workers import enter, workers

OnEpisodes = Callable[[int, int | None], None]


@dataclass(frozen=True)
class EvaluationConfig(Checked):
    """How many held-out episodes, and how many are played side by side."""

    validation: int = within(256, 1, seed_ranges.MOST)
    test: int = within(512, 1, seed_ranges.MOST)
    ablation: int = within(256, 1, seed_ranges.MOST)  # validation seeds for each check of what the policy looks at
    num_envs: int = at_least(64, 1)
    processes: int = at_least(1, 1)  # that share the environments; 1: this one

    def evaluator(self, env: EnvFactory) -> Evaluator:
        return Evaluator(env, self.num_envs, self.processes)


def play(
    env: EnvFactory, policy: Policy, seeds: Sequence[int], config: EvaluationConfig, seed: int, what: str
) -> Outcomes:
    """Evaluate on ``seeds`` with a progress bar."""
    with bar(what, len(seeds)) as update, closing(config.evaluator(env)) as evaluator:
        return evaluator.evaluate(policy, seeds, seed, shown(update))


def shown(update: Callable[[int, str], None]) -> OnEpisodes:
    """Episodes on a :func:`bar`, and their success where the environment has one."""
    return lambda done, good: update(done, "" if good is None else f"success {good / done:.0%}")


class Evaluator:
    """Plays seeds in ``num_envs`` environments in all, in this process or in several worker processes.

    Each of those has its share of the environments and of the seeds.  Outcomes are those of
    :func:`vla_rl.evaluation.run.evaluate`, in the order of the seeds; see there what that means.
    """

    def __init__(self, env: EnvFactory, num_envs: int, processes: int) -> None:
        """``processes`` 1: this one.  Raises UserError for an environment that another process cannot make."""
        self.num_envs, self.processes = num_envs, processes
        self.env: VecEnv | None = env.make(num_envs) if processes == 1 else None
        self._remote = remote_env(env) if processes > 1 else {}

    def evaluate(
        self,
        policy: Policy,
        seeds: Sequence[int],
        noise_seed: int,
        report: OnEpisodes = lambda episodes, successes: None,
    ) -> Outcomes:
        """One episode for each seed; ``report(episodes, successes)`` is called whenever some end."""
        if self.env is not None:
            return evaluate(self.env, policy, seeds, noise_seed, report=report)
        count = max(1, min(self.processes, self.num_envs, len(seeds)))
        given = {"env": self._remote, "num_envs": self.num_envs // count, "noise_seed": noise_seed}
        parts = [[int(seed) for seed in seeds[part::count]] for part in range(count)]
        with saved(policy) as folder:
            jobs = [{**given, "policy": folder, "seeds": part} for part in parts]
            found = workers(count).map("evaluate", jobs, _summed(report, count))
        return _in_order(found)

    def close(self) -> None:
        """Close the environments of this process; those of others end with the run."""
        if self.env is not None:
            self.env.close()


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


def _summed(report: OnEpisodes, parts: int) -> list[OnEpisodes]:
    """A report for each of ``parts``; what all of them have counted reaches ``report``."""
    ended, lock = [(0, 0)] * parts, Lock()

    def part_report(part: int) -> OnEpisodes:
        def note(episodes: int, successes: int | None) -> None:
            with lock:
                ended[part] = (episodes, successes or 0)
                done, good = map(sum, zip(*ended, strict=True))
                report(done, None if successes is None else good)

        return note

    return [part_report(part) for part in range(parts)]


def _in_order(parts: Sequence[JsonObject]) -> Outcomes:
    """The outcomes of every ``len(parts)``-th seed each, as processes returned them, in the order of all seeds."""
    order = np.argsort(np.concatenate([np.arange(len(part["seeds"])) * len(parts) + i for i, part in enumerate(parts)]))
    arrays = ("seeds", "success", "length", "returns")
    merged: dict[str, Any] = {
        name: np.concatenate([np.asarray(on_host(part[name])) for part in parts])[order] for name in arrays
    }
    for name in ("cause", "family"):
        texts = [text for part in parts for text in part[name]]
        merged[name] = tuple(texts[i] for i in order)
    return Outcomes(**merged, has_success=parts[0]["has_success"])


class Jobs:
    """What worker processes do besides collecting, by name, with policies that lie in folders; configs come as JSON."""

    def __init__(self, run: str) -> None:
        console.quiet = True  # progress bars are those of the process that asks
        if run:
            load_kept_files(Path(run))

    def evaluate(
        self, env: JsonObject, policy: str, seeds: list[int], num_envs: int, noise_seed: int, report: Report
    ) -> JsonObject:
        config: EnvConfig = from_json(env)
        with closing(config.make(num_envs)) as made:
            return vars(evaluate(made, load_policy(policy, config.spec()), seeds, noise_seed, report=report))

    def play_block(self, block: JsonObject, disk: JsonObject, report: Report) -> None:
        """Play a ``Block`` of a suite; ``report`` gets the fields of every episode's result.

        Raises UserError on a machine that does not see the ``disk`` (see ``SharedDisk``) on which its files are.
        """
        enter(**disk)
        from_json(block).play(lambda result: report(asdict(result)))

    def check_perception(
        self, env: JsonObject, policy: str, check: str, seeds: list[int], num_envs: int, noise_seed: int
    ) -> JsonObject:
        """``rates``: the fields of the rates that ``check`` finds, see there."""
        from vla_rl.recipes.perception_ablation import check_perception  # which asks for these jobs

        config: EnvConfig = from_json(env)
        loaded = load_policy(policy, config.spec())
        rates = check_perception(config, loaded, check, seeds, num_envs, noise_seed)
        return {"rates": [asdict(rate) for rate in rates]}
