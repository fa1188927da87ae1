"""``vla-rl eval CHECKPOINT --parity TRACE``: where another evaluator's numbers begin to differ from ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.parity import Compared, first_difference
from vla_rl.evaluation.trace import Trace, read_traces
from vla_rl.pretrained import checkpoint_of
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.parity import replay_checkpoint, replay_simulator
from vla_rl.recipes.progress import console


@dataclass(frozen=True)
class Parity:
    """Replay a recorded trace through a checkpoint, and through an environment if --env names one."""

    parity: str = ""  # an .npz file or a folder of them
    tolerance: float = 1e-4  # of the largest number of an array
    env: EnvConfig = NO_ENV


def check_parity(arguments: Sequence[str]) -> None:
    """Print every compared key and, in a sentence, the first difference."""
    given = list(arguments)
    if given[0].startswith("-"):
        raise UserError("--parity needs a checkpoint to compare; write vla-rl eval CHECKPOINT --parity TRACE.")
    config: Parity = override(Parity(), given[1:], "vla-rl eval CHECKPOINT")
    checkpoint = checkpoint_of(given[0])
    for trace in read_traces(Path(config.parity)):
        _print(trace, "policy", replay_checkpoint(checkpoint, trace, config.tolerance))
        if config.env.name:
            _print(trace, config.env.name, replay_simulator(config.env, trace, config.tolerance))


def _print(trace: Trace, what: str, compared: list[Compared]) -> None:
    table = Table(title=f"{trace.name}: {what}")
    table.add_column("key", no_wrap=True)
    for name in ("decisions", "largest difference", "first beyond the tolerance"):
        table.add_column(name, justify="right")
    for one in compared:
        table.add_row(one.key, str(one.steps), f"{one.largest:.3g}", "–" if one.first is None else str(one.first))
    console.print(table)
    found = first_difference(compared)
    if found is None:
        console.print(f"no difference in {len(trace)} decisions.")
    else:
        why = f": {found.reason}" if found.reason else ""
        console.print(f"first difference: decision {found.first}, {found.key}{why}")
