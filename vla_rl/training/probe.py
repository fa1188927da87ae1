"""Trains an object-position probe on images whose true positions come from a simulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation.object_positions import ObjectProbe, ProbeConfig, check
from vla_rl.training.fit import FitConfig, fit, shuffled

# About 25 s on one thread; on lift, with the frames of 300 episodes, 3 mm in the median (held-out episodes).
FIT = FitConfig(steps=600, batch=64, lr=4e-3)


def fit_probe(
    pictures: np.ndarray,
    tasks: np.ndarray,
    positions: np.ndarray,
    generator: torch.Generator,
    config: FitConfig = FIT,
    sizes: ProbeConfig | None = None,
    report: Callable[[int, dict[str, float]], None] = lambda step, info: None,
) -> ObjectProbe:
    """A probe for ``pictures`` uint8 [N,h,w,c], cameras side by side, ``tasks`` [N] and ``positions`` [N,3] metres.

    It knows the tasks up to the highest one given.  ``generator`` chooses the minibatches; weights begin from torch's
    own, so seed that for equal probes.  Raises ContractError for arrays that do not belong together, and for a position
    that is not finite.
    """
    count = int(np.max(tasks, initial=0)) + 1
    check(pictures, tasks, pictures.shape[1:], count)
    if positions.shape != (len(pictures), 3) or not len(pictures) or not np.isfinite(positions).all():
        raise ContractError(
            f"positions {list(positions.shape)} of {len(pictures)} pictures do not say where each object was, so "
            "nothing could be learnt from them; give finite metres [N,3] for at least one picture."
        )
    height, width, channels = pictures.shape[1:]
    probe = ObjectProbe((height, width, channels), count, positions, sizes or ProbeConfig())
    shown, named = torch.from_numpy(np.ascontiguousarray(pictures)), torch.as_tensor(np.asarray(tasks, np.int64))
    targets = torch.as_tensor(positions, dtype=torch.float32)
    batches = (
        {"pictures": shown[part], "tasks": named[part], "positions": targets[part]}
        for part in shuffled(len(shown), config.batch, generator)
    )
    fit(dict(probe.named_parameters()), probe.loss, batches, config, report)
    return probe.eval()
