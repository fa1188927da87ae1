"""A safetensors file of tensors that several processes hold shards of: gathered one by one, written by process 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_NAMES |= {torch.bool: "BOOL"}
_ALIGNED = 8  # bytes, to which safetensors fills its header up


def holder(tensors: Mapping[str, Tensor]) -> int | None:
    """The number of this process among those that hold shards of some of ``tensors``; None where all are whole."""
    meshes = [item.device_mesh for item in tensors.values() if isinstance(item, DTensor)]
    return meshes[0].get_local_rank() if meshes else None


def write_gathered(path: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to ``path``; all processes that hold shards of them call it, all but one with None.

    A process holds one whole tensor at a time.
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
            whole = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
            if file is not None:
                file.write(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del whole
