"""Imitation from a recorded dataset alone: any LeRobotDataset v3.0 folder, by any policy that can imitate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

from vla_rl.contract.errors import UserError
from vla_rl.contract.foreign import check_policy_methods, is_foreign
from vla_rl.contract.limits import check_limits
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.checkpoint import is_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import save_own
from vla_rl.recipes.context import placed
from vla_rl.recipes.dataset_spec import require_fit, shrink, spec_of
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.imitation import ImitatingPolicy, PixelPolicy, imitate_from_pixels, imitate_policy
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.policies import check_if_foreign, names_class, new_policy
from vla_rl.recipes.progress import console
from vla_rl.recipes.stages import clock
from vla_rl.recipes.tiny import NewTiny
from vla_rl.training.device import resolve_device
from vla_rl.training.fit import FitConfig
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.tracking import RunFolder


class NewPolicyConfig(Protocol):
    """The frozen dataclass of an untrained policy that imitates a dataset."""

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> ImitatingPolicy:
        """The policy for ``spec``; ``episodes`` give statistics of its inputs."""


@dataclass(frozen=True)
class ImitateDataset:
    """Imitate the episodes of a LeRobotDataset v3.0 folder: the checkpoint "imitation".

    With ``policy``, a checkpoint, a public folder or "module:Class", what its ``trainable`` says learns, and perception
    that is frozen stays as it is.  Without, ``new`` is built and learns everything, perception included if it can; that
    takes many more episodes.

    The policy acts in the environment ``env`` if one is named: it takes bounds, cameras, names and tasks from there,
    and the dataset must fit.  Otherwise they are those of the data, and the policy belongs to no environment yet.
    """

    dataset: str = ""
    env: EnvConfig = NO_ENV  # where the policy will act
    accept: tuple[str, ...] = ()  # differences from env or policy that do no harm here: "names", "rate", "bounds"
    policy: str = ""  # a checkpoint folder, a public one, or module:Class
    new: NewPolicyConfig = field(default_factory=NewTiny)
    image_size: int = 0  # pictures are shrunk to so many pixels a side while learning; 0: as they were recorded
    leave_out_damaged: bool = False  # go on without episodes that cannot be read
    seed: int = 1
    imitation: ImitationConfig = field(
        default_factory=lambda: ImitationConfig(demonstrations=0, stride=1, fit=FitConfig(steps=2000, batch=64))
    )
    device: str = "cpu"  # where the policy learns: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl
    vla: VLAOptions = VLAOptions()  # how ``policy`` is opened if it is a public folder; ours have their own

    def __post_init__(self) -> None:
        """Raises UserError for a negative size of pictures."""
        check_limits(self, image_size=(0, math.inf))

    def run(self, folder: RunFolder) -> JsonObject:
        """Read, train, save."""
        if not self.dataset:
            raise UserError("no dataset was named, so there is nothing to imitate; give one with --dataset FOLDER.")
        seconds: dict[str, float] = {}
        with clock(seconds, "read"):
            episodes = self._read()
        console.print(f"{episodes.count} episodes, {len(episodes.state)} steps, {len(episodes.tasks)} tasks")
        with clock(seconds, "imitation"):
            policy = self._train(episodes, folder)
        save_own(policy, folder.checkpoint("imitation"))
        loss = folder.metrics("imitation")[-1]["loss"]
        counts = {"episodes": episodes.count, "steps": len(episodes.state)}
        return {"loss": loss, **counts, "seconds": seconds, "seed": self.seed}

    def _read(self) -> Demonstrations:
        chosen = range(self.imitation.demonstrations) if self.imitation.demonstrations else None
        damaged = (lambda problem: console.print(f"left out: {problem}")) if self.leave_out_damaged else None
        episodes = load_demonstrations(Path(self.dataset), chosen, damaged)
        if not episodes.images or not self.image_size:
            return episodes
        images = {name: shrink(image, self.image_size) for name, image in episodes.images.items()}
        return replace(episodes, images=images)

    def _train(self, episodes: Demonstrations, folder: RunFolder) -> ImitatingPolicy:
        name, device = Path(self.dataset).name, resolve_device(self.device)
        spec = self.env.spec() if self.env.name else None
        if spec is None and (not self.policy or names_class(self.policy) or is_public(Path(self.policy))):
            spec = spec_of(episodes, name)
        if spec is not None:
            episodes = require_fit(spec, episodes, f"the environment {spec.name!r}", self.accept)
        if not self.policy:
            assert spec is not None
            policy = placed(self.new.build(spec, episodes, self.seed), device)
            if hasattr(policy, "encode_with_grad"):
                imitate_from_pixels(cast(PixelPolicy, policy), episodes, self.imitation, self.seed, folder)
                return policy
        else:
            made = new_policy(self.policy, spec, {}, self.seed) if spec and names_class(self.policy) else None
            policy = placed(_require_imitating(made or load_policy(self.policy, spec, self.vla), self.policy), device)
            self._check(policy)
            episodes = require_fit(policy.spec, episodes, repr(self.policy), self.accept)
        imitate_policy(policy, episodes, self.imitation, self.seed, folder)
        return policy

    def _check(self, policy: ImitatingPolicy) -> None:
        """Raise ContractError when ``policy`` is somebody else's and breaks the contract; it acts in ``env``."""
        if self.env.name:
            check_if_foreign(policy, self.env, self.seed, ("save_pretrained",))
        elif is_foreign(policy):
            check_policy_methods(policy, ("save_pretrained",))


def _require_imitating(policy: object, name: str) -> ImitatingPolicy:
    """``policy``; raises UserError when it lacks something that imitation needs."""
    for part in ("imitation_losses", "action_scale", "horizon", "trainable"):
        if not hasattr(policy, part):
            raise UserError(
                f"{type(policy).__name__} in {name!r} has no {part}, so it cannot imitate; see ImitatingPolicy in "
                "vla_rl.recipes.imitation."
            )
    return cast(ImitatingPolicy, policy)
