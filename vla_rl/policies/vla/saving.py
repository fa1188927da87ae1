"""Checkpoints of a policy that was built on a downloaded folder: what was learnt, and a reference to the folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.hub import cached, is_pinned, located, portable
from vla_rl.contract.load import name_of
from vla_rl.policies.history import ObservationPolicy
from vla_rl.policies.normalization import Affine, check_same_env
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.vla.checkpoint import CONFIG
from vla_rl.policies.vla.network import FlowNetwork, NetworkShape
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import Prompts
from vla_rl.policies.vla.weights import ADAPTER, adapted, load_public_weights, without_weights
from vla_rl.pretrained import load_module, save_folder

_BASE = "base"  # entry of a saved config
_SAMPLES, _SAMPLE = 16, 4096  # pieces of a file that are hashed, and their bytes


@dataclass(frozen=True)
class Base:
    """A public folder whose weights a checkpoint of ours builds on.

    ``folder``: its path, or ``owner/name@COMMIT`` where it came from the hub.
    ``fingerprint`` is that of :func:`fingerprint` when the folder was first opened.
    """

    folder: str
    fingerprint: str

    @classmethod
    def of(cls, folder: Path) -> Base:
        return cls(portable(folder), fingerprint(folder))

    def open(self, checkpoint: Path) -> Path:
        """The folder, from the hub where it came from there.

        Raises UserError, with how to point to its new place, when it is missing or has changed.
        """
        folder = Path(self.folder)
        if is_pinned(self.folder):
            folder = cached(self.folder, CONFIG) or folder
            if not (folder / CONFIG).is_file() or fingerprint(folder) != self.fingerprint:  # not all of it is there
                folder = Path(located(self.folder))
        if not (folder / CONFIG).is_file():
            raise UserError(
                f"{str(checkpoint)!r} holds only what was learnt on top of {self.folder!r}, which is not there, so it "
                f"cannot be loaded; put that folder back, or write its new place into {_BASE}.folder of "
                f"{str(checkpoint / CONFIG)!r} and add --trust once."
            )
        if fingerprint(folder) != self.fingerprint:
            raise UserError(
                f"the weights or config.json of {self.folder!r} are not those that {str(checkpoint)!r} was trained on "
                "top of, so together they would be another policy; put the original files back."
            )
        return folder


def fingerprint(folder: Path) -> str:
    """SHA-256 of ``config.json`` and of the names, sizes and 64 kB of every safetensors file, spread over the file.

    So it takes milliseconds for 14 GB and notices another file, a truncated one and other weights: these differ
    everywhere.  Of an adapter it covers what that was trained on, too.  It is no protection against somebody who wants
    to deceive.
    """
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * max(0, size - _SAMPLE) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    if (base := adapted(folder)) is not None:
        digest.update((folder / ADAPTER).read_bytes() + fingerprint(base).encode())
    return digest.hexdigest()


def filled(shape: NetworkShape, folder: Path) -> FlowNetwork:
    """The network of ``shape`` with the weights of a public ``folder``; it is never in memory twice."""
    with without_weights():
        network = shape.build()
    network.load_public(folder)
    return network


def _unshared(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of ``module``; of those that share a parameter the first name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            found[name] = tensor
        seen.add(id(tensor))
    return found


class SavedVLA(ObservationPolicy):
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
        tensors, reference = _unshared(self), None
        if self.base is not None:
            tensors = {name: item for name, item in tensors.items() if name in self.trainable()}
            reference = {"folder": self.base.folder, "fingerprint": self.base.fingerprint}
        save_folder(Path(folder), {**config, _BASE: reference}, tensors, {"prompts": self.prompts})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> Self:
        """Load a checkpoint of ours; with ``spec``, first check that it was trained for such an environment.

        Raises UserError when the folder that it builds on is not there or has changed.
        """
        saved: dict[str, Any] = read_config(Path(folder))
        trained, shape = EnvSpec.from_json(saved["spec"]), from_json(saved["shape"])
        base = Base(**saved[_BASE]) if saved[_BASE] else None
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
        absent = set(policy.state_dict()) - set(policy.trainable()) if base is not None else ()
        load_public_weights(policy, Path(folder), dtype=None, absent=absent)
        return policy.eval()

    @classmethod
    def filled_network(cls, shape: Any, folder: Path, options: VLAOptions) -> Any:
        return filled(shape, folder)
