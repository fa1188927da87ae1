"""Whether and where a run shares its rollouts with other runs (``vla_rl/experience/shared.py``)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import ExperienceSource, Reducer
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.contract.policy import Policy
from vla_rl.experience.board import Board
from vla_rl.experience.shared import SharedSource
from vla_rl.policies.frozen import HoldsFrozen
from vla_rl.policies.normalization import Affine

_ENTRIES = 4096  # of a frozen tensor that are compared


@dataclass(frozen=True)
class SharingConfig:
    """Runs with one ``folder`` read each other's rollouts; they begin from one checkpoint, in one environment."""

    folder: str = ""  # where runs leave their rollouts for each other; "": nothing is shared
    rollouts: int = 1  # of other runs, read at most beside each of one's own
    keep: int = 4  # newest rollouts that a run leaves there; older ones are not read

    def __post_init__(self) -> None:
        """Raises UserError for numbers without a meaning."""
        check_limits(self, rollouts=(0, math.inf), keep=(1, math.inf))

    def require_one_process(self, group: Reducer) -> None:
        """Raise UserError where several processes learn together: each would read the others' as a stranger's."""
        if self.folder and group.size > 1:
            raise UserError(
                f"{group.size} processes learn from one batch already, so they cannot share rollouts as runs of their "
                "own do; start each run in one process, or leave shared.folder empty."
            )

    def around(self, source: ExperienceSource, policy: Policy) -> ExperienceSource:
        """``source`` with the other runs' rollouts beside its own; itself without a folder."""
        if not self.folder:
            return source
        return SharedSource(source, Board(self.folder, common(policy), self.keep), policy, self.rollouts)


def common(policy: Policy) -> str:
    """SHA-256 of what learners must have in common: what makes features, and what samples mean.

    That is the class, the scales and the frozen weights, of which ``_ENTRIES`` of each tensor are compared: others
    differ everywhere.
    """
    digest = hashlib.sha256(type(policy).__qualname__.encode())
    trainable = getattr(policy, "trainable", None)
    learnt = {id(parameter) for parameter in trainable().values()} if callable(trainable) else set()
    for part in _parts(policy):
        for name, module in part.named_modules():
            scales = {key: value for key, value in vars(module).items() if isinstance(value, Affine)}
            digest.update(f"{name} {sorted(scales.items())}\n".encode() if scales else b"")
        for name, parameter in part.named_parameters():
            if id(parameter) not in learnt:
                digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode() + _some(parameter))
    return digest.hexdigest()


def _parts(policy: object) -> Iterator[nn.Module]:
    """``policy`` and the frozen policies in it, as far as they are networks."""
    if isinstance(policy, nn.Module):
        yield policy
    for part in policy._frozen if isinstance(policy, HoldsFrozen) else ():
        yield from _parts(part)


def _some(tensor: Tensor) -> bytes:
    """Bytes of entries spread over ``tensor``."""
    flat = tensor.detach().reshape(-1)
    chosen = flat[:: max(1, len(flat) // _ENTRIES)].cpu().contiguous()
    return chosen.view(torch.uint8).numpy().tobytes()
