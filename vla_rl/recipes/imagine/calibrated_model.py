"""A trained world model with the limits, threshold and horizon up to which its rollouts are trusted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vla_rl.algorithms.ranking import Attempt, auroc
from vla_rl.evaluation.agreement import NEVER, ReplayAgreement, replay_agreement
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
