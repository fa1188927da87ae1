"""The state of a run of several processes: a folder for each, of which that of process 0 makes all of them count.

``RUN/state/00000012/`` is that of process 0 and ``RUN/process-1/state/00000012/`` that of process 1, as
``checkpoint.py`` writes them.  Process 0 writes last, so a step that is in its folder is in all of them: a run that is
killed at any moment goes on from one step in every process.  What process 0 holds as well, bit for bit, the others
leave out: of a policy that all processes learn, there is one copy.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.batch import Reducer
from vla_rl.contract.errors import UserError
from vla_rl.training.checkpoint import encoded, newest, read_state, step_of, write_state

_WORDS = 3  # numbers of 32 bits by which a tensor is recognised; sums in float64 hold them exactly
_NONE = -2  # no step


def process_folder(run: Path, rank: int) -> Path:
    """Where process ``rank`` of the run in the folder ``run`` writes."""
    return run / f"process-{rank}" if rank else run


def require_processes(run: Path, size: int) -> None:
    """Raise UserError unless the run in ``run`` was begun by ``size`` processes."""
    begun = 1 + sum(1 for _ in run.glob("process-*"))
    if begun == size:
        return
    raise UserError(
        f"the run in {str(run)!r} was begun by {begun} and would go on with {size} processes, which have other shares "
        f"of the environments, so it would be another run; write {resuming(run, begun)}"
    )


def resuming(run: Path, size: int) -> str:
    """The command by which the run in ``run`` goes on in ``size`` processes."""
    start = f"torchrun --nproc-per-node {size} -m vla_rl.cli" if size > 1 else "vla-rl"
    return f"{start} train --resume {run}"


def save_shared(run: Path, step: int, state: dict[str, Any], group: Reducer) -> None:
    """Save this process's ``state`` after ``step``; when this returns, it counts in all processes.

    Raises UserError when it cannot be written; the states before it are then untouched.
    """
    folder, (tree, tensors) = process_folder(run, group.rank) / "state", encoded(state)
    known = _known_to_first(tensors, group)
    if group.rank:
        own = {name: item for name, item in tensors.items() if _key(name, item) not in known}
        write_state(folder, step, tree, own)
    _wait(group)
    if not group.rank:
        write_state(folder, step, tree, tensors)
    _wait(group)


def latest_shared(run: Path, group: Reducer) -> tuple[int, dict[str, Any]] | None:
    """The newest step that counts and this process's state; None when there is none.

    Raises UserError when it is damaged.
    """
    path = newest(run / "state")
    step = int(_of_first([_NONE if path is None else step_of(path)], group)[0])
    if step == _NONE:
        return None
    assert path is not None
    own = process_folder(run, group.rank) / "state" / f"{step:08d}"
    return step, read_state(own, path) if group.rank else read_state(path)


def _known_to_first(tensors: dict[str, Tensor], group: Reducer) -> set[tuple[int, ...]]:
    """The keys of all tensors of process 0."""
    count = int(_of_first([len(tensors)], group)[0])
    keys = [_key(name, item) for name, item in tensors.items()] if group.rank == 0 else [(0,) * _WORDS] * count
    found = _of_first(np.array(keys, np.float64).reshape(count, _WORDS), group)
    return {tuple(int(word) for word in row) for row in found.tolist()}


def _key(name: str, tensor: Tensor) -> tuple[int, ...]:
    """What recognises a tensor of this name, type, shape and content."""
    digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    flat = tensor.reshape(-1)
    row = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)  # one number, expanded
    digest.update(row.view(torch.uint8).numpy().data)
    return tuple(int(word) for word in np.frombuffer(digest.digest(), np.uint32)[:_WORDS])


def _of_first(values: Any, group: Reducer) -> Tensor:
    """``values`` of process 0, float64, in all processes, which give values of the same shape."""
    given = torch.as_tensor(np.asarray(values, np.float64))
    found: Tensor = group.sum(given if group.rank == 0 else torch.zeros_like(given))
    return found


def _wait(group: Reducer) -> None:
    """Return when every process has come here."""
    group.sum(torch.zeros(1, dtype=torch.float64))
