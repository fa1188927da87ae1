"""Weights of a downloaded folder: one safetensors file or shards, read into a module tensor by tensor.

Files of pickles (``pytorch_model.bin``, ``*.pt``) are never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from vla_rl.contract import trust
from vla_rl.contract.errors import UserError
from vla_rl.pretrained import read_tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LISTED = 4  # names in a message
Rename = Callable[[str], str | None]


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules that are built inside have parameters without memory (device "meta"); their buffers are real.

    A model is filled by :func:`load_public_weights` afterwards, so that it is never held twice.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # the second name of a shared parameter stays the same object
            return parameter
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # torch uses its result
    try:
        yield
    finally:
        handle.remove()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the weights of ``folder``, in order.

    Raises UserError when there are none, when a shard is missing, or when the weights are pickles.
    """
    if (folder / INDEX).is_file():
        shards = sorted(set(_weight_map(folder).values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{str(folder)!r} lacks {len(missing)} of the {len(shards)} shards that its {INDEX} names "
                f"({_some(missing)}), so weights would be undefined; download them into it."
            )
        return tuple(folder / name for name in shards)
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"the weights of {str(folder)!r} are pickles ({_some(pickles)}), which could run code, so they are not "
            f"read; convert them to {SINGLE} (https://huggingface.co/spaces/safetensors/convert) or download that."
        )
    raise missing_file(folder / SINGLE)


def _weight_map(folder: Path) -> dict[str, str]:
    """{tensor: file} of the index."""
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) and name for name in found.values()):
        raise UserError(f"{str(folder / INDEX)!r} has no weight_map, so no shard can be found; download it again.")
    for name in found.values():
        if Path(name).name != name:
            raise UserError(
                f"{str(folder / INDEX)!r} names {name[:80]!r}, which is no file beside it, so it is not read; download "
                "it again."
            )
    return found


def tensor_sizes(folder: Path) -> dict[str, tuple[str, int]]:
    """{tensor: (dtype as safetensors names it, how many numbers)} of the weights of ``folder``; none is read."""
    sizes = {}
    for path in weight_files(folder):
        with open_tensors(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118  # a file, no dict
                found = tensors.get_slice(name)
                sizes[name] = (str(found.get_dtype()), math.prod(found.get_shape()))
    return sizes


def load_public_weights(
    module: nn.Module,
    folder: Path,
    rename: Rename = lambda name: name,
    dtype: torch.dtype | None = torch.float32,
    absent: Iterable[str] = (),
) -> None:
    """Fill ``module`` from the weights of ``folder``, one tensor after the other.

    ``rename`` maps a tensor's name in the files to that in ``module``, or to None where ``module`` does without it.
    Parameters without memory get it, in ``dtype`` (None: that of the file); others are filled in place.  A parameter
    that several modules share may be in the files under any of its names.  Tensors named in ``absent`` keep what they
    hold if they are not in the files.  Raises UserError that lists missing, superfluous and differently shaped tensors;
    ``module`` is then of no use.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    shared = _shared_names(module)
    filled, extra, misshapen = set[str](), list[str](), list[str]()
    for path in weight_files(folder):
        with open_tensors(path) as tensors:
            for key in tensors.keys():  # noqa: SIM118  # a file, no dict
                name = rename(key)
                if name is None:
                    continue
                shape = tuple(tensors.get_slice(key).get_shape())
                if name not in wanted:
                    extra.append(key)
                elif shape != wanted[name]:
                    misshapen.append(f"{key} {list(shape)} instead of {list(wanted[name])}")
                else:
                    names = shared.get(name, (name,))
                    _put(module, names, read_tensor(tensors, key), dtype)
                    filled |= set(names)
    _require_complete(folder, sorted(wanted.keys() - filled - set(absent)), extra, misshapen)


def _shared_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of a parameter under each of its names."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: tuple(names) for names in groups.values() for name in names}


@torch.no_grad()
def _put(module: nn.Module, names: Iterable[str], tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Fill the parameter or buffer called ``names`` with ``tensor``, which lies in a file."""
    new: nn.Parameter | None = None
    for name in names:
        owner, _, last = name.rpartition(".")
        old = getattr(module.get_submodule(owner), last)
        if not old.is_meta:
            old.copy_(tensor)
            continue
        if new is None:
            kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            new = nn.Parameter(tensor.to(kept, copy=True), old.requires_grad)
        setattr(module.get_submodule(owner), last, new)


def _require_complete(folder: Path, missing: list[str], extra: list[str], misshapen: list[str]) -> None:
    problems = [
        f"{len(names)} {what} ({_some(names)})"
        for names, what in (
            (missing, "tensors of the model are not in its files"),
            (extra, "of its tensors have no place in the model"),
            (misshapen, "have another shape"),
        )
        if names
    ]
    if problems:
        raise UserError(
            f"the weights of {str(folder)!r} do not fit the model that its config.json describes: "
            f"{', '.join(problems)}, so some would stay undefined; download the whole folder again."
        )


def _some(names: list[str]) -> str:
    """The first few of ``names`` and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


_POINTER = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; raises UserError when the file is missing, damaged or holds something else."""
    try:
        value = trust.read_json(path)
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return _object(path, value)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects on the lines of ``path``; raises UserError as ``read_json``."""
    try:
        trust.check_file(path)
        with path.open("rb") as file:
            for line in filter(bytes.strip, file):
                yield _object(path, trust.parse_json(line))
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def _object(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(
            f"{str(path)!r} holds a {type(value).__name__} and no JSON object, so it cannot be used; download it again."
        )
    return value


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """``safe_open`` on a file whose tensors are read one by one; raises UserError when it is missing or damaged."""
    if not path.is_file():
        raise missing_file(path)
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise damaged(path, error) from error


def missing_file(path: Path) -> UserError:
    """The sentence about a file that is not there."""
    return UserError(
        f"{str(path.parent)!r} has no {path.name}, so the folder is incomplete; download that file into it."
    )


def damaged(path: Path, error: Exception) -> UserError:
    """The sentence about a file that cannot be read; a Git LFS pointer is named as what it is."""
    with path.open("rb") as file:
        pointer = file.read(len(_POINTER)) == _POINTER
    if pointer:
        return UserError(
            f"{str(path)!r} is a Git LFS pointer instead of the file itself, so it cannot be read; run `git lfs pull` "
            "in its folder, or download it again."
        )
    return UserError(f"{str(path)!r} is damaged ({error}), so it cannot be read; download it again.")
