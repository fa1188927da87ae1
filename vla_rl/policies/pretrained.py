"""Folders of policies: checkpoints of ours, and public ones of the families that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl import pretrained
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.hub import LEROBOT, names_lerobot
from vla_rl.contract.load import load
from vla_rl.policies.vla.checkpoint import FAMILIES, is_public, read_public
from vla_rl.policies.vla.options import VLAOptions


def read_config(folder: Path) -> dict[str, Any]:
    """The checked ``config.json`` of a checkpoint of ours, see ``vla_rl/pretrained.py``."""
    return pretrained.read_config(folder, "policy")


def load_policy(folder: str | Path, spec: EnvSpec | None = None, options: VLAOptions | None = None) -> Any:
    """The policy in a folder, or of a run, whichever class wrote it; with ``spec``, checked against that environment.

    A public folder (LeRobot's, transformers'), or one that LeRobot runs, becomes a policy for ``spec`` by ``options``;
    a checkpoint of ours has its own.  Raises UserError for what is missing, damaged or does not fit, and for one that
    is not ours without ``spec``.
    """
    if names_lerobot(folder):
        policy = load("vla_rl.policies.lerobot.policy:LeRobotPolicy")
        return policy.open(str(folder).removeprefix(LEROBOT), _required(spec, "LeRobot", folder), options)
    if not is_public(Path(folder)):
        return pretrained.load_module(folder, "policy", spec)
    checkpoint = read_public(Path(folder))
    spec = _required(spec, checkpoint.family, folder)
    with pretrained.Bounded(Path(folder), checkpoint.config):
        return load(FAMILIES[checkpoint.family]).from_public(folder, spec, options or VLAOptions())


def _required(spec: EnvSpec | None, family: str, folder: str | Path) -> EnvSpec:
    if spec is None:
        raise UserError(
            f"the {family!r} checkpoint {str(folder)!r} belongs to no environment, so its inputs are unknown; name one "
            "with --env NAME, or use a checkpoint that was trained from it."
        )
    return spec


def default_options(folder: str | Path) -> VLAOptions:
    """The options that a public folder's family has; the general ones for anything else."""
    if not is_public(Path(folder)):
        return VLAOptions()
    return load(FAMILIES[read_public(Path(folder)).family]).options_class()
