"""``vla-rl inspect [TARGET]``: what is installed and works; an environment, checkpoint, config or run at a glance.

``vla-rl sims [install NAME | serve NAME] ...``: simulators in installations of their own and on other machines.

``vla-rl policies [install NAME] ...``: libraries of policies in installations of their own.

Nothing heavy is imported before it is looked at, so the command works on a machine where half of it is missing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from vla_rl.cli.override import override, positional, subcommand
from vla_rl.contract.config import to_json
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.hub import DATASET_META, MODEL_FILES, located, names_lerobot, repository
from vla_rl.contract.installations import Installation, Installations
from vla_rl.recipes import sims as recipe
from vla_rl.recipes.inspect import (
    catalog,
    describe_lerobot,
    missing_package,
    show_environment,
    show_folder,
    show_installation,
    sizes,
    table,
    tree,
)
from vla_rl.recipes.terminal import console, standard_output

_USAGE = (
    "vla-rl inspect [ENVIRONMENT [--env.options JSON] | package.module:make | [lerobot:]CHECKPOINT FOLDER | "
    "RUN FOLDER | FILE.py:function [--field value ...]]; without one: this installation"
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
    show = console or standard_output()
    try:
        if target is None:
            show_installation(show)
        elif target in catalog():
            _environment(show, target, given)
        elif Path(target).is_dir():
            show_folder(show, Path(target))
        elif names_lerobot(target):
            show.print(table(f"{target}: a policy that LeRobot runs", ("", ""), describe_lerobot(located(target))))
        elif Path(target).suffix.partition(":")[0] == ".py":
            _config(show, target, given)
        elif ":" in target:
            _environment(show, target, given)
        elif (folder := _downloaded(target)) is not None:
            show_folder(show, folder)
        else:
            raise UserError(
                f"{target!r} is no environment, folder or FILE.py:function, so there is nothing to inspect; "
                f"{did_you_mean(target, catalog())}"
            )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UserError(f"{target!r} needs {package}, which is {missing_package(package)}.") from error


def _downloaded(name: str) -> Path | None:
    """The model that ``name`` names on the hub, or what describes the dataset of that name; None if it names none."""
    model, dataset = repository(name), repository(name, "dataset")
    if model is None or dataset is None:
        return None
    try:
        return model.download(MODEL_FILES)
    except UserError:
        with suppress(UserError):
            return dataset.download((DATASET_META,))
        raise


def _environment(show: Console, name: str, given: Sequence[str]) -> None:
    options = override(recipe.NamedEnv(), given, f"vla-rl inspect {name}").env.options if given else {}
    show_environment(show, name, options)


def _config(show: Console, target: str, given: Sequence[str]) -> None:
    """Print the config ``target`` with fields changed as ``given`` (``--field value``)."""
    from vla_rl.recipes.config_files import load_config

    config = load_config(target)
    if given:
        config = override(config, given, f"vla-rl inspect {target}")
    show.print(tree(target, to_json(config)))
    if rl := getattr(config, "rl", None):
        from vla_rl.recipes.memory import show_memory

        algorithm = type(rl.algorithm).__name__.removesuffix("Config")
        facts = [("one rollout", f"{rl.experience}"), ("algorithm", algorithm)]
        show.print(table("sizes", ("", ""), [*facts, ("whole run", f"{rl.loop.iterations} iterations")]))
        show_memory(show, config)
    elif hasattr(config, "env") and hasattr(config, "new"):
        from vla_rl.recipes.memory import untrained

        show.print(sizes(untrained(config.new, config.env.spec())))


# -- simulators in installations of their own --------------------------------------------------------------------------

_TO_DO = {"missing": "install", "unfinished": "finish", "outdated": "renew"}


@dataclass(frozen=True)
class Sims:
    """Simulators that have a virtual environment of their own, what state it is in and what to do about it.

    install NAME [--requirements FILE] [--python PYTHON] makes one.
    serve NAME [--port PORT] [--host HOST] [--key FILE] [--certificate FILE] [--private-key FILE] lets learners on other
    machines use an environment of this one.
    """


@dataclass(frozen=True)
class ServeEnv:
    """Serve an environment to learners on other machines (environment "remote"), until Ctrl-C.

    Only this machine can connect, unless a certificate and a key file are given.
    """

    port: int = 7777  # 0: a free one
    host: str = "127.0.0.1"  # the address to listen on
    key: str = ""  # a file with the secret that clients have to know
    certificate: str = ""  # PEM file of this server's certificate
    private_key: str = ""  # PEM file of its private key


@dataclass(frozen=True)
class Install:
    """Make a virtual environment of its own; one that is complete is left alone, any other is made anew."""

    requirements: str = ""  # a pip file, for a library that is not ours
    python: str = ""  # the interpreter of the virtual environment; "": this one, or a newer one where that is needed


def sims(arguments: Sequence[str]) -> None:
    """Run one of the commands, or print the table."""
    given = list(arguments)
    if given and not given[0].startswith("-"):
        subcommand("sims", given, COMMANDS)
        return
    override(Sims(), given, "vla-rl sims")
    standard_output().print(_table("simulator", recipe.installations().SIMS))


@dataclass(frozen=True)
class Policies:
    """Libraries of policies that have a virtual environment of their own, what state it is in and what to do about it.

    install NAME [--python PYTHON] makes one.
    """


def policies(arguments: Sequence[str]) -> None:
    """Run one of the commands, or print the table."""
    from vla_rl.policies.lerobot.policy import POLICIES  # torch takes seconds

    given = list(arguments)
    if given and not given[0].startswith("-"):
        subcommand("policies", given, {"install": lambda rest: _install(rest, "policies", POLICIES.install, "lerobot")})
        return
    override(Policies(), given, "vla-rl policies")
    standard_output().print(_table("library", POLICIES))


def install(arguments: list[str]) -> None:
    """``vla-rl sims install NAME [--requirements FILE] [--python PYTHON]``."""
    _install(arguments, "sims", recipe.installations().install, "metaworld")


def _install(arguments: list[str], kind: str, install: Callable[..., Installation], example: str) -> None:
    command = f"{kind} install NAME"
    (name,), rest = positional(arguments, command, Install(), example)
    options: Install = override(Install(), rest, f"vla-rl {command}")
    requirements = Path(options.requirements) if options.requirements else None
    with console.status(f"installing {name}") as status:
        try:
            made = install(name, lambda line: status.update(f"{name}: {line[:100]}"), requirements, options.python)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(
                f"stopped; {name} is half installed and will not be used until 'vla-rl {kind} install {name}' has "
                "finished it."
            ) from stop
    console.print(f"{made.name} is installed in {made.folder}; its exact packages are in {made.lock}.")
    for path, source in made.missing_files().items():
        console.print(f"  {path} is missing: {source}.")


def serve(arguments: list[str]) -> None:
    """``vla-rl sims serve NAME [--port PORT] [--host HOST --key FILE --certificate FILE --private-key FILE]``."""
    (name,), rest = positional(arguments, "sims serve NAME", ServeEnv(), "lift")
    options: ServeEnv = override(ServeEnv(), rest, "vla-rl sims serve NAME")
    security = (options.key, options.certificate, options.private_key)
    with closing(recipe.env_server(name, options.port, options.host, *security)) as server:
        console.print(f"{name} is served on {options.host}:{server.port}; Ctrl-C ends it.", highlight=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.close())
        server.run()


def _table(what: str, installations: Installations) -> Table:
    table = Table(what, "state", "version", Column("", overflow="fold"))
    for one in installations.known():
        state = one.state()
        lacking = [f"{path} is missing: {source}" for path, source in one.missing_files().items()]
        command = f"vla-rl {installations.kind} install {one.name}"
        table.add_row(
            one.name,
            "without files" if state == "ready" and lacking else state,
            one.version(),
            "; ".join(lacking) or str(one.folder) if state == "ready" else f"{_TO_DO[state]} it: {command}",
        )
    return table


COMMANDS = {"install": install, "serve": serve}
