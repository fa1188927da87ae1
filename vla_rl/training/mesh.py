"""The processes among which weights are cut, and this process's shard of a tensor as one of the whole."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard


@functools.cache
def mesh_on(kind: str) -> DeviceMesh:
    """All processes in a row, which compute on devices of this ``kind`` ("cpu", "cuda")."""
    return init_device_mesh(kind, (dist.get_world_size(),))


def shard_of(own: Tensor, shape: torch.Size, kind: str) -> DTensor:
    """The tensor of ``shape`` that is cut along its first dimension and of which this process has ``own``."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh_on(kind), [Shard(0)], run_check=False, shape=shape, stride=stride)
