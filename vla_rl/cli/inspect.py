"""``vla-rl inspect [TARGET]``: what is installed and works; an environment, checkpoint, config or run at a glance.

Nothing heavy is imported before it is looked at, so the command works on a machine where half of it is missing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vla_rl.cli.inspect_config import inspect_config
from vla_rl.cli.override import override
from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.check import Checked, check_env, check_policy
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.spec import ArraySpec, EnvSpec
from vla_rl.recipes import sims
from vla_rl.recipes.saved import env_config_of
from vla_rl.recipes.tables import sizes, table, tree

# Distribution -> the extra of vla-rl that brings it; "" for what comes always.
PACKAGES = dict.fromkeys(("numpy", "msgpack", "tyro", "rich"), "")
PACKAGES |= {"torch": "train", "safetensors": "train", "mujoco": "mujoco", "gymnasium": "gym", "diffusers": "diffusion"}
PACKAGES |= {"av": "report", "pillow": "report", "tensorboard": "tracking", "wandb": "tracking"}
_NUM_ENVS = 4
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
    has_fields = ":" in str(target) or str(target).endswith(".py") or target in _catalog()
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
            _installation(show)
        elif target in _catalog():
            _environment(show, target, given)
        elif Path(target).is_dir():
            _folder(show, Path(target))
        elif Path(target).suffix.partition(":")[0] == ".py":
            inspect_config(show, target, given)
        elif ":" in target:
            _environment(show, target, given)
        else:
            raise UserError(
                f"{target!r} is no environment, folder or FILE.py:function, so there is nothing to inspect; "
                f"{did_you_mean(target, _catalog())}"
            )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UserError(f"{target!r} needs {package}, which is {_missing(package)}.") from error


# -- the installation --------------------------------------------------------------------------------------------------


def _installation(show: Console) -> None:
    versions = [("python", platform.python_version())] + [(name, _version(name)) for name in PACKAGES]
    show.print(table("installed", ("package", "version"), [*versions, ("contract", str(CONTRACT_VERSION))]))
    show.print(table("devices", ("device", ""), _devices()))
    drivers = [("Vulkan, for ManiSkill", sims.maniskill_driver())]
    show.print(table("renderers", ("", ""), [*_renderers(), *drivers]))
    show.print(table("environments", ("name", "what it is"), [(name, _about(name)) for name in sorted(_catalog())]))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _missing(package)


def _missing(package: str) -> str:
    return f"not installed: pip install 'vla-rl[{PACKAGES.get(package) or 'all'}]'"


def _devices() -> list[tuple[str, str]]:
    found = [("cpu", f"{os.cpu_count()} cores")]
    try:
        import torch
    except ImportError as error:
        return [*found, ("cuda", f"unknown: torch cannot be imported ({error})")]
    gpus = [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    return found + (gpus or [("cuda", "none")])


def _renderers() -> list[tuple[str, str]]:
    try:
        return list(sims.renderers().items())
    except ImportError as error:
        return [("none", f"mujoco cannot be imported ({error})")]


def _catalog() -> dict[str, str]:
    entries: dict[str, str] = sims.catalog().CATALOG
    return entries


def _about(name: str) -> str:
    """The first line of the entry's docstring, read without importing what may not be installed."""
    module = _catalog()[name].partition(":")[0]
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    return (ast.get_docstring(ast.parse(source)) or f"{module} is missing").partition("\n")[0]


# -- an environment ----------------------------------------------------------------------------------------------------


def _environment(show: Console, name: str, given: Sequence[str]) -> None:
    options = override(sims.NamedEnv(), given, f"vla-rl inspect {name}").env.options if given else {}
    with closing(_make(name, **options)) as env:
        _spec(show, env.spec)
        show.print(_parameters(name, options))
        show.print(_checked(f"{name}, {_NUM_ENVS} environments: declared equals delivered", check_env(env)))


def _make(name: str, **options: Any) -> VecEnv:
    return sims.make_env(name, _NUM_ENVS, **options)


def _spec(show: Console, spec: EnvSpec) -> None:
    arrays = {f"image {name}": item for name, item in spec.images.items()}
    arrays |= {"state": spec.state, "action": spec.action, **spec.extras}
    rows = [(name, *_array(item)) for name, item in arrays.items()]
    show.print(table(f"{spec.name}: what it delivers", ("", "shape", "range", "unit", "frame"), rows))
    for name in ("state", "action"):
        show.print(table(f"entries of {name}", ("name", "range", "unit"), _entries(arrays[name])))
    limit = f"{spec.time_limit} control steps of {spec.control_dt:g} s; chunks of up to {spec.max_chunk}"
    facts = [
        ("tasks", "\n".join(spec.tasks)),
        ("time limit", limit),
        ("success", spec.success or "none: compare returns"),
    ]
    facts += [("device", spec.device), ("snapshots", "yes" if spec.can_snapshot else "no"), ("profile", spec.profile)]
    show.print(table("episodes", ("", ""), facts))


def _parameters(name: str, options: Mapping[str, Any]) -> Table:
    rows = [
        (one.name, f"{one.nominal:g}", f"{one.low:g} .. {one.high:g}", one.unit, one.meaning)
        for one in sims.parameters_of(name, options)
    ]
    return table("what --env randomize can vary in it", ("parameter", "nominal", "range", "unit", ""), rows)


def _array(spec: ArraySpec) -> tuple[str, str, str, str]:
    ranges = set(_ranges(spec, 1))
    return f"{spec.dtype}{list(spec.shape)}", ranges.pop() if len(ranges) == 1 else "below", spec.unit, spec.frame


def _entries(spec: ArraySpec) -> list[tuple[str, str, str]]:
    size = spec.shape[-1]
    names, units = spec.names or tuple(map(str, range(size))), spec.unit.split(",")
    return list(zip(names, _ranges(spec, size), units if len(units) == size else [spec.unit] * size, strict=True))


def _ranges(spec: ArraySpec, size: int) -> list[str]:
    """The range of every entry; ``size`` times the same when they share one."""
    low, high = (bound if isinstance(bound, tuple) else (bound,) * size for bound in (spec.low, spec.high))
    size = max(len(low), len(high))  # one of them may be shared
    low, high = (bound if len(bound) == size else bound * size for bound in (low, high))
    return [f"{a:g} .. {b:g}" for a, b in zip(low, high, strict=True)]


# -- folders -----------------------------------------------------------------------------------------------------------


def _folder(show: Console, folder: Path) -> None:
    config, summary = (_json(folder / name) for name in ("config.json", "summary.json"))
    run = "class" in config  # a config names its class; a checkpoint says what it holds
    if "policy" in config and not run:
        _checkpoint(show, folder)
    elif "reward" in config and not run:
        _reward(show, folder)
    elif summary or run:
        show.print(tree(f"{folder}: summary", summary) if summary else f"{folder} has no summary yet.")
        found = sorted(str(path.parent) for path in folder.glob("checkpoints/*/config.json"))
        show.print(table("checkpoints", ("vla-rl inspect ...",), [(path,) for path in found]))
    elif {"type", "model_type"} & config.keys():
        from vla_rl.recipes.inspect_public import describe_public

        show.print(table(f"{folder}: a public checkpoint", ("", ""), describe_public(folder)))
    else:
        raise UserError(
            f"{str(folder)!r} has neither config.json nor summary.json, so it is no checkpoint and no run; "
            "give the folder that holds one of them."
        )


def _json(path: Path) -> dict[str, Any]:
    """The object in ``path``; {} when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} is damaged ({error}), so it cannot be shown; copy the folder again.") from error
    return value if isinstance(value, dict) else {}


def _checkpoint(show: Console, folder: Path) -> None:
    from vla_rl.policies.pretrained import load_policy, read_config

    saved = read_config(folder)
    env_config = env_config_of(folder)
    policy = load_policy(folder)
    show.print(f"{folder}: {saved['policy']}, contract {saved['contract_version']}", soft_wrap=True)
    show.print(sizes(policy))
    show.print(tree("config", _mapping(saved, "config")))
    if words := _mapping(saved, "vocabulary").get("words"):
        show.print(table("vocabulary", ("words",), [(" ".join(words),)]))
    spec = EnvSpec.from_json(saved["spec"])
    _spec(show, spec)
    if env_config is not None:
        env = env_config.make(_NUM_ENVS)
        show.print(_checked(f"in the environment of its run, {_NUM_ENVS} at a time", _play(folder, type(policy), env)))
        return
    if spec.name not in _catalog():
        raise UserError(
            f"{str(folder)!r} was trained for {spec.name!r}, which is not in the catalogue, so it was not tried; "
            f"{did_you_mean(spec.name, _catalog())}"
        )
    show.print(_checked(f"in {spec.name}, {_NUM_ENVS} environments", _try(folder, spec, type(policy))))


def _mapping(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The entry ``name`` of a checkpoint's config where it is an object; policies of others may have none."""
    value = saved.get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def _reward(show: Console, folder: Path) -> None:
    from vla_rl.pretrained import load_module, read_config

    saved = read_config(folder, "reward")
    show.print(f"{folder}: {saved['reward']}, contract {saved['contract_version']}", soft_wrap=True)
    show.print(sizes(load_module(folder, "reward")))
    show.print(tree("made with", {name: item for name, item in saved.items() if name != "reward"}))


def _try(folder: Path, spec: EnvSpec, kind: Any) -> list[Checked]:
    """Let the policy act in the environment it was trained for."""
    env = _make(spec.name)
    if env.spec.images != spec.images:  # trained with other cameras or picture sizes than the environment's default
        env.close()
        env = _make(spec.name, cameras=tuple(spec.images), image_size=max(i.shape[0] for i in spec.images.values()))
    return _play(folder, kind, env)


def _play(folder: Path, kind: Any, env: VecEnv) -> list[Checked]:
    import torch

    with closing(env):
        return check_policy(kind.from_pretrained(folder, env.spec), env, torch.Generator().manual_seed(0))


def _checked(title: str, found: Iterable[Checked]) -> Table:
    return table(title, ("check", "result"), [(item.name, item.result) for item in found])
