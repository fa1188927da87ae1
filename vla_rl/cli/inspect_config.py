"""``vla-rl inspect FILE.py:function``: a config at a glance, and the memory that a run of it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from vla_rl.cli.override import override
from vla_rl.cli.tables import sizes, table, tree
from vla_rl.contract.config import to_json
from vla_rl.contract.errors import UserError


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
    _memory(show, config)


def _memory(show: Console, config: Any) -> None:
    from vla_rl.cli.memory_tables import memory_note, memory_tables
    from vla_rl.recipes.memory_of import memory_of

    try:
        found = memory_of(config)
    except UserError as error:
        show.print(f"No estimate of the memory: {error}", soft_wrap=True)
        return
    show.print(sizes(found.policy))
    for item in memory_tables(found):
        show.print(item)
    show.print(memory_note(found), soft_wrap=True)
