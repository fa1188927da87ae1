"""``vla-rl demo [--out FOLDER] [--field value ...]``: imitation, RL and a page, with one command."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.cli.override import override, take_option
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.recipe import run
from vla_rl.recipes.terminal import console

CONFIG = "demo.py:demo"


def demo(arguments: Sequence[str]) -> None:
    """Collect, ground, imitate, improve by RL, evaluate, report; nothing is downloaded."""
    out, rest = take_option(list(arguments), "--out", "runs/demo")
    summary = run(override(load_config(CONFIG), rest, "vla-rl demo"), out, file_of(CONFIG))
    before, after, seconds = summary["imitation"], summary["rl"], sum(summary["seconds"].values())
    console.print(
        f"\n[bold]imitation {before['success']:.1%}  ->  RL {after['success']:.1%}[/bold] on {after['episodes']} test "
        f"episodes in {seconds:.0f} s.  Open {out}/report.html"
    )
