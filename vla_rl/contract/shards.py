"""Which tensors are shards (torch's ``DTensor``), without importing these, which takes half as long as torch itself."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard


def is_shard(item: object) -> TypeGuard[Any]:
    """Whether ``item`` is a ``DTensor``; where nobody has imported their module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(item, module.DTensor)
