"""Genesis itself: imported when an environment is made, and set up once in a process, for one processor or GPU."""

from __future__ import annotations

import sys
from typing import Any

from vla_rl.contract.errors import UserError

DEVICES = ("cpu", "cuda")


def engine(device: str) -> Any:
    """The package ``genesis``, set up for ``device``.

    Raises UserError when it is not installed, when the GPU has no driver, and when this process runs it elsewhere.
    """
    genesis = _imported()
    check_device(device)
    if not genesis._initialized:
        # Arrays whose sizes are no part of the kernels: scenes of any number of environments share what was compiled.
        genesis.init(backend=getattr(genesis, device), precision="32", logging_level="error", performance_mode=False)
    elif genesis.backend != getattr(genesis, device):
        raise UserError(
            f"Genesis already runs on {genesis.backend.name!r} in this process and knows one device only, so no "
            f"environment on {device!r} can be made; make all on one, or this one by the environment 'isolated'."
        )
    return genesis


def check_device(device: str) -> None:
    """Raise UserError unless ``device`` is one of ``DEVICES`` that torch can use here."""
    import torch

    if device not in DEVICES:
        raise UserError(f"Genesis runs on {' or '.join(map(repr, DEVICES))}, not on {device!r}; choose one of these.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU that it can use, so Genesis cannot run on 'cuda'; install NVIDIA's driver and a torch "
            "with CUDA ('nvidia-smi' and 'python -m torch.utils.collect_env' show both), or choose device 'cpu'."
        )


def _imported() -> Any:
    hook = sys.excepthook
    try:
        import genesis
    except ModuleNotFoundError as error:
        raise UserError(
            f"Genesis cannot be imported ({error}), so nothing can be simulated by it; install it beside vla-rl by "
            "\"pip install 'vla-rl[genesis]'\", or run 'vla-rl sims install genesis' and give the environment the "
            "option isolated=True."
        ) from error
    finally:
        sys.excepthook = hook  # Genesis' own prints every error twice
    return genesis
