"""Checkpoints of ours of a vision-language-action policy, of any family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.load import name_of
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.normalization import Affine, check_same_env
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.prompts import Prompts
from vla_rl.policies.vla.saving import Base, filled, load_learnt, save_learnt, saved_base
from vla_rl.pretrained import load_module


class SavedVLA(nn.Module):
    """A policy that is made of ``spec, network, prompts, state_scale, action_scale, cameras, config, base``.

    ``base`` is the public folder that the weights of ``network`` come from, None where they come from none.
    """

    spec: EnvSpec
    network: Any
    prompts: Prompts
    state_scale: Affine
    action_scale: Affine
    cameras: Sequence[str | None]
    config: Any
    base: Base | None

    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights that imitation and RL train, which are what a checkpoint on a base holds."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and ``prompts``; on a base, only the trained weights."""
        config = {
            "policy": name_of(type(self)),
            "config": to_json(self.config),
            "shape": to_json(self.network.shape),
            "spec": self.spec.to_json(),
            "cameras": list(self.cameras),
            "state_scale": to_json(self.state_scale),
            "action_scale": to_json(self.action_scale),
        }
        save_learnt(Path(folder), config, self, self.trainable(), self.base, {"prompts": self.prompts})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> Self:
        """Load a checkpoint of ours; with ``spec``, first check that it was trained for such an environment.

        Raises UserError when the folder that it builds on is not there or has changed.
        """
        saved: dict[str, Any] = read_config(Path(folder))
        trained, base, shape = EnvSpec.from_json(saved["spec"]), saved_base(saved), from_json(saved["shape"])
        options = from_json(saved["config"])
        if spec is not None:
            check_same_env(trained, spec)
        build: Any = cls  # the subclasses' constructor
        policy: Self = build(
            spec or trained,
            shape.build() if base is None else cls.filled_network(shape, base.open(Path(folder)), options),
            load_module(Path(folder) / "prompts", "prompts"),
            from_json(saved["state_scale"]),
            from_json(saved["action_scale"]),
            saved["cameras"],
            options,
            base,
        )
        load_learnt(policy, Path(folder), policy.trainable(), base)
        return policy.eval()

    @classmethod
    def filled_network(cls, shape: Any, folder: Path, options: VLAOptions) -> Any:
        """The network of ``shape`` with the weights of a public ``folder``."""
        return filled(shape, folder)
