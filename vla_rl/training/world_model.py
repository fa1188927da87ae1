"""Training, calibrating and keeping a world model, which comes as an object: nothing here knows how it predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.trajectories import Trajectories
from vla_rl.experience.windows import call_batch, context_at, frames_at, make_windows, window_batch
from vla_rl.pretrained import load_weights, read_config, save_folder
from vla_rl.training.fit import FitConfig, fit, shuffled, weighted

_REGISTERED = 500  # pictures that say where the robot is
_TOGETHER = 64  # dreamt at once
_SURE = 0.1  # share of looks that are taken at any moment, sure or not


class Learns(Protocol):
    """A world model as training sees it."""

    spec: EnvSpec
    config: Any

    @property
    def device(self) -> torch.device: ...

    def motion_loss(self, batch: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, float]]: ...

    def loss(self, batch: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, float]]: ...

    def touch_loss(self, batch: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, float]]: ...

    def unsure(self, batch: dict[str, Tensor]) -> Tensor: ...

    def aim(self, batch: dict[str, Tensor]) -> None: ...

    def pose_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]: ...

    def motion_parameters(self) -> dict[str, nn.Parameter]: ...

    def touch_parameters(self) -> dict[str, nn.Parameter]: ...

    def follow(self, batch: dict[str, Tensor], generator: torch.Generator) -> Tensor: ...

    def pose_parameters(self) -> dict[str, nn.Parameter]: ...

    def other_parameters(self) -> dict[str, nn.Parameter]: ...


@dataclass(frozen=True)
class WorldFit:
    """How long to learn where the robot may go, how it looks there, what all looks like, and where it does go.

    The last comes last because it is told from pictures, and in dreams from dreamt ones: dreams along the episodes,
    where the robot goes as it did, are half of what it is learnt from.  Of both, moments count as their way is
    unsure without a look: most of what a robot does is as sure as its motors.
    """

    motion: FitConfig = field(default_factory=lambda: FitConfig(steps=4000, batch=512, lr=2e-3))
    pose: FitConfig = field(default_factory=lambda: FitConfig(steps=400, batch=256, lr=2e-3))
    video: FitConfig = field(default_factory=lambda: FitConfig(steps=1200, batch=32, lr=1.5e-3))
    touch: FitConfig = field(default_factory=lambda: FitConfig(2000, 64, 1e-3, weight_decay=1e-2))

    @property
    def steps(self) -> int:
        """Of all."""
        return sum(part.steps for part in (self.motion, self.pose, self.video, self.touch))


@dataclass(frozen=True)
class Dreamt:
    """``trajectories`` whose pictures at ``moments`` [N] are dreamt, but where dreams begin."""

    trajectories: Trajectories
    moments: np.ndarray


def fit_world(
    model: Learns,
    trajectories: Trajectories,
    config: WorldFit,
    generator: torch.Generator,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> None:
    """Train ``model`` on windows of ``trajectories``, in place.

    Raises UserError for episodes of another world, and when all of them ended alike: what tells success from failure
    could not be learnt.
    """
    require_world_of(model.spec, trajectories)
    require_both_outcomes(trajectories)
    table = make_windows(trajectories, model.config.frames, model.config.memory)
    count, begun = len(table["count"]), 0

    def told(step: int, info: dict[str, float]) -> None:
        report(begun + step, info)

    made = (
        _tensors(call_batch(trajectories, table, part), model.device)
        for part in _parts(count, config.motion, generator)
    )
    fit(model.motion_parameters(), lambda batch: model.motion_loss(batch, generator), made, config.motion, told)
    begun += config.motion.steps
    shown = (
        _tensors(frames_at(trajectories, part), model.device)
        for part in _parts(len(trajectories.state), config.pose, generator)
    )
    fit(model.pose_parameters(), model.pose_loss, shown, config.pose, told)
    begun += config.pose.steps
    seen = (
        _tensors(window_batch(trajectories, table, part), model.device)
        for part in _parts(count, config.video, generator)
    )
    fit(model.other_parameters(), lambda batch: model.loss(batch, generator), seen, config.video, told)
    begun += config.video.steps
    chosen = torch.randperm(len(trajectories.state), generator=generator)[:_REGISTERED]
    model.aim(_tensors(frames_at(trajectories, chosen.numpy()), model.device))
    unsure, dreamt = _unsure(model, trajectories, table), followed(model, trajectories, generator)
    felt = (
        _tensors(batch, model.device) for batch in _felt(trajectories, table, unsure, dreamt, config.touch, generator)
    )
    fit(model.touch_parameters(), lambda batch: model.touch_loss(batch, generator), felt, config.touch, told)


def followed(model: Learns, trajectories: Trajectories, generator: torch.Generator) -> Dreamt:
    """Imagined rollouts along ``trajectories``, each to its end, in calls that begin at any offset."""
    frames, memory = model.config.frames, model.config.memory
    begins, ends = (np.array(side) for side in zip(*trajectories.spans(), strict=True))
    now = np.minimum(begins + torch.randint(0, frames, (len(begins),), generator=generator).numpy(), ends - 1)
    dreamt = replace(trajectories, images={name: item.copy() for name, item in trajectories.images.items()})
    moments = [now]
    while (whole := now + frames < ends).any():
        for part in np.array_split(now[whole], -(-int(whole.sum()) // _TOGETHER)):
            ahead = part[:, None] + np.arange(1 + frames)
            batch = context_at(dreamt, part, frames, memory) | {"state": trajectories.state[ahead]}
            batch |= {"actions": trajectories.action[ahead[:, :-1]]}
            picture = model.follow(_tensors(batch, model.device), generator).cpu().numpy()
            for name, camera in zip(sorted(dreamt.images), np.split(picture, len(dreamt.images), 1), strict=True):
                dreamt.images[name][ahead[:, -1]] = np.moveaxis(camera, 1, -1)
            moments.append(ahead[:, -1])
        now = now + frames
    return Dreamt(dreamt, np.concatenate(moments))


def _unsure(model: Learns, trajectories: Trajectories, table: dict[str, np.ndarray]) -> Tensor:
    """[N]: how often to look at each window of ``table``, 1 on average."""
    every = np.arange(len(table["count"]))
    parts = (call_batch(trajectories, table, part) for part in np.array_split(every, 1 + len(every) // 1024))
    share = torch.cat([model.unsure(_tensors(part, model.device)).cpu() for part in parts])
    return _SURE + (1.0 - _SURE) * share / share.mean().clamp_min(1e-12)


def _felt(
    trajectories: Trajectories,
    table: dict[str, np.ndarray],
    unsure: Tensor,
    dreamt: Dreamt,
    config: FitConfig,
    generator: torch.Generator,
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of which half begin with recorded pictures and half with dreams of them, as often as ``unsure`` says."""
    half = config.batch // 2
    there = torch.from_numpy(np.isin(table["past"][:, -1], dreamt.moments))
    true, false = weighted(unsure, half, generator), weighted(unsure * there, half, generator)
    for one, other in zip(true, false, strict=True):
        seen, imagined = (
            call_batch(trajectories, table, one.numpy()),
            call_batch(dreamt.trajectories, table, other.numpy()),
        )
        yield {name: np.concatenate([item, imagined[name]]) for name, item in seen.items()}


def _parts(count: int, config: FitConfig, generator: torch.Generator) -> Iterator[np.ndarray]:
    return (part.numpy() for part in shuffled(count, config.batch, generator))


def _tensors(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(item).to(device) for name, item in arrays.items()}


def require_world_of(spec: EnvSpec, trajectories: Trajectories) -> None:
    """Raise UserError unless ``trajectories`` have the cameras, sizes and instructions of ``spec``."""
    wanted = {name: tuple(item.shape) for name, item in spec.images.items()}
    given = {name: image.shape[1:] for name, image in trajectories.images.items()}
    sizes = (spec.state.shape[0], spec.action_dim), (trajectories.state.shape[1], trajectories.action.shape[1])
    known = bool(((trajectories.task >= 0) & (trajectories.task < len(spec.tasks))).all())
    if wanted != given or sizes[0] != sizes[1] or not known:
        raise UserError(
            f"the episodes have cameras {given}, {sizes[1][0]} state and {sizes[1][1]} action entries and task "
            f"{trajectories.task.max(initial=0)}, but {spec.name!r} has {wanted}, {sizes[0][0]}, {sizes[0][1]} and "
            f"{len(spec.tasks)} tasks, so a world model of it cannot learn from them; record episodes of this world."
        )


def require_both_outcomes(trajectories: Trajectories) -> None:
    """Raise UserError when ``trajectories`` hold successes only, or none."""
    won = int(trajectories.outcomes.sum())
    if won in (0, trajectories.count):
        which = "all" if won else "none"
        raise UserError(
            f"{which} of {trajectories.count} episodes succeeded, so a world model could not learn success from "
            "failure; add episodes of the other kind, for example of the policy itself and of random play."
        )


def save_world(model: nn.Module, folder: Path, more: dict[str, Any] | None = None) -> None:
    """Write ``model`` as a checkpoint folder; ``more`` is kept in its ``config.json`` (limits, horizon)."""
    kind = f"{type(model).__module__}:{type(model).__qualname__}"
    described = {"world": kind, "config": to_json(model.config), "spec": model.spec.to_json(), **(more or {})}  # type: ignore[operator,union-attr]
    save_folder(folder, described, model.state_dict())


def load_world(folder: Path, spec: EnvSpec | None = None) -> tuple[Any, dict[str, Any]]:
    """The world model in ``folder`` and its ``config.json``.

    Raises UserError for a damaged or foreign one and, given the ``spec`` of the world that it is to stand for, when it
    was trained for other cameras, states, action bounds, instructions or lengths of a control step.
    """
    saved = read_config(folder, "world")
    trained = EnvSpec.from_json(saved["spec"])
    if spec is not None:
        _require_same(trained, spec, folder)
    made_by = load(saved["world"])
    if not isinstance(made_by, type) or not issubclass(made_by, nn.Module):
        raise UserError(
            f"{saved['world']!r} is not a world model, so {str(folder)!r} cannot be loaded; check its config.json."
        )
    model = made_by(trained, from_json(saved["config"]))
    load_weights(model, folder)
    return model.eval(), saved


def _require_same(trained: EnvSpec, spec: EnvSpec, folder: Path) -> None:
    parts = {"cameras": "images", "state": "state", "actions": "action", "instructions": "tasks"}
    parts["control steps"] = "control_dt"
    for what, name in parts.items():
        if getattr(trained, name) != getattr(spec, name):
            raise UserError(
                f"the world model {str(folder)!r} was trained for other {what} than {spec.name!r} has, so it would "
                "dream of something else; train one on episodes of this world."
            )


def statistics(trajectories: Trajectories) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [S] of the recorded states; of what hardly moves, at least 1e-3."""
    return trajectories.state.mean(0), np.maximum(trajectories.state.std(0), 1e-3)
