"""Simulators in virtual environments of their own: ``vla-rl sims install`` (``vla_rl/contract/installations.py``)."""

from __future__ import annotations

from pathlib import Path

from vla_rl.contract.installations import Installations, Shipped

SHIPPED: dict[str, Shipped] = {
    "genesis": Shipped("import genesis", pip=()),
    "metaworld": Shipped("import metaworld"),
    "robosuite": Shipped("import robosuite"),
    "libero": Shipped(
        "from sims.libero import prepare; prepare()",
        {"libero/libero/assets": "copy the folder libero/libero/assets of the LIBERO repository there"},
        {"LIBERO_CONFIG_PATH": "{folder}/paths"},
    ),
    "maniskill": Shipped("import mani_skill", pip=(), prepare="sims.maniskill.vulkan:prepare"),
}

SIMS = Installations("sims", "simulator", Path(__file__).resolve().parent / "pins", SHIPPED)
known, find, install, child_environment = SIMS.known, SIMS.find, SIMS.install, SIMS.child_environment
