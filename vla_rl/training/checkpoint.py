"""Training state on disk: everything that the rest of a run depends on, written atomically and read without pickle.

``RUN/state/00000012/`` holds the state after iteration 12: ``tensors.safetensors`` with every tensor and array, and
``state.json`` with the numbers and the shape of the tree.  A folder gets its name when it is complete and on the disk,
so that a process killed at any moment leaves the newest complete one; the one before it is kept as well.

The state of a run of several processes: a folder for each, of which that of process 0 makes all of them count.

``RUN/state/00000012/`` is that of process 0 and ``RUN/process-1/state/00000012/`` that of process 1, as
``checkpoint.py`` writes them.  Process 0 writes last, so a step that is in its folder is in all of them: a run that is
killed at any moment goes on from one step in every process.  What process 0 holds as well, bit for bit, the others
leave out: of a policy that all processes learn, there is one copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.batch import Reducer
from vla_rl.contract.errors import UserError
from vla_rl.contract.tracker import is_shard
from vla_rl.contract.trust import read_json, sync
from vla_rl.training.distributed import barrier

KEPT = 2  # newest states
_TREE, _TENSORS = "state.json", "tensors.safetensors"
_WRITING, _OLD = ".writing", ".old"


def save_state(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write ``state``, nested dicts and sequences of tensors, arrays and JSON values, as ``folder/<step>``.

    Step -1 is that before the first one.
    Raises UserError when it cannot be written; the states before it are then untouched.
    """
    write_state(folder, step, *encoded(state))


def encoded(state: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """``state`` as text, and its tensors under the names that the text gives them."""
    tensors: dict[str, Tensor] = {}
    tree = {"contract_version": CONTRACT_VERSION, "state": _encode(state, "state", tensors)}
    return json.dumps(tree), tensors


def write_state(folder: Path, step: int, tree: str, tensors: Mapping[str, Tensor]) -> None:
    """:func:`save_state` of an encoded state."""
    final = folder / f"{step:08d}"
    writing = final.with_name(final.name + _WRITING)
    old = final.with_name(final.name + _OLD)
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        save_file(dict(tensors), writing / _TENSORS)
        (writing / _TREE).write_text(tree, encoding="utf-8")
        (writing / _TENSORS).chmod((writing / _TREE).stat().st_mode)  # safetensors writes it for its owner alone
        for path in (writing / _TENSORS, writing / _TREE, writing):
            sync(path)
        if final.exists():  # a state of the same step: it counts until the new one has its name
            shutil.rmtree(old, ignore_errors=True)
            os.replace(final, old)
        os.replace(writing, final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise UserError(
            f"the training state {str(final)!r} could not be written ({error}), so the run stopped with the state "
            "before it; free some disk space and go on with --resume."
        ) from error
    for path in (old, *sorted(_complete(folder))[:-KEPT]):
        shutil.rmtree(path, ignore_errors=True)


def latest_state(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The newest step and its state, None when there is none; raises UserError when it is damaged."""
    path = newest(folder)
    return None if path is None else (step_of(path), read_state(path))


def newest(folder: Path) -> Path | None:
    """The newest whole state in ``folder``."""
    return max(_complete(folder), default=None)


def step_of(path: Path) -> int:
    """The step of the state in ``path``."""
    return int(path.name.removesuffix(_OLD))


def read_state(path: Path, others: Path | None = None) -> dict[str, Any]:
    """The state in ``path``; tensors that it leaves out are in ``others``.  Raises UserError when it is damaged."""
    try:
        read = read_json(path / _TREE)
        if read["contract_version"] != CONTRACT_VERSION:
            raise UserError(
                f"{str(path)!r} has contract version {read['contract_version']} but this is {CONTRACT_VERSION}, so the "
                "run would go on differently; resume it with the vla-rl that wrote it."
            )
        with ExitStack() as files:
            places = [path] if others is None else [others, path]
            opened = [files.enter_context(safe_open(place / _TENSORS, "pt")) for place in places]
            by_name = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # a file
            state: dict[str, Any] = _decode(read["state"], by_name)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        before = any(other != path for other in _complete(path.parent))
        raise UserError(
            f"the training state {str(path)!r} is damaged ({error!r}), so the run cannot go on from it; delete that "
            f"folder to go on from the one before it{'' if before else ', or start the run again'}."
        ) from error
    return state


def _complete(folder: Path) -> Iterator[Path]:
    """Every whole state; one that was to be replaced counts while there is no other of its step."""
    for path in folder.glob("*"):
        step = path.name.removesuffix(_OLD)
        if step.removeprefix("-").isdigit() and (step == path.name or not path.with_name(step).exists()):
            yield path


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for ``value``; tensors and arrays go into ``tensors`` under their path in the tree."""
    if is_shard(value):
        tensors[path] = value.to_local().detach().cpu().clone().contiguous()
        return {"kind": "shard", "path": path, "shape": list(value.shape), "device": value.device_mesh.device_type}
    if isinstance(value, Tensor | np.ndarray):
        tensor = torch.as_tensor(value)
        tensors[path] = tensor.detach().cpu().clone().contiguous()
        return {"kind": "tensor" if isinstance(value, Tensor) else "array", "path": path}
    if isinstance(value, dict):
        return {"kind": "dict", "items": [[key, _encode(v, f"{path}/{key}", tensors)] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"kind": "list", "items": [_encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path} is {type(value).__name__}, which a training state cannot hold; give tensors or numbers.")


def _decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    if value["kind"] == "dict":
        return {key: _decode(item, tensors) for key, item in value["items"]}
    if value["kind"] == "list":
        return [_decode(item, tensors) for item in value["items"]]
    tensor: Tensor = tensors[value["path"]].get_tensor(value["path"])
    if value["kind"] == "shard":
        from vla_rl.training.sharding import shard_of

        return shard_of(tensor, torch.Size(value["shape"]), value["device"])
    return tensor if value["kind"] == "tensor" else tensor.numpy()


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
    barrier(group)
    if not group.rank:
        write_state(folder, step, tree, tensors)
    barrier(group)


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
    return group.sum(given if group.rank == 0 else torch.zeros_like(given))
