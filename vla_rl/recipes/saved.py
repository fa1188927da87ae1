"""Checkpoints and runs on disk: which checkpoint of a run is meant, and which environment it belongs to."""

from __future__ import annotations

from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json
from vla_rl.recipes.config_files import read_config
from vla_rl.recipes.env_config import EnvConfig

_DEPLOYED = ("best", "imitation")  # the checkpoint that a run is evaluated by, the first of these that it has


def is_run(folder: Path) -> bool:
    """Whether ``folder`` holds a run, whose config names its class, and no checkpoint."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "class" in config


def checkpoint_of(folder: str | Path) -> Path:
    """``folder`` itself where it is no run; of a run, its checkpoint "best", or "imitation" if that is its result.

    Raises UserError for a run that has neither.
    """
    path = Path(folder)
    if not is_run(path):
        return path
    for name in _DEPLOYED:
        if (path / "checkpoints" / name / "config.json").is_file():
            return path / "checkpoints" / name
    raise UserError(
        f"the run {str(path)!r} has no checkpoint {' or '.join(_DEPLOYED)}, so there is no policy to evaluate; let it "
        "train first, or name a checkpoint folder."
    )


def env_config_of(checkpoint: str | Path) -> EnvConfig | None:
    """The environment of the run that a checkpoint lies in (``RUN/checkpoints/NAME``); None when it lies in none.

    Raises UserError when it is an environment that only the user may name, and the run is not the user's own.
    """
    run = Path(checkpoint).resolve().parent.parent
    if not is_run(run):
        return None
    found = read_config(run, "env")
    return found if isinstance(found, EnvConfig) else None
