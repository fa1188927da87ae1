"""Override the fields of a config from the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_origin, get_type_hints

import tyro
from tyro import constructors

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.hub import located, pinned
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.terminal import console

_SHORT = {"collectors": "loop.collectors", "staleness": "loop.staleness"}


def override(config: Any, arguments: Sequence[str], command: str) -> Any:
    """``config`` with fields replaced by ``--field value`` (nested: ``--rl.algorithm.gamma 0.98``).

    What names a model or dataset on the Hugging Face hub is found there, see :func:`_from_hub`.
    Raises UserError for a field that does not exist, naming the nearest one.
    """
    known = _fields(config)
    arguments = [_name_of(argument, known) for argument in arguments]
    config = _in_another_environment(config, arguments)
    for argument in arguments:
        name = argument[2:].split("=")[0].replace("-", "_")
        if argument.startswith("--") and name not in known and name not in ("help", "h"):
            given = argument.split("=")[0]
            raise UserError(f"the config has no field {given!r}, so it cannot be set; {_suggest(name, known)}")
    with _registry():
        description = type(config).__doc__ or ""
        made = tyro.cli(type(config), default=config, args=arguments, prog=command, description=description)
    return _from_hub(made)


_ON_HUB: Mapping[str, Callable[[str], str]] = {
    "policy": located,
    "dataset": pinned,
    "demonstrations": pinned,
    "statistics": pinned,
}


def _from_hub(config: Any) -> Any:
    """``config`` whose policy, where it is a name on the Hugging Face hub, is its folder, and whose datasets are named
    by their commits: a run goes on with the same ones (``vla_rl/contract/hub.py``)."""
    found: dict[str, Any] = {
        name: at(given) for name, at in _ON_HUB.items() if isinstance(given := getattr(config, name, None), str)
    }
    if dataclasses.is_dataclass(options := getattr(config, "vla", None)):
        found["vla"] = _from_hub(options)
    return dataclasses.replace(config, **found) if found else config


def _in_another_environment(config: Any, arguments: Sequence[str]) -> Any:
    """``config`` whose environment is the one that ``arguments`` name.

    Options of a config belong to the environment that they were written for: in another one they do not apply, which
    is said.  Those in ``arguments`` do.
    """
    env = getattr(config, "env", None)
    name, _ = take_option([item for item in arguments], "--env.name", "") if isinstance(env, EnvConfig) else ("", [])
    if not name or not isinstance(env, EnvConfig):
        return config
    named = env.named(name)
    dropped = sorted({*env.options, *env.training_options} - {*named.options, *named.training_options})
    if dropped and env.name:
        console.print(f"the options {', '.join(dropped)} were written for {env.name!r} and are left out in {name!r}.")
    return dataclasses.replace(config, env=named)


def take_option(arguments: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """The value of ``name VALUE`` or ``name=VALUE`` and the other arguments."""
    for i, argument in enumerate(arguments):
        if argument.startswith(name + "="):
            return argument.partition("=")[2], arguments[:i] + arguments[i + 1 :]
        if argument == name:
            if i + 1 == len(arguments):
                raise UserError(f"{name} needs a value, for example {name} {default}.")
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
    return default, arguments


def subcommand(name: str, given: list[str], commands: Mapping[str, Callable[[list[str]], None]]) -> None:
    """Run the one of ``commands`` that ``given`` begins with; raises UserError for none of them."""
    if not given or given[0].startswith("-"):
        raise UserError(f"{name} needs a command: {', '.join(commands)}; vla-rl {name} --help explains them.")
    if given[0] not in commands:
        raise UserError(f"{name} has no command {given[0]!r}; {did_you_mean(given[0], commands)}")
    commands[given[0]](given[1:])


def positional(given: Sequence[str], usage: str, default: Any = None, example: str = "") -> tuple[list[str], list[str]]:
    """The values that ``usage`` ("serve FOLDER") names in capitals, and the options after them.

    ``default`` is the config whose fields ``--help`` shows.  Raises UserError where one is missing.
    """
    command, names = usage.partition(" [")[0].split(), [word for word in usage.split() if word.isupper()]
    if list(given) in (["-h"], ["--help"]) and default is not None:
        override(default, given, f"vla-rl {usage}")
    if len(given) < len(names) or any(one.startswith("-") for one in given[: len(names)]):
        what = " ".join(word for word in command if word not in names)
        hint = f"for example vla-rl {what} {example}" if example else f"write vla-rl {usage}"
        raise UserError(f"{what} needs {' and '.join(names)}, {hint}.")
    return list(given[: len(names)]), list(given[len(names) :])


def _name_of(argument: str, known: set[str]) -> str:
    """``--env lift`` is short for ``--env.name lift``, and so for every field that has a ``name``.

    The names of ``_SHORT`` stand for the one field that ends like theirs.
    """
    field, equals, value = argument.removeprefix("--").partition("=")
    if not argument.startswith("--"):
        return argument
    if f"{field.replace('-', '_')}.name" in known:
        return f"--{field}.name{equals}{value}"
    ends = _SHORT.get(field, field)
    meant = [name for name in known if f".{name}".endswith(f".{ends}")]
    return f"--{meant[0]}{equals}{value}" if field in _SHORT and len(meant) == 1 else argument


def _registry() -> constructors.ConstructorRegistry:
    """Fields typed by a protocol or a base class are overridden like their present value's own class, dicts as JSON."""
    registry = constructors.ConstructorRegistry()

    @registry.primitive_rule
    def of_json(info: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec[Any] | None:
        if get_origin(info.type) not in (dict, Mapping):
            return None
        return constructors.PrimitiveConstructorSpec(1, "JSON", _read_json, _is_dict, lambda value: [json.dumps(value)])

    @registry.struct_rule
    def of_value(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
        kind, value = info.type, info.default
        general = getattr(kind, "_is_protocol", False) or kind in type(value).__mro__[1:]
        if not general or not dataclasses.is_dataclass(value):
            return None
        kinds = get_type_hints(type(value))
        fields = [
            constructors.StructFieldSpec(field.name, kinds[field.name], getattr(value, field.name))
            for field in dataclasses.fields(value)
        ]
        return constructors.StructConstructorSpec(type(value), tuple(fields))

    return registry


def _read_json(given: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(given[0])
    except ValueError as error:
        raise ValueError(f"{given[0]!r} is no JSON ({error})") from error
    if not _is_dict(value):
        raise ValueError(f"{given[0]!r} is no JSON object")
    return dict(value)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _suggest(name: str, known: set[str]) -> str:
    """The nearest field, comparing last parts as well, so that ``--gama`` finds ``--rl.algorithm.gamma``."""
    last = {field.rpartition(".")[2]: field for field in sorted(known)}
    near = get_close_matches(name, sorted(known), 1, 0.5) or [
        last[one] for one in get_close_matches(name, last, 1, 0.5)
    ]
    return f"did you mean '--{near[0]}'?" if near else "see --help."


def _fields(config: Any, prefix: str = "") -> set[str]:
    """Dotted names of all fields of nested dataclasses."""
    names: set[str] = set()
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        names.add(prefix + field.name)
        names |= _fields(getattr(config, field.name), f"{prefix}{field.name}.")
    return names
