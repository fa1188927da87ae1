"""Checkpoints of a policy that was built on a downloaded folder: what was learnt, and a reference to the folder."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.checkpoint import CONFIG
from vla_rl.policies.vla.network import FlowNetwork, NetworkShape
from vla_rl.policies.vla.weights import fill_module, without_weights
from vla_rl.pretrained import WEIGHTS, Saveable, save_folder

_BASE = "base"  # entry of a saved config
_SAMPLES, _SAMPLE = 16, 4096  # pieces of a file that are hashed, and their bytes


@dataclass(frozen=True)
class Base:
    """A public folder whose weights a checkpoint of ours builds on.

    ``fingerprint`` is that of :func:`fingerprint` when the folder was first opened.
    """

    folder: str
    fingerprint: str

    @classmethod
    def of(cls, folder: Path) -> Base:
        """The base in ``folder`` as it is now."""
        return cls(str(folder.resolve()), fingerprint(folder))

    def open(self, checkpoint: Path) -> Path:
        """The folder; raises UserError, with how to point to its new place, when it is missing or has changed."""
        folder = Path(self.folder)
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
    everywhere.  It is no protection against somebody who wants to deceive.
    """
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * max(0, size - _SAMPLE) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def save_learnt(
    folder: Path,
    config: Mapping[str, Any],
    module: nn.Module,
    learnt: Collection[str],
    base: Base | None,
    inside: Mapping[str, Saveable] | None = None,
) -> None:
    """Write a checkpoint atomically: of ``module``'s tensors only those called ``learnt`` when there is a ``base``.

    Without one it holds everything.  ``config`` and ``inside`` are those of ``save_folder``.
    """
    tensors = _unshared(module)
    if base is not None:
        tensors = {name: item for name, item in tensors.items() if name in learnt}
    reference = None if base is None else {"folder": base.folder, "fingerprint": base.fingerprint}
    save_folder(folder, {**config, _BASE: reference}, tensors, inside)


def saved_base(config: Mapping[str, Any]) -> Base | None:
    """The base of a saved config; None where everything is in the checkpoint."""
    found = config.get(_BASE)
    return None if found is None else Base(found["folder"], found["fingerprint"])


def load_learnt(module: nn.Module, folder: Path, learnt: Collection[str], base: Base | None) -> None:
    """Fill ``module``, which has its base's weights already, with what :func:`save_learnt` wrote.

    Raises UserError that lists what is missing, superfluous or of another shape.
    """
    everything = set(module.state_dict())
    absent = () if base is None else everything - set(learnt)
    fill_module(module, folder, (folder / WEIGHTS,), dtype=None, absent=absent)


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
