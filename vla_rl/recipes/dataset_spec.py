"""What environment a recorded dataset belongs to: the spec that its data declare, or whether they fit a given one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.spec import ArraySpec, EnvSpec
from vla_rl.experience.demonstrations import Demonstrations

_MARGIN = 0.05  # of an action's recorded range, added to both ends of what the policy may do
_TOLERANCE = 1e-4  # of a range: recorded values are float32
HARMLESS = ("names", "rate", "bounds")  # differences that ``accept`` may name


def spec_of(episodes: Demonstrations, name: str) -> EnvSpec:
    """The spec of an environment in which these episodes could have been recorded.

    Bounds are those of the data, actions' with a margin of 5 % of their range; no unit is known.  Raises UserError for
    a dataset without pictures.
    """
    if not episodes.images:
        raise UserError(
            f"the dataset {name!r} has no camera, so a vision policy cannot learn from it; record pictures."
        )
    for camera, image in episodes.images.items():
        if image.shape[-1] != 3:
            raise UserError(
                f"camera {camera!r} of {name!r} has {image.shape[-1]} channel(s) and policies read RGB, so "
                "none could learn from it; record it as RGB (a grey picture three times), or leave the camera out."
            )
    images = {
        camera: ArraySpec(tuple(image.shape[1:]), "uint8", 0, 255, unit="RGB", frame=camera)
        for camera, image in episodes.images.items()
    }
    longest = max(end - begin for begin, end in episodes.spans())
    return EnvSpec(
        name=name,
        images=images,
        state=_bounds(episodes.state, 0.0, episodes.state_names),
        action=_bounds(episodes.action, _MARGIN, episodes.action_names),
        tasks=episodes.tasks,
        control_dt=1.0 / episodes.fps,
        time_limit=longest,
        max_chunk=longest,
    )


def _bounds(values: np.ndarray, margin: float, names: tuple[str, ...]) -> ArraySpec:
    low, high = values.min(axis=0).astype(np.float64), values.max(axis=0).astype(np.float64)
    wider = np.maximum(margin * (high - low), 1e-3)  # what never changed still needs a range
    low, high = low - wider, high + wider
    return ArraySpec((values.shape[1],), "float32", tuple(low.tolist()), tuple(high.tolist()), names=names)


def require_fit(spec: EnvSpec, episodes: Demonstrations, whose: str, accept: Sequence[str] = ()) -> Demonstrations:
    """``episodes`` with tasks counted as in ``spec``; raises ContractError for the first field that differs.

    Shapes, cameras and tasks must agree.  ``accept`` names which of the other differences do no harm: "names" of state
    and action entries, the "rate" of control steps, values outside the "bounds".
    """
    for item in accept:
        if item not in HARMLESS:
            raise UserError(f"--accept {item!r} is no difference that can be accepted; {did_you_mean(item, HARMLESS)}")
    for kind, field, ours, theirs in _differences(spec, episodes):
        if kind not in accept:
            cure = f"record or convert it anew, or add --accept {kind}" if kind in HARMLESS else "choose another one"
            raise ContractError(
                f"{whose} was made for {field} {ours} but the dataset has {theirs}, so a policy would learn something "
                f"else; {cure}."
            )
    return episodes.with_tasks(spec.tasks)


def _differences(spec: EnvSpec, episodes: Demonstrations) -> Iterator[tuple[str, str, object, object]]:
    """(kind, field, in the spec, in the dataset) of everything that differs."""
    ours = {f"camera {name} of shape": item.shape for name, item in spec.images.items()}
    ours |= {"state of shape": spec.state.shape, "action of shape": spec.action.shape}
    theirs = {f"camera {name} of shape": tuple(image.shape[1:]) for name, image in episodes.images.items()}
    theirs |= {"state of shape": episodes.state.shape[1:], "action of shape": episodes.action.shape[1:]}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield "shape", name, ours.get(name), theirs.get(name)
            return
    recorded = (
        (spec.state, episodes.state_names, episodes.state),
        (spec.action, episodes.action_names, episodes.action),
    )
    for field, (array, names, values) in zip(("state", "action"), recorded, strict=True):
        if array.names and names and array.names != names:
            yield "names", f"{field} entries", array.names, names
        low, high = np.broadcast_to(array.low, array.shape), np.broadcast_to(array.high, array.shape)
        slack = _TOLERANCE * np.where(np.isfinite(high - low), high - low, 0.0)
        found = values.min(axis=0), values.max(axis=0)
        if (found[0] < low - slack).any() or (found[1] > high + slack).any():
            yield "bounds", f"{field}s within", (low.tolist(), high.tolist()), [item.tolist() for item in found]
    if abs(spec.control_dt * episodes.fps - 1.0) > 0.01:
        yield "rate", "control steps per second", round(1 / spec.control_dt, 3), episodes.fps


def shrink(images: np.ndarray, size: int, part: int = 512) -> np.ndarray:
    """uint8 [N,size,size,3]: area-averaged pictures."""
    pieces = []
    for i in range(0, len(images), part):
        pixels = torch.as_tensor(images[i : i + part]).permute(0, 3, 1, 2).float()
        small = torch.nn.functional.interpolate(pixels, (size, size), mode="area")
        pieces.append(small.round().to(torch.uint8).permute(0, 2, 3, 1).numpy())
    return np.concatenate(pieces)
