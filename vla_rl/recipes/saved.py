"""The environment that a checkpoint belongs to."""

from __future__ import annotations

from pathlib import Path

from vla_rl.recipes.config_files import read_config
from vla_rl.recipes.env_config import EnvConfig


def env_config_of(checkpoint: str | Path) -> EnvConfig | None:
    """The environment of the run that a checkpoint lies in (``RUN/checkpoints/NAME``); None when it lies in none.

    Raises UserError when it is an environment that only the user may name, and the run is not the user's own.
    """
    from vla_rl.pretrained import is_run  # torch, which inspect does without

    run = Path(checkpoint).resolve().parent.parent
    if not is_run(run):
        return None
    found = read_config(run, "env")
    return found if isinstance(found, EnvConfig) else None
