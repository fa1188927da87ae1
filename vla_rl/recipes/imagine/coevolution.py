"""A learned world at work: what it was learnt from, how far it may be trusted, and when it needs more of reality.

Everything lies in the run folder, so a run that was stopped goes on from there:

    episodes/learnt.npz        recorded episodes
    episodes/bought-1.npz ...  those bought later
    episodes/calibration.npz   held out: they set the limits of doubt, the threshold of success and the horizon
    episodes/held_out.npz      held out: agreement is reported on these
    episodes/own.json          how often the policy succeeded before RL, exploring
    checkpoints/first          the world model before anything was bought, trusted or not
    checkpoints/world          and as it is now, with its limits, threshold and horizon
    coevolution.json           every decision, and what was usual before it
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from vla_rl.contract.batch import ExperienceSource, Resumable, Rollout
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import suite
from vla_rl.evaluation.agreement import NEVER, ReplayAgreement, TrustConfig, replay_agreement
from vla_rl.experience.background import CollectingSource
from vla_rl.experience.collect import collect_trajectories
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.trajectories import Trajectories
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.context import RunContext, Trainable, generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.collect import Gather, Gathered, gather, told
from vla_rl.recipes.imagine.imagined_env import DreamWorld, promise, replayed, starts_of, watch
from vla_rl.recipes.progress import bar, console
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.training.coevolve import Coevolution, CoevolutionConfig, Decision, Signals
from vla_rl.training.fit import FitConfig
from vla_rl.training.loop import LoopConfig, LoopLearner
from vla_rl.training.tracking import RunFolder, write_json
from vla_rl.training.world_model import WorldFit, fit_world, load_world, save_world, statistics

_WATCHED = 128  # dreams for one decision


def _little() -> WorldFit:
    rate = 5e-4
    return WorldFit(
        FitConfig(300, 512, rate), FitConfig(30, 256, rate), FitConfig(60, 32, rate), FitConfig(600, 64, rate, 1e-2)
    )


@dataclass(frozen=True)
class Plan:
    """How a world is to be learnt, and how far it is to be trusted."""

    model: Any  # a ``world_models.model:WorldConfig``
    dream: Any  # a ``world_models.env:DreamConfig``; its horizon is the longest that may be trusted
    keyframes: Any  # a ``world_models.keyframes:KeyframeConfig``
    gather: Gather = field(default_factory=Gather)
    begin_with: str = ""  # a run whose gathered episodes and first world model are taken; without one, they are made
    demonstrations: str = ""  # folder of a dataset that is learnt from as well
    fit: WorldFit = field(default_factory=WorldFit)
    refit: WorldFit = field(default_factory=_little)  # after episodes were bought
    trust: TrustConfig = field(default_factory=TrustConfig)
    begun: int = 500  # dreams begin in the latest episodes, so many of them
    coevolution: CoevolutionConfig = field(default_factory=CoevolutionConfig)
    device: str = "cpu"  # where the world model learns and dreams, such as "cuda"; the policy stays where it is


@dataclass(frozen=True)
class Trained:
    """A world model and how far it is trusted."""

    model: Any
    limits: Any  # of doubt, by depth
    dream: Any  # the plan's, with the threshold and the horizon that are trusted

    @classmethod
    def load(cls, folder: Path, dream: Any, device: str = "cpu") -> Trained:
        """What :meth:`save` kept in ``folder``, its model on ``device``."""
        model, kept = load_world(folder)
        limits = load("world_models.uncertainty:Limits")(tuple(kept["limits"]))
        return cls(model.to(device), limits, replace(dream, done=kept["threshold"], horizon=kept["horizon"]))

    def save(self, folder: Path) -> None:
        """Keep it all."""
        kept = {"limits": list(self.limits.values), "threshold": self.dream.done, "horizon": self.dream.horizon}
        save_world(self.model, folder, kept)

    def agreement(self, trajectories: Trajectories) -> tuple[ReplayAgreement, ...]:
        """Replays of recorded episodes, as dreams are that end in doubt, against what was recorded, by horizon."""
        found = replayed(self.model, trajectories, self.dream).within(self.limits)
        return replay_agreement(
            found.done_by(self.dream.done), *truth(trajectories), horizons(self.model, trajectories, self.dream)
        )


class GrowingWorld:
    """The world model of a run, and its dreams."""

    def __init__(self, plan: Plan, world: EnvConfig, seed: int, folder: RunFolder, policy: TinyVLA) -> None:
        """Gather with ``policy`` in ``world``, learn and calibrate, as far as an earlier part of the run has not.

        Raises UserError, before anything is played, when there is no such device.
        """
        _require(plan.device)
        self.plan, self.world, self.seed, self.folder = plan, world, seed, folder
        gathered = Gathered.load(self._episodes) or self._gather(policy)
        self.calibration, self.held_out = gathered.calibration, gathered.held_out
        bought = [Trajectories.load(path) for path in self._bought()]
        self.bought = sum(trajectories.count for trajectories in bought)
        self.learnt = Trajectories.joined([*self._demonstrations(policy.spec.tasks), gathered.learnt, *bought])
        kept = folder.checkpoint("world")
        if (kept / "config.json").exists():
            self.trained = Trained.load(kept, plan.dream, plan.device)
        else:
            self.trained = self._first()
        self.dreams = DreamWorld(self.trained.model, self._starts(), self.trained.limits, self.trained.dream)
        self.decisions: list[dict[str, Any]] = self._decided()
        if not self.decisions:
            first = self._signals(policy, gathered.own, 0)
            self._note(Decision(first, first, 0, ()), first, 0)

    @property
    def _episodes(self) -> Path:
        return self.folder.path / "episodes"

    def _bought(self) -> list[Path]:
        return sorted(self._episodes.glob("bought-*.npz"), key=lambda path: int(path.stem.partition("-")[2]))

    def _demonstrations(self, tasks: tuple[str, ...]) -> list[Trajectories]:
        """The recorded demonstrations, whose texts are counted as in ``tasks``; none when there are none."""
        if not self.plan.demonstrations:
            return []
        return [Trajectories.from_demonstrations(load_demonstrations(Path(self.plan.demonstrations)).with_tasks(tasks))]

    # -- learning ---------------------------------------------------------------------------------------------------

    def _gather(self, policy: TinyVLA) -> Gathered:
        """Episodes of this run, or of the one that it begins with."""
        begun = self.plan.begin_with
        found = (
            Gathered.load(Path(begun) / "episodes")
            if begun
            else gather(self.world, policy, self.plan.gather, self.seed)
        )
        if found is None:
            raise UserError(
                f"{begun!r} holds no gathered episodes, so nothing could be begun with; name a folder that vla-rl "
                "imagine made."
            )
        found.save(self._episodes)
        return found

    def _first(self) -> Trained:
        """The world model as it is learnt at first, by this run or the one that it begins with: trust is its own.

        Raises UserError when no horizon is trusted; what was learnt is kept, for a run that asks for less.
        """
        model = self._begun() if self.plan.begin_with else self._learn(self._new_model(), self.plan.fit)
        save_world(model, self.folder.checkpoint("first"))
        try:
            trained = self._calibrated(model)
        except UserError as error:
            kept = f"The world model is kept: --plan.begin-with {self.folder.path} asks again without learning."
            raise UserError(f"{error} {kept}") from error
        trained.save(self.folder.checkpoint("world"))
        return trained

    def _begun(self) -> Any:
        model, _ = load_world(Path(self.plan.begin_with) / "checkpoints" / "first", self.world.spec())
        return model.to(self.plan.device)

    def _new_model(self) -> Any:
        torch.manual_seed(self.seed)  # module initialisation has no generator argument
        model = load("world_models.model:WorldModel")(self.world.spec(), self.plan.model, *statistics(self.learnt))
        return model.to(self.plan.device)

    def _learn(self, model: Any, fit: WorldFit) -> Any:
        """Train ``model`` further, on everything that is recorded for it."""

        def report(step: int, info: dict[str, float]) -> None:
            shown = (
                f"{name} {info[name]:.3f}" for name in ("motion", "touch", "pose", "video", "outcome") if name in info
            )
            update(step + 1, ", ".join(shown))
            if (step + 1) % 25 == 0:
                self.folder.log(f"world after {self.bought} bought", step, info)

        with bar("learn the world", fit.steps) as update:
            fit_world(model.train(), self.learnt, fit, generator(self.seed, 2000 + self.bought), report)
        return model.eval()

    def _calibrated(self, model: Any) -> Trained:
        """Limits of doubt, threshold and horizon."""
        plan, trajectories = self.plan, self.calibration
        found = replayed(model, trajectories, plan.dream)

        def limits(quantile: float) -> Any:
            return load("world_models.uncertainty:Limits").calibrate(found.by_depth(), quantile)

        def done_by(threshold: float, quantile: float) -> np.ndarray:
            done: np.ndarray = found.within(limits(quantile)).done_by(threshold)
            return done

        trusted = plan.trust.choose(done_by, *truth(trajectories), horizons(model, trajectories, plan.dream))
        dream = replace(plan.dream, done=trusted.threshold, horizon=trusted.table.horizon)
        return Trained(model, limits(trusted.quantile), dream)

    def _starts(self) -> Any:
        model, count = self.trained.model, self.learnt.count
        latest = self.learnt.select(np.arange(max(0, count - self.plan.begun), count))
        return starts_of(model, latest, promise(model, latest), self.plan.keyframes)

    # -- growing ----------------------------------------------------------------------------------------------------

    def grow(self, policy: Policy, iteration: int) -> bool:
        """Before ``iteration`` of RL: whether reality is needed; buy it.  Says whether the dreams have changed."""
        config, last = self.plan.coevolution, self.decisions[-1]
        if iteration < last["iteration"] + config.every:
            return False
        usual = Signals(**last["usual"])
        signals = self._signals(policy, usual.real, iteration)
        decision = Coevolution(config, usual, self.bought).decide(signals)
        if decision.buy:
            real = self._buy(policy, decision.buy)
            usual = self._signals(policy, real, iteration)
        self._note(decision, usual, iteration)
        return decision.buy > 0

    def _signals(self, policy: Policy, real: float, iteration: int) -> Signals:
        env, seeds = self.dreams.make(_WATCHED), suite.held_out(suite.VALIDATION, _WATCHED, 10_000)
        seen = watch(env, self.trained.model, policy, seeds, generator(self.seed, 1000 + iteration))
        return Signals(seen.success, real, seen.doubt, seen.slip)

    def _buy(self, policy: Policy, count: int) -> float:
        """Play ``count`` real episodes and learn from them; returns their success."""
        plan, number = self.plan, len(self._bought()) + 1
        env = self.world.make_training(plan.gather.num_envs)
        seeds = suite.training_seeds(self.seed, "dreams")[plan.gather.episodes + self.bought :][:count]
        with bar("buy episodes", count) as update:
            fresh = collect_trajectories(
                env, policy, list(seeds), generator(self.seed, 3000 + number), "sample", told(update)
            )
        env.close()
        fresh.save(self._episodes / f"bought-{number}.npz")
        self.bought += count
        self.learnt = Trajectories.joined([self.learnt, fresh])
        self.trained = self._calibrated(self._learn(self.trained.model, plan.refit))
        self.trained.save(self.folder.checkpoint("world"))
        self.dreams.renew(self._starts(), self.trained.limits, self.trained.dream)
        return float(fresh.outcomes.mean())

    def _note(self, decision: Decision, usual: Signals, iteration: int) -> None:
        """Keep a decision, and ``usual`` after it."""
        entry = asdict(replace(decision, usual=usual)) | {"iteration": iteration, "bought": self.bought}
        self.decisions.append(entry)
        write_json(self.folder.path / "coevolution.json", self.decisions)
        self.folder.log("coevolution", iteration, {**asdict(decision.signals), "buy": decision.buy})
        for reason in decision.reasons:
            console.print(f"iteration {iteration}: {reason}; bought {decision.buy} real episodes.")

    def _decided(self) -> list[dict[str, Any]]:
        path = self.folder.path / "coevolution.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


@dataclass(frozen=True)
class Growing:
    """``trainer``, in imagination, whose world model keeps learning beside the policy (a ``TrainerConfig``)."""

    trainer: TrainerConfig
    world: GrowingWorld

    def __post_init__(self) -> None:
        """Raises UserError for a rollout ahead: it would be played while the world model changes."""
        if self.trainer.loop.rollouts_ahead:
            raise UserError(
                "a world model that keeps learning cannot be played in one rollout ahead, so this run cannot be "
                "repeated; set rollouts_ahead to 0."
            )

    @property
    def loop(self) -> LoopConfig:
        return self.trainer.loop

    def build_env(self, context: RunContext) -> VecEnv:
        return self.trainer.build_env(context)

    def build_policy(self, context: RunContext) -> Trainable:
        return self.trainer.build_policy(context)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        return self.trainer.build_learner(context, env, policy)

    def build_source(self, context: RunContext, env: VecEnv, policy: Trainable) -> CollectingSource:
        return self.trainer.build_source(context, env, policy)

    def pretrain(self, learner: LoopLearner) -> None:
        self.trainer.pretrain(learner)

    def whole_source(self, source: ExperienceSource, policy: Trainable) -> ExperienceSource:
        """``source``, whose imagination is renewed when the world model needs real episodes."""
        whole = self.trainer.whole_source(source, policy)
        return GrowingSource(whole, self.world, policy, self.loop.iterations)


class GrowingSource:
    """``source`` in an imagination that is renewed when its world model needs real episodes (``RenewableSource``)."""

    def __init__(self, source: ExperienceSource, world: GrowingWorld, policy: Policy, iterations: int) -> None:
        self.source, self.world, self.policy, self.iterations = source, world, policy, iterations

    def next(self) -> Rollout:
        return self.source.next()

    def renew(self, progress: float) -> bool:
        """Collect real episodes and fit the world model again if it needs them; returns whether it did."""
        return self.world.grow(self.policy, round(progress * self.iterations))

    def state_dict(self) -> dict[str, Any]:
        return cast(Resumable, self.source).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        cast(Resumable, self.source).load_state_dict(state)


def _require(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without it
        raise UserError(
            f"{device!r} is no device that can be used here ({str(error).splitlines()[0]}), so no world model could "
            "dream there; choose cpu, or one that vla-rl inspect lists."
        ) from error


def horizons(model: Any, trajectories: Trajectories, dream: Any) -> list[int]:
    """Ends of calls, in control steps, up to the horizon of ``dream`` and the longest of ``trajectories``."""
    frames, longest = model.config.frames, int(truth(trajectories)[1].max())
    return list(range(frames, min(longest, dream.horizon) + 1, frames))


def truth(trajectories: Trajectories) -> tuple[np.ndarray, np.ndarray]:
    """When each of ``trajectories`` was first a success, in control steps, or NEVER; and how long it is."""
    length = np.array([end - begin - 1 for begin, end in trajectories.spans()])
    return np.where(trajectories.outcomes, length, NEVER), length
