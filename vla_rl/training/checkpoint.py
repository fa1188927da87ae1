"""Training state on disk: everything that the rest of a run depends on, written atomically and read without pickle.

``RUN/state/00000012/`` holds the state after iteration 12: ``tensors.safetensors`` with every tensor and array, and
``state.json`` with the numbers and the shape of the tree.  A folder gets its name when it is complete and on the disk,
so that a process killed at any moment leaves the newest complete one; the one before it is kept as well.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.errors import UserError
from vla_rl.contract.tracker import is_shard
from vla_rl.contract.trust import read_json

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
            _flush(path)
        if final.exists():  # a state of the same step: it counts until the new one has its name
            shutil.rmtree(old, ignore_errors=True)
            os.replace(final, old)
        os.replace(writing, final)
        _flush(folder)
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
            places = [path] if others is None else [path, others]
            tensors = _Tensors([files.enter_context(safe_open(place / _TENSORS, "pt")) for place in places])
            state: dict[str, Any] = _decode(read["state"], tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"the training state {str(path)!r} is damaged ({error!r}), so the run cannot go on from it; delete that "
            f"folder to go on from the one before it{'' if _before(path) else ', or start the run again'}."
        ) from error
    return state


def _before(path: Path) -> bool:
    """Whether there is another state to go on from."""
    return any(other != path for other in _complete(path.parent))


class _Tensors:
    """The tensors of several files; of equal names that of the first one."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._places = {name: file for file in reversed(files) for name in file.keys()}  # noqa: SIM118  # a file

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._places[name].get_tensor(name)
        return found


def _complete(folder: Path) -> Iterator[Path]:
    """Every whole state; one that was to be replaced counts while there is no other of its step."""
    for path in folder.glob("*"):
        step = path.name.removesuffix(_OLD)
        if step.removeprefix("-").isdigit() and (step == path.name or not path.with_name(step).exists()):
            yield path


def _flush(path: Path) -> None:
    """Make sure that a file or folder is on the disk, not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _decode(value: Any, tensors: _Tensors) -> Any:
    if not isinstance(value, dict):
        return value
    if value["kind"] == "dict":
        return {key: _decode(item, tensors) for key, item in value["items"]}
    if value["kind"] == "list":
        return [_decode(item, tensors) for item in value["items"]]
    tensor = tensors[value["path"]]
    if value["kind"] == "shard":
        from vla_rl.training.mesh import shard_of

        return shard_of(tensor, torch.Size(value["shape"]), value["device"])
    return tensor if value["kind"] == "tensor" else tensor.numpy()
