"""``vla-rl inspect [TARGET]``: what is installed and works; an environment, checkpoint, config or run at a glance.

Nothing heavy is imported before it is looked at, so the command works on a machine where half of it is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vla_rl.cli.override import override
from vla_rl.contract.config import to_json
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.recipes import sims
from vla_rl.recipes.inspect_folder import show_environment, show_folder
from vla_rl.recipes.inspect_installation import catalog, missing_package, show_installation
from vla_rl.recipes.tables import sizes, table, tree

_USAGE = (
    "vla-rl inspect [ENVIRONMENT [--env.options JSON] | package.module:make | CHECKPOINT FOLDER | RUN FOLDER | "
    "FILE.py:function [--field value ...]]; without one: this installation"
)


def main(arguments: Sequence[str]) -> None:
    """Inspect the one target that was given, or the installation."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_USAGE)
        return
    target, given = (arguments[0], arguments[1:]) if arguments else (None, ())
    has_fields = ":" in str(target) or str(target).endswith(".py") or target in catalog()
    if (given and not (has_fields and given[0].startswith("-"))) or str(target).startswith("-"):
        raise UserError(f"inspect takes one target, not {' '.join(arguments)!r}; write {_USAGE}.")
    inspect(target, given=given)


def inspect(target: str | None, console: Console | None = None, given: Sequence[str] = ()) -> None:
    """Print what ``target`` is (None: this installation) on ``console``; raises UserError when something is wrong.

    ``given``: fields of a config or of ``env``, as for ``vla-rl train``.
    """
    show = console or Console(highlight=False)
    try:
        if target is None:
            show_installation(show)
        elif target in catalog():
            _environment(show, target, given)
        elif Path(target).is_dir():
            show_folder(show, Path(target))
        elif Path(target).suffix.partition(":")[0] == ".py":
            _config(show, target, given)
        elif ":" in target:
            _environment(show, target, given)
        else:
            raise UserError(
                f"{target!r} is no environment, folder or FILE.py:function, so there is nothing to inspect; "
                f"{did_you_mean(target, catalog())}"
            )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UserError(f"{target!r} needs {package}, which is {missing_package(package)}.") from error


def _environment(show: Console, name: str, given: Sequence[str]) -> None:
    options = override(sims.NamedEnv(), given, f"vla-rl inspect {name}").env.options if given else {}
    show_environment(show, name, options)


def _config(show: Console, target: str, given: Sequence[str]) -> None:
    """Print the config ``target`` with fields changed as ``given`` (``--field value``)."""
    from vla_rl.recipes.config_files import load_config

    config = load_config(target)
    if given:
        config = override(config, given, f"vla-rl inspect {target}")
    show.print(tree(target, to_json(config)))
    if hasattr(config, "rl"):
        _run_of(show, config)
    elif hasattr(config, "env") and hasattr(config, "new"):
        from vla_rl.recipes.memory import untrained

        show.print(sizes(untrained(config.new, config.env.spec())))


def _run_of(show: Console, config: Any) -> None:
    rl = config.rl
    facts = [
        ("one rollout", f"{rl.experience}"),
        ("algorithm", type(rl.algorithm).__name__.removesuffix("Config")),
        ("whole run", f"{rl.loop.iterations} iterations"),
    ]
    show.print(table("sizes", ("", ""), facts))
    from vla_rl.recipes.memory import show_memory

    show_memory(show, config)
