"""Imitation from a recorded dataset alone: any LeRobotDataset v3.0 folder, no environment needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.spec import ArraySpec, EnvSpec
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.tokens import Vocabulary
from vla_rl.recipes import stages
from vla_rl.recipes.context import generator
from vla_rl.recipes.progress import bar, console
from vla_rl.recipes.stages import clock
from vla_rl.training.fit import FitConfig
from vla_rl.training.imitation import ImitationConfig, imitate_from_pixels
from vla_rl.training.tracking import RunFolder

_MARGIN = 0.05  # of an action's recorded range, added to both ends of what the policy may do


@dataclass(frozen=True)
class ImitateDataset:
    """Imitate the episodes of a LeRobotDataset v3.0 folder: the checkpoint "imitation".

    With ``policy``, a checkpoint for the same cameras, state and actions, its backbone stays as it is and the rest goes
    on learning.  Without, everything is learnt from the dataset, perception included; that takes many more episodes.
    """

    dataset: str = ""
    policy: str = ""  # a checkpoint folder
    image_size: int = 0  # pictures are shrunk to so many pixels a side while learning; 0: as they were recorded
    leave_out_damaged: bool = False  # go on without episodes that cannot be read
    seed: int = 1
    tiny: TinyConfig = field(default_factory=TinyConfig)
    imitation: ImitationConfig = field(
        default_factory=lambda: ImitationConfig(demonstrations=0, stride=1, fit=FitConfig(steps=2000, batch=64))
    )
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Read, train, save."""
        if not self.dataset:
            raise UserError("no dataset was named, so there is nothing to imitate; give one with --dataset FOLDER.")
        seconds: dict[str, float] = {}
        with clock(seconds, "read"):
            episodes = self._read()
        console.print(f"{episodes.count} episodes, {len(episodes.state)} steps, {len(episodes.tasks)} tasks")
        with clock(seconds, "imitation"):
            policy = self._go_on(episodes, folder) if self.policy else self._begin(episodes, folder)
        policy.save_pretrained(folder.checkpoint("imitation"))
        loss = folder.metrics("imitation")[-1]["loss"]
        counts = {"episodes": episodes.count, "steps": len(episodes.state)}
        return {"loss": loss, **counts, "seconds": seconds, "seed": self.seed}

    def _read(self) -> Demonstrations:
        chosen = range(self.imitation.demonstrations) if self.imitation.demonstrations else None
        told = (lambda problem: console.print(f"left out: {problem}")) if self.leave_out_damaged else None
        episodes = load_demonstrations(Path(self.dataset), chosen, told)
        if not episodes.images or not self.image_size:
            return episodes
        images = {name: _shrink(image, self.image_size) for name, image in episodes.images.items()}
        return replace(episodes, images=images)

    def _go_on(self, episodes: Demonstrations, folder: RunFolder) -> TinyVLA:
        policy = TinyVLA.from_pretrained(self.policy)
        _require_fit(policy.spec, episodes, self.policy)
        stages.imitate_policy(policy, episodes.with_tasks(policy.spec.tasks), self.imitation, self.seed, folder)
        return policy

    def _begin(self, episodes: Demonstrations, folder: RunFolder) -> TinyVLA:
        spec = spec_of(episodes, Path(self.dataset).name)
        torch.manual_seed(self.seed)  # module initialisation has no generator argument
        state = torch.as_tensor(episodes.state)
        policy = TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_data(state), self.tiny)
        chunks = policy.action_scale.normalize(torch.as_tensor(episodes.chunks(self.tiny.horizon)))
        with bar("imitate", self.imitation.fit.steps) as update:
            report = stages.every(25, stages.report_imitation(update, folder))
            imitate_from_pixels(policy, episodes.observation(), chunks, self.imitation, generator(self.seed, 2), report)
        return policy


def spec_of(episodes: Demonstrations, name: str) -> EnvSpec:
    """What an environment would declare in which these episodes could have been recorded.

    Bounds are those of the data, actions' with a margin of 5 % of their range; the unit of nothing is known.
    """
    if not episodes.images:
        raise UserError(
            f"the dataset {name!r} has no camera, so a vision policy cannot learn from it; record pictures."
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


def _require_fit(spec: EnvSpec, episodes: Demonstrations, policy: str) -> None:
    """Raise ContractError unless a policy for ``spec`` can learn from ``episodes``."""
    ours = {f"camera {name}": item.shape for name, item in spec.images.items()}
    ours |= {"state": spec.state.shape, "action": spec.action.shape}
    theirs = {f"camera {name}": tuple(image.shape[1:]) for name, image in episodes.images.items()}
    theirs |= {"state": episodes.state.shape[1:], "action": episodes.action.shape[1:]}
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            raise ContractError(
                f"{policy!r} was made for {name} of shape {ours.get(name)} but the dataset has {theirs.get(name)}, so "
                "it cannot learn from it; choose another checkpoint, or none."
            )


def _shrink(images: np.ndarray, size: int, part: int = 512) -> np.ndarray:
    """uint8 [N,size,size,3]: area-averaged pictures."""
    pieces = []
    for i in range(0, len(images), part):
        pixels = torch.as_tensor(images[i : i + part]).permute(0, 3, 1, 2).float()
        small = torch.nn.functional.interpolate(pixels, (size, size), mode="area")
        pieces.append(small.round().to(torch.uint8).permute(0, 2, 3, 1).numpy())
    return np.concatenate(pieces)
