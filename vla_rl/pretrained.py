"""Folders of trained networks: ``config.json`` and ``model.safetensors``, written atomically, read without pickle."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.errors import UserError
from vla_rl.contract.tracker import is_shard
from vla_rl.contract.trust import check_folder, mark_file, named_class, names_ours_only, read_json, read_named

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# The checkpoint that stands for its run, by what is wanted of it: the first of these that the run has.
_OF_RUN = {"policy": ("best", "imitation"), "reward": ("progress", "success", "judge")}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES |= {"BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FREE_NUMBERS = 1 << 26  # that a network may have besides those in its files
_LEAST = 16384  # numbers that every tensor counts for
_SIZED = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.normal, torch.randint)
_COUNTED = (torch.arange, torch.linspace, torch.logspace)
_SQUARED = (torch.eye,)
_ALIGNED = 8  # bytes, to which safetensors fills the header of a file up


class Saveable(Protocol):
    """What can write itself as a folder."""

    def save_pretrained(self, folder: str | Path) -> None: ...


def save_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    inside: Mapping[str, Saveable] | None = None,
) -> None:
    """Write a checkpoint next to ``folder`` and move it into place, so that a reader never sees half of one.

    ``inside`` are the checkpoints of its parts, such as a frozen base; each is written to a subfolder of its name.
    Where processes hold shards of ``tensors``, all call this and the first one writes (:func:`write_gathered`).
    """
    rank = holder(tensors)
    if rank:
        write_gathered(None, tensors)
        return
    fresh, old = folder.with_name(folder.name + ".writing"), folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():  # stopped between the two moves below: it is the only copy
        os.replace(old, folder)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        if rank is None:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, fresh / WEIGHTS)
        else:
            write_gathered(fresh / WEIGHTS, tensors)
        text = json.dumps({"contract_version": CONTRACT_VERSION, **config}, indent=2)
        (fresh / CONFIG).write_text(text, encoding="utf-8")
        mark_file(fresh / CONFIG)
        (fresh / WEIGHTS).chmod((fresh / CONFIG).stat().st_mode)  # safetensors writes it for its owner alone
        for name, part in (inside or {}).items():
            part.save_pretrained(fresh / name)
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise UserError(
            f"the checkpoint {str(folder)!r} could not be written ({error}), so the one before it is kept; "
            "free some disk space or choose another folder."
        ) from error
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def save_own(policy: Saveable, folder: Path) -> None:
    """Save ``policy``, which may be of a class of the user's own, and remember that this user's vla-rl did it."""
    policy.save_pretrained(folder)
    for path in Path(folder).rglob(CONFIG):
        mark_file(path)


def holder(tensors: Mapping[str, Tensor]) -> int | None:
    """The number of this process among those that hold shards of some of ``tensors``; None where all are whole."""
    meshes = [item.device_mesh for item in tensors.values() if is_shard(item)]
    return meshes[0].get_local_rank() if meshes else None


def write_gathered(path: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to ``path`` as safetensors; all processes that hold shards of them call it, all but one with
    None.

    They are gathered one by one, so that a process holds one whole tensor at a time.
    """
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        offsets[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(offsets).encode()
    header += b" " * (-len(header) % _ALIGNED)
    with ExitStack() as closing:
        file = closing.enter_context(path.open("wb")) if path is not None else None
        if file is not None:
            file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            whole = tensor.full_tensor().detach() if is_shard(tensor) else tensor.detach()
            if file is not None:
                file.write(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del whole


def is_run(folder: Path) -> bool:
    """Whether ``folder`` holds a run, whose config names its class, and no checkpoint."""
    try:
        config = read_json(folder / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "class" in config


def checkpoint_of(folder: str | Path, kind: str = "policy") -> Path:
    """``folder`` itself where it is no run; of a run, the checkpoint that holds its result of this ``kind``.

    Raises UserError for a run that has none.
    """
    path = Path(folder)
    if kind not in _OF_RUN or not is_run(path):
        return path
    for name in _OF_RUN[kind]:
        if (path / "checkpoints" / name / CONFIG).is_file():
            return path / "checkpoints" / name
    raise UserError(
        f"the run {str(path)!r} has no checkpoint {' or '.join(_OF_RUN[kind])}, so there is no {kind} to use; let it "
        "train first, or name a checkpoint folder."
    )


def read_config(folder: Path, kind: str) -> dict[str, Any]:
    """The checked ``config.json`` of a folder that holds a ``kind`` ("policy", "reward"), or of a run with one.

    Its entry of that name says which class wrote it.  Raises UserError when the file is missing, damaged or foreign; so
    does asking the result for an entry that it lacks.
    """
    folder = checkpoint_of(folder, kind)
    path = folder / CONFIG
    try:
        config = read_named(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{str(folder)!r} has no {CONFIG}, so it is not a checkpoint; give the folder that holds {CONFIG} and "
            f"{WEIGHTS}."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(path)!r} is damaged ({error}), so it cannot be loaded; copy the checkpoint again."
        ) from error
    if not isinstance(config, dict) or "contract_version" not in config or kind not in config:
        raise UserError(
            f"{str(path)!r} was not written by vla-rl for a {kind}, so its weights would be misread; convert it or "
            "train one."
        )
    if config["contract_version"] != CONTRACT_VERSION:
        raise UserError(
            f"{str(folder)!r} has contract version {config['contract_version']} but this is {CONTRACT_VERSION}, so its "
            "data would be misread; load it with the vla-rl that wrote it."
        )
    check_folder(folder)
    return _Config(config, folder, kind)


class _Config(dict[str, Any]):
    def __init__(self, items: Mapping[str, Any], folder: Path, kind: str) -> None:
        super().__init__(items)
        self.folder, self.kind = folder, kind

    def __missing__(self, name: str) -> Any:
        raise UserError(
            f"{CONFIG} of {str(self.folder)!r} has no {name!r}, so the {self.kind} cannot be rebuilt; copy the "
            "checkpoint again."
        )


def load_weights(module: nn.Module, folder: Path) -> None:
    """Fill ``module`` from ``folder``; raises UserError for a missing, damaged or differently shaped file."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: read_tensor(file, name) for name in file.keys()}  # noqa: SIM118  # a file, no dict
    except FileNotFoundError as error:
        raise UserError(f"{str(folder)!r} has no {WEIGHTS}, so it is incomplete; copy the checkpoint again.") from error
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{str(path)!r} is damaged ({error}), so it cannot be loaded; copy the checkpoint again."
        ) from error
    wanted = module.state_dict()
    for name in wanted.keys() | tensors.keys():
        if name not in tensors or name not in wanted or wanted[name].shape != tensors[name].shape:
            raise UserError(
                f"tensor {name!r} of {str(path)!r} does not fit the model that its {CONFIG} describes, so loading it "
                "would leave weights undefined; copy both files of the checkpoint again."
            )
    module.load_state_dict(tensors)


def read_tensor(file: Any, name: str) -> Tensor:
    """The tensor ``name`` of an open safetensors file; where torch's default device is "meta", only its header is read.

    So a policy of any size is built for its shapes alone (``vla_rl/recipes/memory.py``).
    """
    if torch.get_default_device().type != "meta":
        return file.get_tensor(name)
    header = file.get_slice(name)
    return torch.empty(header.get_shape(), dtype=_DTYPES[header.get_dtype()])


def load_module(folder: str | Path, kind: str, *given: Any) -> Any:
    """The ``kind`` in a folder, or of a run, by ``from_pretrained(folder, *given)`` of whichever class wrote it."""
    path = checkpoint_of(folder, kind)
    saved = read_config(path, kind)
    made_by = named_class(saved[kind])
    if not hasattr(made_by, "from_pretrained"):
        raise UserError(f"{made_by!r} is not a {kind} class, so {str(folder)!r} cannot be loaded; check its {CONFIG}.")
    with bounded(path, saved):
        return made_by.from_pretrained(path, *given)


def bounded(folder: Path, saved: Mapping[str, Any]) -> AbstractContextManager[object]:
    """What is built inside, of the config ``saved`` in ``folder``, is not much larger than its files; else UserError.

    Not so where a part lies elsewhere, which only the user may name.
    """
    return Bounded(folder, saved.get("config")) if names_ours_only(saved) else nullcontext()


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield abs(value)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _whole_numbers(item)


class Bounded(TorchFunctionMode):
    """Raises UserError where what is built inside is much larger than the files in ``folder``, which are to fill it.

    Already for a number in ``config`` that is.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__()
        self._folder, self._stored = folder, check_folder(folder)
        self._left = self._stored + _FREE_NUMBERS
        for number in _whole_numbers(config):
            self.require(number)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SIZED or func in _COUNTED or func in _SQUARED:
            size = _numbers_made(func, args, kwargs or {})
            self._left -= max(size, _LEAST)
            self.require(size)
        return func(*args, **(kwargs or {}))

    def require(self, size: int) -> None:
        """Raise UserError for a part of ``size`` numbers, layers or the like, and when all together are too many."""
        if self._left < 0 or size > self._stored + _FREE_NUMBERS // 64:
            raise UserError(
                f"the {CONFIG} of {str(self._folder)!r} describes a network with a part of {size:,}, which its files, "
                f"of {self._stored:,} bytes, cannot fill, so it is not built; copy both files of the checkpoint again."
            )


def _numbers_made(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """How many numbers a tensor has that ``func`` makes of these arguments."""
    size = kwargs.get("size", args[0] if args and isinstance(args[0], list | tuple) else None)
    whole = [item for item in (args if size is None else size) if isinstance(item, int)]
    if func in _SIZED:
        return math.prod(whole)
    return max((abs(item) for item in (*whole, *kwargs.values()) if isinstance(item, int)), default=0) ** (
        2 if func in _SQUARED else 1
    )
