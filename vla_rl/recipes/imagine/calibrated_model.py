"""A trained world model with the limits, threshold and horizon up to which its rollouts are trusted.

How it is trained and calibrated on recorded episodes, replays them, and where its imagined rollouts begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch

from vla_rl.algorithms.guard import Attempt, auroc
from vla_rl.contract.env import EnvSpec, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.trust import read_json
from vla_rl.evaluation.agreement import NEVER, ReplayAgreement, replay_agreement
from vla_rl.experience.demonstrations import Trajectories, context_at
from vla_rl.experience.driver import Driver
from vla_rl.recipes import world_models
from vla_rl.recipes.imagine.plan import Plan, RunEpisodes
from vla_rl.recipes.terminal import bar
from vla_rl.recipes.trainers import CPU, generator
from vla_rl.training.device import fastest_precision
from vla_rl.training.tracking import RunFolder, write_json
from vla_rl.training.world_model import (
    Signals,
    WorldModelFit,
    as_predicted,
    fit_world_model,
    load_world_model,
    save_world_model,
    statistics,
)

_BATCH = 64  # moments whose value is predicted together


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
        return cls(model.to(device), world_models.Limits(tuple(kept["limits"])), trusted)

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


_SHOWN = ("state_dynamics", "mode_classifier", "pose", "video", "outcome", "reward")  # losses beside the progress bar


def load_or_train(
    folder: RunFolder, spec: EnvSpec, episodes: RunEpisodes, plan: Plan, seed: int, device: torch.device
) -> CalibratedModel:
    """The calibrated world model before any purchase, as an earlier part of the run left it or new ("first", "world").

    The weights come from training, or from the run ``plan.init_from``; the calibration is always this run's.  Raises
    UserError when no horizon is trusted; the weights are kept, for a run that asks for less.
    """
    kept = world_after(folder, 0)
    if (kept / "config.json").exists():
        return CalibratedModel.load(kept, plan.imagination, device)
    if plan.init_from:
        model = load_world_model(Path(plan.init_from) / "checkpoints" / "first", spec)[0].to(device)
    else:
        torch.manual_seed(seed)  # module initialisation has no generator argument
        config = replace(plan.model, precision=_precision(folder, plan, device))
        model = world_models.WorldModel(spec, config, *statistics(episodes.learnt)).to(device)
        train_model(model, episodes, plan.fit, seed, folder)
    save_world_model(model, folder.checkpoint("first"))
    try:
        calibrated = calibrate(model, episodes.calibration, plan)
    except UserError as error:
        hint = f"The world model is kept: --plan.init-from {folder.path} calibrates it again without training."
        raise UserError(f"{error} {hint}") from error
    calibrated.save(kept)
    return calibrated


def world_after(folder: RunFolder, purchases: int) -> Path:
    """The checkpoint of the world model after so many purchases: "world", or "world-<n>" where that is a later one."""
    earlier = folder.checkpoint(f"world-{purchases}")
    return earlier if (earlier / "config.json").exists() else folder.checkpoint("world")


def train_model(
    model: world_models.WorldModel, episodes: RunEpisodes, fit: WorldModelFit, seed: int, folder: RunFolder
) -> None:
    """Train ``model`` in place on all of ``episodes.learnt``."""

    def report(step: int, info: dict[str, float]) -> None:
        update(step + 1, ", ".join(f"{name} {info[name]:.3f}" for name in _SHOWN if name in info))
        if (step + 1) % 25 == 0:
            folder.log(f"world after {episodes.bought} bought", step, info)

    with bar("train the world model", fit.steps) as update:
        fit_world_model(model.train(), episodes.learnt, fit, generator(seed, 2000 + episodes.bought), report)
    model.eval()


def _precision(folder: RunFolder, plan: Plan, device: torch.device) -> str:
    """The plan's precision; "auto" is measured once in a run and kept in ``RUN/precision.json``."""
    if plan.model.precision != "auto":
        return str(plan.model.precision)
    kept = folder.path / "precision.json"
    if not kept.exists():
        write_json(kept, fastest_precision(device))
    return str(read_json(kept))


def calibrate(model: world_models.WorldModel, trajectories: Trajectories, plan: Plan) -> CalibratedModel:
    """Choose limits, threshold and horizon on held-out ``trajectories``.

    Raises UserError when no horizon is trusted.
    """
    found = replay_trajectories(model, trajectories, plan.imagination)

    def imagined_success_steps(threshold: float, quantile: float) -> np.ndarray:
        limits = world_models.Limits.calibrate(found.by_depth(), quantile)
        return found.within(limits).success_step(threshold)

    horizons = call_ends(model, trajectories, plan.imagination)
    trusted = plan.trust.choose(imagined_success_steps, *recorded_success_steps(trajectories), horizons)
    imagination = _trusted(plan.imagination, trusted.threshold, trusted.table.horizon)
    return CalibratedModel(model, world_models.Limits.calibrate(found.by_depth(), trusted.quantile), imagination)


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
        return self._make(num_envs, self.config)

    def spec(self) -> EnvSpec:
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
        env = world_models.ImaginedEnv(self.model, self.initial_states, num_envs, self.limits, config)
        self._made.add(env)
        return env


def measure_rollouts(
    env: world_models.ImaginedEnv,
    model: world_models.WorldModel,
    policy: Policy,
    seeds: Sequence[int],
    noise: torch.Generator,
    real: tuple[float | None, int] = (None, 0),
) -> Signals:
    """Play one episode of ``policy``, exploring, in each environment of ``env``.

    ``real``: its success in the simulator, as last played, and in how many episodes.
    """
    errors: list[torch.Tensor] = []

    def compare(before: torch.Tensor, after: torch.Tensor, actions: torch.Tensor) -> None:
        errors.append(model.inverse_dynamics_error(before, after, actions))

    env.on_call = compare
    driver = Driver(env, policy, noise)
    driver.start(seeds)
    *_, last = driver.until_done()
    error = float(torch.cat(errors).mean()) if errors else 0.0
    uncertain = float(np.mean([cause == "uncertainty" for cause in last.step.cause]))
    return Signals(float(on_host(last.step.success).mean()), real[0], uncertain, error, len(seeds), real[1])


def replay_trajectories(
    model: world_models.WorldModel, trajectories: Trajectories, config: world_models.ImaginationConfig
) -> world_models.ReplayResult:
    """Replay every one of ``trajectories`` from its first moment to its last action.

    Once for each noise that an imagined success must hold under (``config.resamples``); the success probability is the
    smallest of them, everything else that of the first noise.
    """
    spans = trajectories.spans()
    moments = recorded_moments(model, trajectories)
    actions = [trajectories.action[begin : end - 1] for begin, end in spans]
    times, found = 1 + config.resamples, []
    with bar("replay", times * len(spans)) as update:
        for resample in range(times):
            noisy, before = replace(config, noise_seed=config.noise_seed + resample), resample * len(spans)

            def progress(done: int, before: int = before) -> None:
                update(before + done, "episodes")

            found.append(world_models.replay(model, moments, actions, noisy, progress))
    return replace(found[0], success=np.min([one.success for one in found], 0))


def success_probability(model: world_models.WorldModel, trajectories: Trajectories) -> np.ndarray:
    """float [M]: the model's probability of success in the end, at every moment of ``trajectories``.

    Predicted at the ends of calls along the recorded actions, and interpolated between.
    """
    trajectories = as_predicted(model, trajectories)
    config, frames, spans = model.config, model.config.frames, trajectories.spans()
    starts = [(m, end) for begin, end in spans for m in range(begin, end - 1, frames)]
    moments = np.array([m for m, _ in starts])
    known = np.array([min(frames, end - 1 - m) for m, end in starts])
    context = context_at(trajectories, moments, frames, config.context_frames)
    ahead = np.minimum(moments[:, None] + np.arange(frames), (moments + known - 1)[:, None])
    noise_source, predicted = generator(0, 32), []
    with bar("value", len(moments)) as update:
        for first in range(0, len(moments), _BATCH):
            part = slice(first, first + _BATCH)
            given = {name: context[name][part] for name in ("pictures", "state", "task")}
            batch = {name: torch.from_numpy(item).to(model.device) for name, item in given.items()}
            noise = torch.randn(len(moments[part]), config.pictures, *model.video.latent, generator=noise_source)
            inputs = (torch.from_numpy(trajectories.action[ahead[part]]), torch.from_numpy(known[part]), noise)
            actions, counts, noise = (item.to(model.device) for item in inputs)
            future = model.predict(world_models.Context(**batch), actions, counts, noise)
            predicted.append(future.outcome[:, 2].cpu().numpy())
            update(min(first + _BATCH, len(moments)), "moments")
    value, at_ends, ends = np.zeros(len(trajectories.state)), np.concatenate(predicted), moments + known
    for begin, end in spans:
        inside = (ends > begin) & (ends < end)
        value[begin:end] = np.interp(np.arange(begin, end), ends[inside], at_ends[inside])
    return value


def mine_initial_states(
    model: world_models.WorldModel,
    trajectories: Trajectories,
    value: np.ndarray | None,
    keyframes: world_models.KeyframeConfig,
) -> world_models.InitialStatePool:
    """First moments of ``trajectories``, and keyframes mined with ``value`` [M]; None: no keyframes."""
    spec, mined = model.spec, np.zeros(0, np.int64)
    if value is not None:
        span = np.subtract(spec.action.high, spec.action.low) * np.ones(spec.action_dim)
        success, spans = trajectories.success, trajectories.spans()
        found = world_models.mine(trajectories.action, span, value, success, spans, keyframes)
        mined = np.unique(np.concatenate([*found.values()]))
    first = recorded_moments(model, trajectories)
    return world_models.InitialStatePool(first, recorded_moments(model, trajectories, mined))


def recorded_initial_states(model: world_models.WorldModel, trajectories: Trajectories) -> world_models.OrderedPool:
    """The first moments of ``trajectories`` in their order: seed ``i`` begins in episode ``i``."""
    return world_models.OrderedPool(recorded_moments(model, trajectories))


def recorded_moments(
    model: world_models.WorldModel, trajectories: Trajectories, moments: np.ndarray | None = None
) -> world_models.InitialStates:
    """Context frames, states and tasks at ``moments`` int [N]; None: the first ones."""
    if moments is None:
        moments = np.array([begin for begin, _ in trajectories.spans()])
    config, seen = model.config, as_predicted(model, trajectories)
    return world_models.InitialStates(**context_at(seen, moments, config.frames, config.context_frames))
