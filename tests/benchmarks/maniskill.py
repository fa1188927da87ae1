"""A task of ManiSkill behind the contract against ManiSkill alone: what the environment around it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from sims import installations
from sims.maniskill import vulkan
from tests.benchmarks.measure import NotRun, Row, rate_row
from vla_rl.contract.errors import UserError
from vla_rl.contract.installations import home

_SCRIPT = Path(__file__).with_name("maniskill_alone.py")


def maniskill_vs_alone(quick: bool = False) -> list[Row]:
    """Control steps per second of PushCube-v1, resets included: from state, and with its camera of 64x64.

    The opponent calls ManiSkill's own ``step`` with the same actions and settings; both play whole episodes in one
    process, in turns.  Raises NotRun where ManiSkill is not installed.
    """
    try:
        python, variables = sys.executable, dict(os.environ)
        if find_spec("mani_skill") is None:
            python = str(installations.find("maniskill").python)
            variables = installations.child_environment("maniskill")
        variables |= vulkan.variables(home() / "sims" / "maniskill")
    except UserError as error:
        raise NotRun(f"not run: {error}") from error
    episodes = {"state": 1 if quick else 6, "rgb": 1 if quick else 3}
    rows = []
    for obs, repeats in episodes.items():
        command = [python, str(_SCRIPT), obs, str(repeats)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise NotRun(f"not run: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
        found = json.loads(done.stdout.splitlines()[-1])
        name = f"maniskill_vs_alone, {obs}"
        pair = (found["ours"], found["alone"])
        rows.append(rate_row(name, "maniskill_vs_alone", found["steps"], pair, "steps/s", episodes=repeats))
    return rows
