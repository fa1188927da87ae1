"""Genesis itself: imported when an environment is made, and set up once in a process, for one processor or GPU."""

from __future__ import annotations

import sys
from typing import Any

from vla_rl.contract.errors import UserError


def engine(device: str) -> Any:
    """The package ``genesis``, set up for ``device`` ("cpu" or "cuda").

    Raises UserError when it is not installed, when torch cannot use the GPU, and when it runs elsewhere already.
    """
    genesis = _imported()
    if device == "cuda":
        _require_gpu()
    backend = getattr(genesis, device)
    if not genesis._initialized:
        # Sizes of arrays are no part of its kernels then, so scenes of any number share what was compiled.
        genesis.init(backend=backend, precision="32", logging_level="error", performance_mode=False)
    elif genesis.backend != backend:
        raise UserError(
            f"Genesis runs on {genesis.backend.name!r} in this process and knows one device at a time, so no "
            f"environment on {device!r} can be made beside it; choose the same device for all."
        )
    return genesis


def _imported() -> Any:
    hook = sys.excepthook
    try:
        import genesis
    except ModuleNotFoundError as error:
        raise UserError(
            f"genesis is not installed beside vla-rl ({error}), so it cannot simulate in this process; run "
            "\"pip install 'vla-rl[genesis]'\", or 'vla-rl sims install genesis' and give the option workers=1."
        ) from error
    finally:
        sys.excepthook = hook  # Genesis' own prints every error twice
    return genesis


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU, so Genesis cannot simulate on 'cuda'; install NVIDIA's driver ('nvidia-smi' shows it) "
            "and a torch that was built for CUDA ('python -m torch.utils.collect_env'), or choose device 'cpu'."
        )
