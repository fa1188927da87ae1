"""``vla-rl few``: what a few hundred real episodes are worth, and what a perfect model would add."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.cli.override import override
from vla_rl.recipes.few.study import FewStudy
from vla_rl.recipes.progress import console


def few(arguments: Sequence[str]) -> None:
    """Every method on every task and seed; what is finished is not run again."""
    config: FewStudy = override(FewStudy(), arguments, "vla-rl few")
    with config.on_engine():
        config.run()
    console.print(f"{config.out}/results.json, {config.out}/report.html")
