"""``vla-rl inspect FILE.py:function``: a config at a glance, and the memory that a run of it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from vla_rl.cli.override import override
from vla_rl.contract.config import to_json
from vla_rl.recipes.tables import sizes, table, tree


def inspect_config(show: Console, target: str, given: Sequence[str] = ()) -> None:
    """Print the config ``target`` with fields changed as ``given`` (``--field value``)."""
    from vla_rl.recipes.config_files import load_config

    config = load_config(target)
    if given:
        config = override(config, given, f"vla-rl inspect {target}")
    show.print(tree(target, to_json(config)))
    if hasattr(config, "rl"):
        _run(show, config)
    elif hasattr(config, "env") and hasattr(config, "new"):
        from vla_rl.recipes.memory_of import untrained

        show.print(sizes(untrained(config.new, config.env.spec())))


def _run(show: Console, config: Any) -> None:
    rl = config.rl
    facts = [
        ("one rollout", f"{rl.experience}"),
        ("algorithm", type(rl.algorithm).__name__.removesuffix("Config")),
        ("whole run", f"{rl.loop.iterations} iterations"),
    ]
    show.print(table("sizes", ("", ""), facts))
    from vla_rl.recipes.memory_tables import show_memory

    show_memory(show, config)
