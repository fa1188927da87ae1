"""Training, saving and loading of world models: ``world_models.model.WorldModel``, or any class with its methods.

When a world model needs real episodes again: the policy leaves its training data, and exploits its errors.

A policy that is improved in imagination learns to exploit what only the world model allows.  Three signals show it: the
policy succeeds more often in imagination than it did in reality; more rollouts are truncated by uncertainty than at
first; and the inverse dynamics estimate other actions from imagined pictures than were made.  Any of them buys a batch
of real episodes, played by the present policy, from a fixed budget.  Every decision is kept with its reasons.

Shares are of few episodes, so that equal ones differ by chance.  A share counts as higher when an interval of the
difference lies above what is allowed; with equal shares that happens in at most two of a hundred decisions.

(WoVR's PACE refines once, by hand; Yang et al. 2026, arXiv 2602.13977.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import difference
from vla_rl.contract.load import name_of
from vla_rl.contract.trust import named_class
from vla_rl.experience.demonstrations import (
    Trajectories,
    call_batch,
    context_at,
    frames_at,
    make_sequences,
    sequence_batch,
)
from vla_rl.pretrained import bounded, load_weights, read_config, save_folder
from vla_rl.training.fit import FitConfig, fit, shuffled, weighted

_REGISTRATION_FRAMES = 500  # pictures that the registration is fitted to
_ROLLOUT_BATCH = 64  # episodes imagined at once
_UNIFORM_SHARE = 0.1  # of the mode classifier's training data is drawn uniformly, whatever its uncertainty

Report: TypeAlias = Callable[[int, dict[str, float]], None]
TrainableWorldModel: TypeAlias = Any  # of a package that training does not import


@dataclass(frozen=True)
class WorldModelFit:
    """Schedules of the four stages: state dynamics, pose maps, video model, mode classifier.

    The mode classifier is trained last, because half of its pictures are imagined by the video model, along recorded
    states and actions.  Its data are drawn by the uncertainty of the state dynamics: most of what a robot does next
    follows from its actions alone.
    """

    state_dynamics: FitConfig = field(default_factory=lambda: FitConfig(steps=4000, batch=512, lr=2e-3))
    pose: FitConfig = field(default_factory=lambda: FitConfig(steps=400, batch=256, lr=2e-3))
    video: FitConfig = field(default_factory=lambda: FitConfig(steps=1200, batch=32, lr=1.5e-3))
    mode_classifier: FitConfig = field(default_factory=lambda: FitConfig(2000, 64, 1e-3, weight_decay=1e-2))

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(part.steps for part in (self.state_dynamics, self.pose, self.video, self.mode_classifier))


def fit_world_model(
    model: TrainableWorldModel,
    trajectories: Trajectories,
    config: WorldModelFit,
    generator: torch.Generator,
    report: Report = lambda step, info: None,
) -> None:
    """Train ``model`` on windows of ``trajectories``, in place; ``report(step, metrics)`` counts steps of all stages.

    Raises UserError for episodes of another environment, when all succeeded or all failed: the outcome could not be
    learnt, and for episodes without rewards if the model has a head for them.
    """
    require_same_env(model.spec, trajectories)
    require_both_outcomes(trajectories)
    if model.reward is not None:
        model.reward.fit(torch.from_numpy(trajectories.recorded_rewards()).to(model.device))
    trajectories = as_predicted(model, trajectories)
    device, table = model.device, make_sequences(trajectories, model.config.frames, model.config.context_frames)
    chosen = torch.randperm(len(trajectories.state), generator=generator)[:_REGISTRATION_FRAMES]
    model.fit_registration(_tensors(frames_at(trajectories, chosen.numpy()), device))
    count, done = len(table["count"]), 0

    def stage(part: str, fitted: FitConfig, loss: Any, batches: Iterable[dict[str, np.ndarray]]) -> None:
        """Fit ``part`` of the model; steps count on over the stages."""
        nonlocal done
        offset, done = done, done + fitted.steps
        given = (_tensors(batch, device) for batch in batches)
        fit(model.parameters_of(part), loss, given, fitted, lambda step, info: report(offset + step, info))

    def drawn(of: int, fitted: FitConfig, batch: Callable[[np.ndarray], Any]) -> Iterator[dict[str, np.ndarray]]:
        return (batch(index.numpy()) for index in shuffled(of, fitted.batch, generator))

    batches = drawn(count, config.state_dynamics, partial(call_batch, trajectories, table))
    stage("state_dynamics", config.state_dynamics, lambda it: model.state_dynamics_loss(it, generator), batches)
    batches = drawn(len(trajectories.state), config.pose, partial(frames_at, trajectories))
    stage("poses", config.pose, model.pose_loss, batches)
    batches = drawn(count, config.video, partial(sequence_batch, trajectories, table))
    stage("video", config.video, lambda it: model.loss(it, generator), batches)
    weights, imagined = _sampling_weights(model, trajectories, table), imagine_along(model, trajectories, generator)
    batches = _classifier_batches(trajectories, table, weights, *imagined, config.mode_classifier.batch, generator)
    stage("mode_classifier", config.mode_classifier, lambda it: model.mode_classifier_loss(it, generator), batches)


def imagine_along(
    model: TrainableWorldModel, trajectories: Trajectories, generator: torch.Generator
) -> tuple[Trajectories, np.ndarray]:
    """Imagined rollouts of the recorded actions, each to its episode's end, whose calls begin at random offsets.

    ``trajectories`` with imagined pictures at the ends of calls, and those time steps [N] with the initial ones.
    """
    frames, context = model.config.frames, model.config.context_frames
    begins, ends = (np.array(side) for side in zip(*trajectories.spans(), strict=True))
    offset = torch.randint(0, frames, (len(begins),), generator=generator).numpy()
    moment = np.minimum(begins + offset, ends - 1)
    imagined = replace(trajectories, images={name: item.copy() for name, item in trajectories.images.items()})
    moments = [moment]
    while (whole := moment + frames < ends).any():
        for part in np.array_split(moment[whole], -(-int(whole.sum()) // _ROLLOUT_BATCH)):
            ahead = part[:, None] + np.arange(1 + frames)
            batch = context_at(imagined, part, frames, context) | {"state": trajectories.state[ahead]}
            batch |= {"actions": trajectories.action[ahead[:, :-1]]}
            picture = model.predict_along(_tensors(batch, model.device), generator).cpu().numpy()
            for name, camera in zip(sorted(imagined.images), np.split(picture, len(imagined.images), 1), strict=True):
                imagined.images[name][ahead[:, -1]] = np.moveaxis(camera, 1, -1)
            moments.append(ahead[:, -1])
        moment = moment + frames
    return imagined, np.concatenate(moments)


def _sampling_weights(model: TrainableWorldModel, trajectories: Trajectories, table: dict[str, np.ndarray]) -> Tensor:
    """[N]: how often to train on each window of ``table``, 1 on average."""
    every = np.arange(len(table["count"]))
    parts = (call_batch(trajectories, table, part) for part in np.array_split(every, 1 + len(every) // 1024))
    share = torch.cat([model.mode_uncertainty(_tensors(part, model.device)).cpu() for part in parts])
    return _UNIFORM_SHARE + (1.0 - _UNIFORM_SHARE) * share / share.mean().clamp_min(1e-12)


def _classifier_batches(
    trajectories: Trajectories,
    table: dict[str, np.ndarray],
    weights: Tensor,
    imagined: Trajectories,
    moments: np.ndarray,
    batch: int,
    generator: torch.Generator,
) -> Iterator[dict[str, np.ndarray]]:
    """Windows drawn by ``weights`` [N], half with recorded pictures and half with imagined ones."""
    half, available = batch // 2, torch.from_numpy(np.isin(table["past"][:, -1], moments))
    recorded, others = weighted(weights, half, generator), weighted(weights * available, half, generator)
    for one, other in zip(recorded, others, strict=True):
        more = call_batch(imagined, table, other.numpy())
        yield {
            name: np.concatenate([it, more[name]]) for name, it in call_batch(trajectories, table, one.numpy()).items()
        }


def _tensors(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(item).to(device) for name, item in arrays.items()}


def require_same_env(spec: EnvSpec, trajectories: Trajectories) -> None:
    """Raise UserError unless ``trajectories`` have the cameras, sizes and instructions of ``spec``."""
    wanted = {name: tuple(item.shape) for name, item in spec.images.items()}
    given = {name: image.shape[1:] for name, image in trajectories.images.items()}
    sizes = (spec.state.shape[0], spec.action_dim), (trajectories.state.shape[1], trajectories.action.shape[1])
    known = bool(((trajectories.task >= 0) & (trajectories.task < len(spec.tasks))).all())
    if wanted != given or sizes[0] != sizes[1] or not known:
        raise UserError(
            f"the episodes have cameras {given}, {sizes[1][0]} state and {sizes[1][1]} action entries and task "
            f"{trajectories.task.max(initial=0)}, but {spec.name!r} has {wanted}, {sizes[0][0]}, {sizes[0][1]} and "
            f"{len(spec.tasks)} tasks, so a world model of it cannot learn from them; record episodes of it."
        )


def require_both_outcomes(trajectories: Trajectories) -> None:
    """Raise UserError when all ``trajectories`` succeeded, or none."""
    won = int(trajectories.outcomes.sum())
    if won in (0, trajectories.count):
        which = "all" if won else "none"
        raise UserError(
            f"{which} of {trajectories.count} episodes succeeded, so a world model could not learn success from "
            "failure; add episodes of the other kind, for example of the policy itself and of random play."
        )


def save_world_model(model: nn.Module, folder: Path, more: dict[str, Any] | None = None) -> None:
    """Write ``model`` as a checkpoint folder; ``more`` is added to its ``config.json`` (limits, horizon)."""
    kind = name_of(type(model))
    described = {"world_model": kind, "config": to_json(model.config), "spec": model.spec.to_json(), **(more or {})}  # type: ignore[operator,union-attr]
    save_folder(folder, described, model.state_dict())


def load_world_model(folder: Path, spec: EnvSpec | None = None) -> tuple[Any, dict[str, Any]]:
    """The world model in ``folder`` and its ``config.json``.

    Raises UserError for a damaged or foreign one and, given the ``spec`` of the environment that it is to
    predict, when it was trained for other cameras, states, action bounds, instructions or lengths of a control step.
    """
    saved = read_config(folder, "world_model")
    trained = EnvSpec.from_json(saved["spec"])
    if spec is not None:
        _require_same(trained, spec, folder)
    made_by = named_class(saved["world_model"])
    if not issubclass(made_by, nn.Module):
        raise UserError(
            f"{saved['world_model']!r} is no world model, so {str(folder)!r} cannot be loaded; check its config.json."
        )
    with bounded(folder, saved):
        model = made_by(trained, from_json(saved["config"]))
        load_weights(model, folder)
    return model.eval(), saved


def _require_same(trained: EnvSpec, spec: EnvSpec, folder: Path) -> None:
    parts = {"cameras": "images", "state": "state", "actions": "action", "instructions": "tasks"}
    parts["control steps"] = "control_dt"
    for what, name in parts.items():
        if getattr(trained, name) != getattr(spec, name):
            raise UserError(
                f"the world model {str(folder)!r} was trained for other {what} than {spec.name!r} has, so its "
                "predictions would mean something else; train one on episodes of this environment."
            )


def as_predicted(model: TrainableWorldModel, trajectories: Trajectories) -> Trajectories:
    """``trajectories`` as ``model`` sees them: pictures on its canvas, and at least one entry of state."""
    images = model.canvas.fit(trajectories.images)
    return replace(trajectories, images=images, state=at_least_one(trajectories.state))


def at_least_one(state: np.ndarray) -> np.ndarray:
    """``state`` [M,S], without proprioception one entry that is always 0."""
    return state if state.shape[1] else np.zeros((len(state), 1), np.float32)


def statistics(trajectories: Trajectories) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [S] of the recorded states; the latter at least 1e-3."""
    state = at_least_one(trajectories.state)
    return state.mean(0), np.maximum(state.std(0), 1e-3)


@dataclass(frozen=True)
class CoevolutionConfig:
    """How many real episodes may be bought, and for which signals."""

    budget: int = 0  # real episodes in all; three seeds show no gain from buying some (docs/results/imagination.md)
    batch: int = 50  # per purchase
    every: int = 12  # iterations of RL from one decision to the next
    success_gap: float = 0.0  # by which imagined success may exceed real success, as last played
    uncertainty_rise: float = 0.0  # of the share of rollouts truncated by uncertainty, above the baseline
    z: float = 2.576  # half-width of the intervals of both differences, in standard errors
    inverse_dynamics_ratio: float = 1.15  # of the inverse-dynamics error to the baseline

    def __post_init__(self) -> None:
        """Raise UserError for numbers that buy nothing sensible."""
        if self.z <= 0.0:
            raise UserError(
                f"an interval of {self.z:g} standard errors on either side lets chance buy real episodes; give "
                "coevolution.z above 0."
            )
        if self.budget < 0 or self.batch < 1 or self.every < 1:
            raise UserError(
                f"a budget of {self.budget} real episodes in batches of {self.batch} every {self.every} iterations "
                "cannot be spent; give a budget of at least 0 and at least 1 for the others."
            )


@dataclass(frozen=True)
class Signals:
    """What a decision depends on; shares are in [0, 1]."""

    imagined: float  # success in imagination
    real: float | None  # success in the real episodes that the policy played last, None if there are none
    uncertain: float  # share of imagined rollouts truncated by uncertainty
    inverse_dynamics_error: float  # see ``WorldModel.inverse_dynamics_error``
    rollouts: int  # imagined for these signals
    real_episodes: int


@dataclass(frozen=True)
class Decision:
    """``buy`` real episodes, for ``reasons``; 0 without any."""

    signals: Signals
    baseline: Signals  # after the world model was last trained
    buy: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Coevolution:
    """What was spent, and the signals when the world model was last trained."""

    config: CoevolutionConfig
    baseline: Signals
    spent: int = 0

    def decide(self, signals: Signals) -> Decision:
        """Whether to buy, given the present ``signals``."""
        config, baseline = self.config, self.baseline
        signs = {
            f"imagined success {signals.imagined:.0%} exceeds real success {signals.real or 0.0:.0%}": (
                self._exceeds(signals.imagined, signals, signals.real, signals.real_episodes, config.success_gap)
            ),
            f"uncertainty truncates {signals.uncertain:.0%} of the rollouts, at first {baseline.uncertain:.0%}": (
                self._exceeds(
                    signals.uncertain, signals, baseline.uncertain, baseline.rollouts, config.uncertainty_rise
                )
            ),
            f"inverse-dynamics error {signals.inverse_dynamics_error:.3f}, at first "
            f"{baseline.inverse_dynamics_error:.3f}": (
                signals.inverse_dynamics_error > baseline.inverse_dynamics_error * config.inverse_dynamics_ratio
            ),
        }
        reasons = tuple(reason for reason, fired in signs.items() if fired)
        buy = min(config.batch, config.budget - self.spent) if reasons else 0
        return Decision(signals, baseline, buy, reasons)

    def _exceeds(self, share: float, signals: Signals, other: float | None, others: int, allowed: float) -> bool:
        """Whether the interval of ``share`` of the rollouts minus ``other``, of ``others``, lies above ``allowed``."""
        if other is None:
            return False
        counts = (round(share * signals.rollouts), signals.rollouts), (round(other * others), others)
        return difference(*counts, self.config.z)[0] > allowed

    def renewed(self, signals: Signals, bought: int) -> Coevolution:
        """After training on ``bought`` real episodes, with the ``signals`` since."""
        return replace(self, baseline=signals, spent=self.spent + bought)
