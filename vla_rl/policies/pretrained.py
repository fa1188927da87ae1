"""Checkpoint folders of policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl import pretrained
from vla_rl.contract.spec import EnvSpec


def read_config(folder: Path) -> dict[str, Any]:
    """The checked ``config.json`` of a policy's folder, see ``vla_rl/pretrained.py``."""
    return pretrained.read_config(folder, "policy")


def load_policy(folder: str | Path, spec: EnvSpec | None = None) -> Any:
    """The policy in a checkpoint folder, whichever class wrote it; with ``spec``, checked against that environment."""
    return pretrained.load_module(folder, "policy", spec)
