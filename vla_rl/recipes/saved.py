"""The environment that a checkpoint belongs to."""

from __future__ import annotations

from pathlib import Path

from vla_rl.contract.trust import names_ours_only, read_json
from vla_rl.recipes.config_files import read_config
from vla_rl.recipes.env_config import EnvConfig


def env_config_of(checkpoint: str | Path, named: str = "") -> EnvConfig | None:
    """The environment of the run that a checkpoint lies in (``RUN/checkpoints/NAME``); None when it lies in none.

    Raises UserError when it is an environment that only the user may name, and the run is not the user's own.  Where
    the user has ``named`` another one, nothing of it is used, and there is none.
    """
    from vla_rl.pretrained import is_run  # torch, which inspect does without

    run = Path(checkpoint).resolve().parent.parent
    if not is_run(run):
        return None
    saved = read_json(run / "config.json").get("env") if named else None
    if named and not names_ours_only(saved) and not (isinstance(saved, dict) and saved.get("name") == named):
        return None
    found = read_config(run, "env")
    return found if isinstance(found, EnvConfig) else None
