"""``python -m tests.docs.command_page`` writes docs/commands.md from the parsers: every command and its options."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from docs.tables.hooks import beside
from tests.docs.conftest import ROOT
from vla_rl.cli import COMMANDS, eval, fleet, robot, train
from vla_rl.cli import inspect as inspecting
from vla_rl.cli.imagine import ImagineComparison, Play, Rank, Rollout
from vla_rl.cli.push import Push
from vla_rl.cli.serve_policy import ServePolicy
from vla_rl.contract.load import load

PAGE = ROOT / "docs/commands.md"
_HEAD = """# Commands

This page is made from the parsers by `python -m tests.docs.command_page`; what the commands are for, with examples, is
in [running](running.md). `vla-rl COMMAND --help` prints the same.

A command that runs a config takes `--field value` for every field of it, nested ones with dots:
`--rl.algorithm.gamma 0.98`. Underscores and hyphens are the same. Fields that are dictionaries take JSON:
`--env.options '{"cubes": 2}'`; `--env NAME` is short for `--env.name NAME`. An unknown field is refused with the
nearest known one.
"""
# {command: what it prints before its options, then {what is parsed: its config}}
SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("vla-rl demo [--out FOLDER] [--field value ...]    every field of configs/demo.py:demo", {}),
    "collect": ("", {"vla-rl collect": train.Collect()}),
    "train": (train.USAGE, {}),
    "eval": (
        eval.USAGE,
        {
            "vla-rl eval CHECKPOINT": eval.Evaluate(),
            "vla-rl eval --suite NAME": eval.EvaluateSuite(),
            "vla-rl eval RESULTS": eval.Compare(),
            "vla-rl eval CHECKPOINT --parity TRACE": eval.Parity(),
        },
    ),
    "imagine": (
        "vla-rl imagine [train [FILE.py:function] | improve RUN | agreement RUN | rank RUN POLICY ...\n"
        "                | rollout RUN | play RUN]",
        {
            "vla-rl imagine": ImagineComparison(),
            "vla-rl imagine rank RUN POLICY ...": Rank(),
            "vla-rl imagine rollout RUN": Rollout(),
            "vla-rl imagine play RUN": Play(),
        },
    ),
    "compare": ("", {f"vla-rl compare {name}": load(target)() for name, target in train.PRESETS.items()}),
    "sims": (
        "",
        {
            "vla-rl sims": inspecting.Sims(),
            "vla-rl sims install NAME": inspecting.Install(),
            "vla-rl sims serve NAME": inspecting.ServeEnv(),
        },
    ),
    "policies": (
        "",
        {"vla-rl policies": inspecting.Policies(), "vla-rl policies install NAME": inspecting.Install()},
    ),
    "serve-policy": ("", {"vla-rl serve-policy CHECKPOINT": ServePolicy()}),
    "push": ("", {"vla-rl push RUN_OR_FOLDER OWNER/NAME": Push()}),
    "robot": (
        "",
        {
            "vla-rl robot COMMAND FILE": robot.Robot(),
            "vla-rl robot check FILE": robot.Check(),
            "vla-rl robot teleop FILE": robot.Teleop(),
            "vla-rl robot record FILE": robot.Record(),
            "vla-rl robot replay FILE": robot.Replay(),
            "vla-rl robot run FILE": robot.Run(),
        },
    ),
    "fleet": (
        "\n\n".join((fleet.USAGE, fleet.DEMO)),
        {
            "vla-rl fleet export FOLDER": fleet.Export(),
            "vla-rl fleet versions | publish | try | promote | rollback | pin | unpin FOLDER ...": fleet.Change(),
        },
    ),
    "serve": ("", {"vla-rl serve FOLDER": fleet.Serve()}),
    "certs": (
        "",
        {
            "vla-rl certs": fleet.Certs(),
            "vla-rl certs init | server FOLDER": fleet.ServerCertificate(),
            "vla-rl certs robot FOLDER NAME": fleet.RobotCertificate(),
        },
    ),
    "inspect": (inspecting._USAGE, {}),
}


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "| Command | What it does |\n|---|---|"]
    parts[-1] += "".join(f"\n| [`{name}`](#vla-rl-{name}) | {what} |" for name, (_, what) in COMMANDS.items())
    for name, (usage, parsed) in SECTIONS.items():
        parts.append(f"## vla-rl {name}\n\n{COMMANDS[name][1][:1].upper()}{COMMANDS[name][1][1:]}.")
        if usage:
            parts.append(f"```text\n{usage}\n```")
        for title, config in parsed.items():
            rows = [f"| `--{option}` | {default} | {meaning} |" for option, default, meaning in options(config)]
            about = re.sub(r"\n(?!\n)", " ", inspect.getdoc(type(config)) or "").replace("\n ", "\n\n")
            heading = f"### {title}\n\n" if len(parsed) > 1 else ""
            table = "\n".join(["| Option | Default | Meaning |", "|---|---|---|", *rows])
            parts.append(f"{heading}{about.replace('|', '/')}" + (f"\n\n{table}" if rows else ""))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def options(config: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(name, default, meaning) of every field; of an environment its name and its two kinds of options."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}".replace("_", "-")
        meaning = _meaning(type(config), field.name)
        if dataclasses.is_dataclass(value):
            yield from options(value, f"{name}.")
        else:
            shown = "python" if value == sys.executable else value  # a default must not name the machine
            yield name, "" if value in ("", ()) else f"`{shown}`".replace("|", "/"), meaning.replace("|", "/")


def _meaning(config: type, field: str) -> str:
    owners = [one for one in config.__mro__ if field in getattr(one, "__annotations__", {})]
    return next((text for one in owners if (text := beside(one, field))), "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
