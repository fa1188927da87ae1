"""A trained world model with the limits, threshold and horizon up to which its rollouts are trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch

from vla_rl.algorithms.ranking import Attempt, auroc
from vla_rl.contract.env import EnvSpec, VecEnv, on_host
from vla_rl.contract.policy import Policy
from vla_rl.evaluation.agreement import NEVER, ReplayAgreement, replay_agreement
from vla_rl.experience.driver import Driver
from vla_rl.experience.trajectories import Trajectories
from vla_rl.recipes import world_models
from vla_rl.recipes.context import CPU
from vla_rl.recipes.imagine.plan import Plan
from vla_rl.recipes.imagine.replays import replay_trajectories, success_probability
from vla_rl.training.world_model import load_world_model, save_world_model


@dataclass(frozen=True)
class CalibratedModel:
    """``limits`` of uncertainty by depth; ``imagination`` is the plan's with the trusted threshold and horizon."""

    model: world_models.WorldModel
    limits: world_models.Limits
    imagination: world_models.ImaginationConfig

    @classmethod
    def load(
        cls, folder: Path, imagination: world_models.ImaginationConfig, device: torch.device = CPU
    ) -> CalibratedModel:
        """What :meth:`save` wrote to ``folder``, its model on ``device``."""
        model, kept = load_world_model(folder)
        trusted = _trusted(imagination, kept["threshold"], kept["horizon"])
        return cls(model.to(device), world_models.limits(kept["limits"]), trusted)

    def save(self, folder: Path) -> None:
        """Write the model, limits, threshold and horizon."""
        trusted = {"threshold": self.imagination.success_threshold, "horizon": self.imagination.horizon}
        save_world_model(self.model, folder, {"limits": list(self.limits.values), **trusted})

    def agreement(self, trajectories: Trajectories) -> tuple[ReplayAgreement, ...]:
        """Recorded and imagined outcomes of the same actions, by horizon; uncertainty truncates, as in RL."""
        found = replay_trajectories(self.model, trajectories, self.imagination).within(self.limits)
        imagined = found.success_step(self.imagination.success_threshold)
        horizons = call_ends(self.model, trajectories, self.imagination)
        return replay_agreement(imagined, *recorded_success_steps(trajectories), horizons)

    def foresight(self, trajectories: Trajectories) -> tuple[float, int]:
        """AUROC of the success that is predicted where it is not decided yet, and how many pairs that is over.

        The probability that an episode will succeed, a call ahead of what was recorded, of a success and of a failure
        at the same control step; the last call of every episode is left out, since by then it can be seen.
        """
        value, frames = success_probability(self.model, trajectories), self.model.config.frames
        attempts = []
        for (begin, end), success in zip(trajectories.spans(), trajectories.outcomes, strict=True):
            time = np.arange(frames, end - 1 - begin, frames)  # ends of calls
            attempts.append(Attempt(time, value[begin + time].astype(np.float32), end - 1 - begin, bool(success), True))
        return auroc(attempts, frames)


def calibrate(model: world_models.WorldModel, trajectories: Trajectories, plan: Plan) -> CalibratedModel:
    """Choose limits, threshold and horizon on held-out ``trajectories``.

    Raises UserError when no horizon is trusted.
    """
    found = replay_trajectories(model, trajectories, plan.imagination)

    def imagined_success_steps(threshold: float, quantile: float) -> np.ndarray:
        limits = world_models.calibrate_limits(found.by_depth(), quantile)
        return found.within(limits).success_step(threshold)

    horizons = call_ends(model, trajectories, plan.imagination)
    trusted = plan.trust.choose(imagined_success_steps, *recorded_success_steps(trajectories), horizons)
    imagination = _trusted(plan.imagination, trusted.threshold, trusted.table.horizon)
    return CalibratedModel(model, world_models.calibrate_limits(found.by_depth(), trusted.quantile), imagination)


def _trusted(
    imagination: world_models.ImaginationConfig, threshold: float, horizon: int
) -> world_models.ImaginationConfig:
    """The plan's ``imagination`` with what is trusted now; a later calibration may trust as much as the plan allows."""
    return replace(imagination, success_threshold=threshold, horizon=horizon, longest=imagination.reach)


def call_ends(
    model: world_models.WorldModel, trajectories: Trajectories, imagination: world_models.ImaginationConfig
) -> list[int]:
    """Ends of calls, in control steps, up to the horizon of ``imagination`` and the longest of ``trajectories``.

    The last one may come in the middle of a call: success may be decided only there.
    """
    frames, longest = model.config.frames, int(recorded_success_steps(trajectories)[1].max())
    last = min(longest, imagination.horizon)
    return [*range(frames, last, frames), last]


def recorded_success_steps(trajectories: Trajectories) -> tuple[np.ndarray, np.ndarray]:
    """The control step of the first success of each of ``trajectories``, or NEVER; and its length."""
    length = np.array([end - begin - 1 for begin, end in trajectories.spans()])
    return np.where(trajectories.outcomes, length, NEVER), length


class ImaginedEnvFactory:
    """Makes imagined environments (an ``EnvFactory``), and renews all of them when the world model was trained."""

    def __init__(
        self,
        model: world_models.WorldModel,
        initial_states: world_models.Pool,
        limits: world_models.Limits | None,
        config: world_models.ImaginationConfig,
    ) -> None:
        """``limits`` None: uncertainty ends no rollout; ``config`` is that of the training environments."""
        self.model, self.initial_states, self.limits, self.config = model, initial_states, limits, config
        self._made: WeakSet[world_models.ImaginedEnv] = WeakSet()  # those that are still in use

    def make(self, num_envs: int) -> world_models.ImaginedEnv:
        """``num_envs`` imagined environments to evaluate in: every rollout is a whole episode."""
        return self._make(num_envs, replace(self.config, keyframe_share=0.0))

    def make_training(self, num_envs: int) -> VecEnv:
        """``num_envs`` imagined environments for reinforcement learning."""
        return self._make(num_envs, self.config)

    def spec(self) -> EnvSpec:
        """The spec of :meth:`make`."""
        return world_models.imagined_spec(self.model, self.config)

    def renew(
        self,
        initial_states: world_models.Pool,
        limits: world_models.Limits,
        config: world_models.ImaginationConfig,
    ) -> None:
        """Use other initial states, limits and numbers from now on, after the world model was trained further."""
        self.initial_states, self.limits, self.config = initial_states, limits, config
        for env in self._made:
            env.renew(initial_states, limits, config)

    def _make(self, num_envs: int, config: world_models.ImaginationConfig) -> world_models.ImaginedEnv:
        env = world_models.make_env(self.model, self.initial_states, num_envs, self.limits, config)
        self._made.add(env)
        return env


@dataclass(frozen=True)
class RolloutStatistics:
    """Imagined rollouts of a policy: shares of successes and of truncations by uncertainty, inverse-dynamics error."""

    success: float
    uncertain: float
    inverse_dynamics_error: float


def measure_rollouts(
    env: world_models.ImaginedEnv,
    model: world_models.WorldModel,
    policy: Policy,
    seeds: Sequence[int],
    noise: torch.Generator,
) -> RolloutStatistics:
    """Play one episode of ``policy``, exploring, in each environment of ``env``."""
    errors: list[torch.Tensor] = []

    def compare(before: torch.Tensor, after: torch.Tensor, actions: torch.Tensor) -> None:
        errors.append(model.inverse_dynamics_error(before, after, actions))

    env.on_call = compare
    driver = Driver(env, policy, noise)
    driver.start(seeds)
    *_, last = driver.until_done()
    error = float(torch.cat(errors).mean()) if errors else 0.0
    uncertain = float(np.mean([cause == "uncertainty" for cause in last.step.cause]))
    return RolloutStatistics(float(on_host(last.step.success).mean()), uncertain, error)
