"""Weights of a downloaded folder: one safetensors file or shards, read into a module tensor by tensor.

A folder of PEFT holds an adapter (LoRA) alone and names the one with the weights; it is read as both merged.

Files of pickles (``pytorch_model.bin``, ``*.pt``) are never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from vla_rl.contract import hub, trust
from vla_rl.contract.errors import UserError
from vla_rl.pretrained import read_tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
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
    """The safetensors files that hold the weights of ``folder``, in order; of an adapter, those it was trained on.

    Raises UserError when there are none, when a shard is missing, or when the weights are pickles.
    """
    if (base := adapted(folder)) is not None:
        return weight_files(base)
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
    shared, adapter = _shared_names(module), _Adapter.of(folder, rename)
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
                    _put(module, names, adapter.merged(names, read_tensor(tensors, key)), dtype)
                    filled |= set(names)
    _require_complete(folder, sorted(wanted.keys() - filled - set(absent)), [*extra, *adapter.left(filled)], misshapen)


# -- adapters ----------------------------------------------------------------------------------------------------------

_WRAPPED = "base_model.model."  # what PEFT writes before the names of the model that it wraps
# Of adapter_config.json (peft 0.21): what is read, or says how it was trained; everything else must be off.
_ADAPTER_FIELDS = """
    peft_type base_model_name_or_path revision r lora_alpha use_rslora bias modules_to_save rank_pattern peft_version
    target_modules exclude_modules lora_dropout inference_mode task_type auto_mapping init_lora_weights eva_config
    layers_to_transform layers_pattern runtime_config qalora_group_size ensure_weight_tying megatron_config
    megatron_core
"""
_ADAPTER_VALUES: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base's own weights
}


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` holds an adapter of PEFT and no weights of its own."""
    return (folder / ADAPTER).is_file() and not any((folder / name).is_file() for name in (INDEX, SINGLE))


def adapted(folder: Path) -> Path | None:
    """The folder with the weights that the adapter of ``folder`` was trained on; None where it holds no adapter.

    It may be named as on the Hugging Face hub.  Raises UserError where nothing is there, and for an adapter that is not
    LoRA of the weights as they are.
    """
    if not is_adapter(folder):
        return None
    path = folder / ADAPTER
    config = read_json(path)
    odd = [name for name in config if name not in _ADAPTER_FIELDS.split() and config[name]]
    odd += [name for name, allowed in _ADAPTER_VALUES.items() if config.get(name, allowed[0]) not in allowed]
    if odd:
        raise UserError(
            f"{str(path)!r} sets {_some(odd)}, which vla-rl does not merge, so the weights would be wrong; merge the "
            "adapter into its base (merge_and_unload of peft) and save that."
        )
    name, revision = str(config.get("base_model_name_or_path") or ""), config.get("revision")
    try:
        base = Path(hub.located(f"{name}@{revision}" if revision and not Path(name).is_dir() else name))
    except UserError as error:
        raise UserError(f"{str(folder)!r} holds an adapter alone, and of what it was trained on, {error}") from error
    if not name or not base.is_dir() or is_adapter(base):
        raise UserError(
            f"{str(folder)!r} holds an adapter alone, and what it was trained on ({name or 'which it does not name'}) "
            f"is no folder with weights here, so there is no policy; write where that is, or its name on the hub, into "
            f"base_model_name_or_path of {str(path)!r}."
        )
    return base


@dataclass(frozen=True)
class _Adapter:
    """LoRA (arXiv 2106.09685) as PEFT stores it: ``W + alpha / r * B A``, or ``alpha / sqrt(r)`` where it is rsLoRA's.

    pairs  {name in the module: (A [r,inputs], B [outputs,r], scale)}
    whole  {name: tensor} of what was trained as a whole (``modules_to_save``)
    """

    pairs: dict[str, tuple[Tensor, Tensor, float]]
    whole: dict[str, Tensor]

    @classmethod
    def of(cls, folder: Path, rename: Rename) -> _Adapter:
        """What ``folder`` holds; nothing where it holds no adapter."""
        if adapted(folder) is None:
            return cls({}, {})
        config, parts, whole = read_json(folder / ADAPTER), dict[str, dict[str, Tensor]](), dict[str, Tensor]()
        with open_tensors(folder / _ADAPTER_WEIGHTS) as tensors:
            for key in tensors.keys():  # noqa: SIM118  # a file, no dict
                inside, _, part = key.removeprefix(_WRAPPED).partition(".lora_")
                name = rename(f"{inside}.weight" if part else inside)
                if name is not None:
                    place = parts.setdefault(name, {}) if part else whole
                    place[part.removesuffix(".weight") or name] = read_tensor(tensors, key)
        half = [name for name, both in parts.items() if sorted(both) != ["A", "B"] or both["A"].ndim != 2]
        _require_complete(folder, half, [], [])
        scale = float(config["lora_alpha"])  # rsLoRA: arXiv 2312.03732
        root = 0.5 if config.get("use_rslora") else 1.0
        pairs = {name: (both["A"], both["B"], scale / len(both["A"]) ** root) for name, both in parts.items()}
        return cls(pairs, whole)

    def merged(self, names: Iterable[str], tensor: Tensor) -> Tensor:
        """``tensor``, which the module calls ``names``, as the adapter leaves it."""
        for name in names:
            tensor = self.whole.get(name, tensor)
            if name in self.pairs:
                first, second, scale = self.pairs[name]
                tensor = (tensor.float() + scale * (second.float() @ first.float())).to(tensor.dtype)
        return tensor

    def left(self, filled: set[str]) -> list[str]:
        """What the adapter has and the module, of which ``filled`` is, has not."""
        return sorted((self.pairs.keys() | self.whole.keys()) - filled)


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
