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
from rich.text import Text
from rich.tree import Tree

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.check import Checked, check_env, check_policy
from vla_rl.contract.config import to_json
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.spec import ArraySpec, EnvSpec
from vla_rl.recipes import sims
from vla_rl.recipes.saved import env_config_of

# Distribution -> the extra of vla-rl that brings it; "" for what comes always.
PACKAGES = dict.fromkeys(("numpy", "msgpack", "tyro", "rich"), "")
PACKAGES |= {"torch": "train", "safetensors": "train", "mujoco": "mujoco", "gymnasium": "gym", "diffusers": "diffusion"}
PACKAGES |= {"av": "report", "pillow": "report", "tensorboard": "tracking", "wandb": "tracking"}
_NUM_ENVS = 4
_USAGE = (
    "vla-rl inspect [ENVIRONMENT | package.module:make | CHECKPOINT FOLDER | RUN FOLDER | FILE.py:function]; without "
    "one: this installation"
)


def main(arguments: Sequence[str]) -> None:
    """Inspect the one target that was given, or the installation."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_USAGE)
        return
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise UserError(f"inspect takes one target, not {' '.join(arguments)!r}; write {_USAGE}.")
    inspect(arguments[0] if arguments else None)


def inspect(target: str | None, console: Console | None = None) -> None:
    """Print what ``target`` is (None: this installation) on ``console``; raises UserError when something is wrong."""
    show = console or Console(highlight=False)
    try:
        if target is None:
            _installation(show)
        elif target in _catalog():
            _environment(show, target)
        elif Path(target).is_dir():
            _folder(show, Path(target))
        elif target.rpartition(":")[0].endswith(".py") or target.endswith(".py"):
            _config(show, target)
        elif ":" in target:
            _environment(show, target)
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
    show.print(_table("installed", ("package", "version"), [*versions, ("contract", str(CONTRACT_VERSION))]))
    show.print(_table("devices", ("device", ""), _devices()))
    show.print(_table("renderers", ("OpenGL", ""), _renderers()))
    show.print(_table("environments", ("name", "what it is"), [(name, _about(name)) for name in sorted(_catalog())]))


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


def _environment(show: Console, name: str) -> None:
    with closing(_make(name)) as env:
        _spec(show, env.spec)
        show.print(_parameters(name))
        show.print(_checked(f"{name}, {_NUM_ENVS} environments: declared equals delivered", check_env(env)))


def _make(name: str, **options: Any) -> VecEnv:
    return sims.make_env(name, _NUM_ENVS, **options)


def _spec(show: Console, spec: EnvSpec) -> None:
    arrays = {f"image {name}": item for name, item in spec.images.items()}
    arrays |= {"state": spec.state, "action": spec.action, **spec.extras}
    rows = [(name, *_array(item)) for name, item in arrays.items()]
    show.print(_table(f"{spec.name}: what it delivers", ("", "shape", "range", "unit", "frame"), rows))
    for name in ("state", "action"):
        show.print(_table(f"entries of {name}", ("name", "range", "unit"), _entries(arrays[name])))
    limit = f"{spec.time_limit} control steps of {spec.control_dt:g} s; chunks of up to {spec.max_chunk}"
    facts = [
        ("tasks", "\n".join(spec.tasks)),
        ("time limit", limit),
        ("success", spec.success or "none: compare returns"),
    ]
    facts += [("device", spec.device), ("snapshots", "yes" if spec.can_snapshot else "no"), ("profile", spec.profile)]
    show.print(_table("episodes", ("", ""), facts))


def _parameters(name: str) -> Table:
    rows = [
        (one.name, f"{one.nominal:g}", f"{one.low:g} .. {one.high:g}", one.unit, one.meaning)
        for one in sims.parameters_of(name)
    ]
    return _table("what --env randomize can vary in it", ("parameter", "nominal", "range", "unit", ""), rows)


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
        show.print(_tree(f"{folder}: summary", summary) if summary else f"{folder} has no summary yet.")
        found = sorted(str(path.parent) for path in folder.glob("checkpoints/*/config.json"))
        show.print(_table("checkpoints", ("vla-rl inspect ...",), [(path,) for path in found]))
    elif {"type", "model_type"} & config.keys():
        from vla_rl.cli.inspect_public import describe_public

        show.print(_table(f"{folder}: a public checkpoint", ("", ""), describe_public(folder)))
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
    show.print(_sizes(policy))
    show.print(_tree("config", _mapping(saved, "config")))
    if words := _mapping(saved, "vocabulary").get("words"):
        show.print(_table("vocabulary", ("words",), [(" ".join(words),)]))
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
    show.print(_sizes(load_module(folder, "reward")))
    show.print(_tree("made with", {name: item for name, item in saved.items() if name != "reward"}))


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


def _sizes(policy: Any) -> Table:
    """Parameters per module, and how many of them are trained; none for what is no network."""
    trained = {id(item) for item in policy.trainable().values()} if hasattr(policy, "trainable") else None
    rows = []
    for name, module in [*policy.named_children(), ("all", policy)] if hasattr(policy, "named_children") else []:
        sizes = [(item.numel(), trained is None or id(item) in trained) for item in module.parameters()]
        rows.append((name, f"{sum(n for n, _ in sizes):,}", f"{sum(n for n, learns in sizes if learns):,}"))
    return _table(f"{type(policy).__name__}: parameters", ("module", "number", "trained"), rows)


# -- a config ----------------------------------------------------------------------------------------------------------


def _config(show: Console, target: str) -> None:
    from vla_rl.recipes.config_files import load_config

    config = load_config(target)
    show.print(_tree(target, to_json(config)))
    if hasattr(config, "env") and hasattr(config, "new"):
        show.print(_sizes(_untrained(config)))
    if hasattr(config, "rl"):
        rl = config.rl
        facts = [
            ("one rollout", f"{rl.experience}"),
            ("algorithm", type(rl.algorithm).__name__.removesuffix("Config")),
            ("whole run", f"{rl.loop.iterations} iterations"),
        ]
        show.print(_table("sizes", ("", ""), facts))


def _untrained(config: Any) -> Any:
    """The policy that the config trains from nothing, for counting."""
    import numpy as np

    from vla_rl.experience.demonstrations import Demonstrations

    spec = config.env.spec()
    state, action = (np.zeros((2, size), np.float32) for size in (spec.state.shape[0], spec.action_dim))
    none = np.zeros(2, np.int64)
    images = {name: np.zeros((2, *item.shape), np.uint8) for name, item in spec.images.items()}
    return config.new.build(spec, Demonstrations(images, state, none, none, action, none, none, spec.tasks, 1.0), 0)


# -- formatting --------------------------------------------------------------------------------------------------------


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain text: square brackets are no markup in it."""
    table = Table(*columns, title=Text(title, "bold"), title_justify="left", show_header=any(columns))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _checked(title: str, found: Iterable[Checked]) -> Table:
    return _table(title, ("check", "result"), [(item.name, item.result) for item in found])


def _tree(name: str, value: Mapping[str, Any]) -> Tree:
    """Nested settings or results, one per line."""
    tree = Tree(Text(name, "bold"))
    for key, item in value.items():
        if isinstance(item, Mapping) and {"success", "low", "high", "episodes"} <= set(item):
            interval = f"[{100 * item['low']:.1f}, {100 * item['high']:.1f}]"
            tree.add(Text(f"{key}: {item['success']:.1%} {interval} of {item['episodes']} episodes"))
        elif isinstance(item, Mapping) and item:
            kind = str(item.get("class", "")).rpartition(":")[2]
            tree.add(
                _tree(f"{key}: {kind}" if kind else key, {name: part for name, part in item.items() if name != "class"})
            )
        else:
            tree.add(Text(f"{key}: {item:.4g}" if isinstance(item, float) else f"{key}: {item}"))
    return tree
