"""What ``vla-rl inspect`` says about this installation, an environment, or a folder: a checkpoint, a run, a dataset.

Nothing heavy is imported before it is looked at, so it works on a machine where half of it is missing.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.check import Checked, check_env, check_policy
from vla_rl.contract.config import JsonMapping, JsonObject
from vla_rl.contract.env import ArraySpec, EnvSpec, VecEnv
from vla_rl.contract.errors import UserError, cause_of, printable
from vla_rl.contract.hub import LEROBOT
from vla_rl.contract.policy import Policy
from vla_rl.contract.trust import read_json
from vla_rl.recipes import sims
from vla_rl.recipes.config_files import env_config_of

if TYPE_CHECKING:
    from vla_rl.policies.vla.checkpoint import PublicCheckpoint

_OF_A_DATASET = ("codebase_version", "robot_type", "total_episodes", "total_frames", "fps")
_LARGEST = 2048  # pixels a side in which a policy is tried
_Open: TypeAlias = Callable[[Path, EnvSpec], Policy]  # a class's from_pretrained


def show_folder(show: Console, folder: Path) -> None:
    """Print what ``folder`` holds; raises UserError when it is none of these or damaged."""
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
    elif info := _json(folder / "meta" / "info.json"):
        if not (features := _mapping(info, "features")):
            raise UserError(
                f"{str(folder / 'meta' / 'info.json')!r} lists no features, so the dataset cannot be shown; "
                "copy the folder again."
            )
        known = {name: info.get(name) for name in _OF_A_DATASET if info.get(name) is not None}
        show.print(tree(f"{folder}: a dataset", known | {"features": ", ".join(features)}))
    elif {"type", "model_type"} & config.keys():
        show.print(table(f"{folder}: a public checkpoint", ("", ""), describe_public(folder)))
    else:
        raise UserError(
            f"{str(folder)!r} has neither config.json, summary.json nor meta/info.json, so it is no checkpoint, run or "
            "dataset; give the folder that holds one of them."
        )


def _json(path: Path) -> JsonObject:
    """The object in ``path``; {} when there is no such file."""
    try:
        value = read_json(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} is damaged ({error}), so it cannot be shown; copy the folder again.") from error
    return value if isinstance(value, dict) else {}


def _checkpoint(show: Console, folder: Path) -> None:
    from vla_rl.policies.pretrained import load_policy, read_config

    saved = read_config(folder)
    env_config = env_config_of(folder)
    policy = load_policy(folder)
    reopen: _Open = type(policy).from_pretrained
    show.print(f"{folder}: {saved['policy']}, contract {saved['contract_version']}", soft_wrap=True)
    show.print(sizes(policy))
    show.print(tree("config", _mapping(saved, "config")))
    if words := _mapping(saved, "vocabulary").get("words"):
        show.print(table("vocabulary", ("words",), [(" ".join(words),)]))
    spec = EnvSpec.from_json(saved["spec"])
    show_spec(show, spec)
    if env_config is not None:
        env = env_config.make(NUM_ENVS)
        show.print(checked_table(f"in the environment of its run, {NUM_ENVS} at a time", _play(folder, reopen, env)))
        return
    if spec.name not in catalog():
        show.print(
            f"it was not tried: its environment {spec.name!r} is not in the catalogue; vla-rl eval plays it in --env."
        )
        return
    show.print(checked_table(f"in {spec.name}, {NUM_ENVS} environments", _try(folder, spec, reopen)))


def _mapping(saved: JsonMapping, name: str) -> JsonObject:
    """The entry ``name`` of a checkpoint's config where it is an object; policies of others may have none."""
    value = saved.get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def _reward(show: Console, folder: Path) -> None:
    from vla_rl.pretrained import load_module, read_config

    saved = read_config(folder, "reward")
    show.print(f"{folder}: {saved['reward']}, contract {saved['contract_version']}", soft_wrap=True)
    show.print(sizes(load_module(folder, "reward")))
    show.print(tree("made with", {name: item for name, item in saved.items() if name != "reward"}))


def _try(folder: Path, spec: EnvSpec, reopen: _Open) -> list[Checked]:
    """Let the policy act in the environment it was trained for."""
    largest = max((side for item in spec.images.values() for side in item.shape), default=1)
    if largest > _LARGEST:
        raise UserError(
            f"{str(folder)!r} was trained with pictures of {largest} pixels a side, so it was not tried; say so with "
            "vla-rl eval and --env.options, where that is meant."
        )
    env = sims.make_env(spec.name, NUM_ENVS)
    if env.spec.images != spec.images:  # trained with other cameras or picture sizes than the environment's default
        env.close()
        pictures = {"cameras": tuple(spec.images), "image_size": max(item.shape[0] for item in spec.images.values())}
        env = sims.make_env(spec.name, NUM_ENVS, **pictures)
    return _play(folder, reopen, env)


def _play(folder: Path, reopen: _Open, env: VecEnv) -> list[Checked]:
    import torch

    with closing(env):
        return check_policy(reopen(folder, env.spec), env, torch.Generator().manual_seed(0))


NUM_ENVS = 4  # what is inspected is stepped side by side


def show_environment(show: Console, name: str, options: Mapping[str, object]) -> None:
    """Print the environment ``name`` with ``options``; raises ContractError when it does not keep the contract."""
    with closing(sims.make_env(name, NUM_ENVS, **options)) as env:
        show_spec(show, env.spec, getattr(env, "success_from", ""))
        varied = [
            (one.name, f"{one.nominal:g}", f"{one.low:g} .. {one.high:g}", one.unit, one.meaning)
            for one in sims.parameters_of(name, options)
        ]
        columns = ("parameter", "nominal", "range", "unit", "")
        show.print(table("what --env randomize can vary in it", columns, varied))
        show.print(checked_table(f"{name}, {NUM_ENVS} environments: declared equals delivered", check_env(env)))


def checked_table(title: str, found: Iterable[Checked]) -> Table:
    """What was checked, and what came out."""
    return table(title, ("check", "result"), [(item.name, item.result) for item in found])


def show_spec(show: Console, spec: EnvSpec, success_from: str = "") -> None:
    """Print arrays, their entries, what ends an episode, and what says that it has succeeded, where that is known."""
    arrays = {f"image {name}": item for name, item in spec.images.items()}
    arrays |= {"state": spec.state, "action": spec.action, **spec.extras}
    rows = [(name, *_array(item)) for name, item in arrays.items()]
    show.print(table(f"{spec.name}: what it delivers", ("", "shape", "range", "unit", "frame"), rows))
    for name in ("state", "action"):
        show.print(table(f"entries of {name}", ("name", "range", "unit"), _entries(arrays[name])))
    limit = f"{spec.time_limit} control steps of {spec.control_dt:g} s; chunks of up to {spec.max_chunk}"
    success = ": ".join(filter(None, (spec.success or "none, compare returns", success_from)))
    facts = [("tasks", "\n".join(spec.tasks)), ("time limit", limit), ("success", success), ("device", spec.device)]
    facts += [("snapshots", "yes" if spec.can_snapshot else "no"), ("profile", spec.profile)]
    show.print(table("episodes", ("", ""), facts))


def _array(spec: ArraySpec) -> tuple[str, str, str, str]:
    ranges = set(_ranges(spec, 1))
    return f"{spec.dtype}{list(spec.shape)}", ranges.pop() if len(ranges) == 1 else "below", spec.unit, spec.frame


def _entries(spec: ArraySpec) -> list[tuple[str, str, str]]:
    size = spec.shape[-1]
    names, units = spec.names or tuple(map(str, range(size))), spec.unit.split(",")
    rows = list(zip(names, _ranges(spec, size), units if len(units) == size else [spec.unit] * size, strict=True))
    if spec.names:
        return rows
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row[1:])]
    return [(run[0][0] if len(run) == 1 else f"{run[0][0]} to {run[-1][0]}", *run[0][1:]) for run in runs]


def _ranges(spec: ArraySpec, size: int) -> list[str]:
    """The range of every entry; ``size`` times the same when they share one."""
    size = max([size, *(len(bound) for bound in (spec.low, spec.high) if isinstance(bound, tuple))])
    low, high = (np.broadcast_to(bound, size).tolist() for bound in (spec.low, spec.high))
    return [f"{a:g} .. {b:g}" for a, b in zip(low, high, strict=True)]


# Distribution -> the extra of vla-rl that brings it; "" for what comes always.
PACKAGES = dict.fromkeys(("numpy", "msgpack", "tyro", "rich"), "")
PACKAGES |= {"torch": "train", "safetensors": "train", "mujoco": "mujoco", "gymnasium": "gym", "diffusers": "diffusion"}
PACKAGES |= {"av": "report", "pillow": "report", "jinja2": "report", "tensorboard": "tracking", "wandb": "tracking"}


def show_installation(show: Console) -> None:
    """Print versions, devices, renderers and environments; beside what is missing, the command that installs it."""
    versions = [("python", platform.python_version())] + [(name, _version(name)) for name in PACKAGES]
    show.print(table("installed", ("package", "version"), [*versions, ("contract", str(CONTRACT_VERSION))]))
    show.print(table("devices", ("device", ""), _devices()))
    drivers = [("Vulkan, for ManiSkill", sims.maniskill_driver())]
    show.print(table("renderers", ("", ""), [*_renderers(), *drivers]))
    show.print(table("environments", ("name", "what it is"), [(name, _about(name)) for name in sorted(catalog())]))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return missing_package(package)


def missing_package(package: str) -> str:
    """That ``package`` is not installed, and the command that installs it."""
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


def catalog() -> dict[str, str]:
    """{name: "module:make"} of the environments that have a name."""
    return sims.catalog().CATALOG


def _about(name: str) -> str:
    """The first line of the entry's docstring, read without importing what may not be installed."""
    module = catalog()[name].partition(":")[0]
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    return (ast.get_docstring(ast.parse(source)) or f"{module} is missing").partition("\n")[0]


def describe_public(folder: Path) -> list[tuple[str, str]]:
    """Rows (what, value); what is missing is said in its row.  Weights are not read, only their headers.

    Raises UserError for a family that is not known and a damaged ``config.json``.
    """
    from vla_rl.policies.vla.checkpoint import read_public

    checkpoint = read_public(folder)
    known = {"state": checkpoint.state_size, "action": checkpoint.action_size}
    return [
        ("family", checkpoint.family),
        ("cameras", _cameras(checkpoint)),
        *((name, f"{size} entries" if size else "not declared") for name, size in known.items()),
        ("actions", f"chunks of {checkpoint.chunk}, {checkpoint.executed} executed{_relative(checkpoint.relative)}"),
        ("tokenizer", _tokenizer(checkpoint)),
        ("statistics", _or_problem(lambda: _statistics(checkpoint))),
        ("weights", _or_problem(lambda: _weights(folder))),
        ("open it", f"--policy {folder} --env NAME, and --vla.OPTION VALUE where one does not fit"),
    ]


def describe_lerobot(name: str) -> list[tuple[str, str]]:
    """Rows (what, value) of the policy "lerobot:FOLDER"; nothing of LeRobot's is started for them.

    Raises UserError where there is no policy or what describes it is damaged.
    """
    from vla_rl.policies.lerobot.policy import PROCESSORS, folder_of

    folder = folder_of(name.removeprefix(LEROBOT))
    config, processors = _json(folder / "config.json"), {path: _json(folder / path) for path in PROCESSORS}
    rows = [("family", str(config.get("type", "not named"))), ("reads at once", str(config.get("n_obs_steps", 1)))]
    try:
        for kind in ("input_features", "output_features"):
            features = config[kind].items()
            rows.append((kind.split("_")[0], ", ".join(f"{key} {item['shape']}" for key, item in features)))
        for path, saved in processors.items():
            steps = [step.get("registry_name") or step["class"] for step in saved.get("steps", ())]
            rows.append((Path(path).stem, ", ".join(map(str, steps)) or "none"))
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(folder)!r} does not describe its policy as LeRobot writes it ({cause_of(error)}), so it cannot be "
            "shown; copy the folder again."
        ) from error
    rows.append(("weights", _or_problem(lambda: _weights(folder))))
    return [*rows, ("open it", f"--policy {name} --env NAME; LeRobot runs it (vla-rl policies install lerobot)")]


def _relative(relative: Sequence[bool]) -> str:
    """What an action is relative to; nothing where it is absolute."""
    entries = [str(i) for i, is_relative in enumerate(relative) if is_relative]
    return f"; entries {', '.join(entries)} relative to the state" if entries else ""


def _or_problem(row: Callable[[], str]) -> str:
    try:
        return row()
    except UserError as error:
        return str(error)


def _cameras(checkpoint: PublicCheckpoint) -> str:
    if not checkpoint.cameras:
        return "not named: the environment's, in order"
    sizes = {name: f" {h}x{w}" for name, (h, w) in checkpoint.image_shapes.items()}
    renamed = {name: f" (recorded as {old})" for name, old in checkpoint.renamed.items()}
    return ", ".join(f"{name}{sizes.get(name, '')}{renamed.get(name, '')}" for name in checkpoint.cameras)


def _tokenizer(checkpoint: PublicCheckpoint) -> str:
    from vla_rl.policies.vla.tokenizer import FILE

    if (checkpoint.folder / FILE).is_file():
        return f"{FILE} in the folder"
    if checkpoint.tokenizer:
        return f"{checkpoint.tokenizer}, from the Hugging Face hub or its cache"
    return f"missing: copy {FILE} into the folder"


def _statistics(checkpoint: PublicCheckpoint) -> str:
    from vla_rl.policies.vla.dataset_statistics import read_statistics

    found = read_statistics(checkpoint.folder, checkpoint.modes)
    state = "no state" if found.state is None else f"{len(found.state.offset)} state entries"
    return f"{Path(found.source).name}: {state}, {len(found.action.offset)} action entries"


def _weights(folder: Path) -> str:
    from vla_rl.policies.vla.weights import adapted, tensor_sizes, weight_files

    sizes, beneath = tensor_sizes(folder), adapted(folder)
    by_dtype: Counter[str] = Counter()
    for dtype, count in sizes.values():
        by_dtype[dtype] += count
    numbers = ", ".join(f"{count:,} {dtype}" for dtype, count in by_dtype.most_common())
    files, under = len(weight_files(folder)), f"; of {beneath}, under an adapter" if beneath else ""
    return f"{len(sizes)} tensors in {files} {'file' if files == 1 else 'files'}: {numbers}{under}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain text: square brackets are no markup in it."""
    made = Table(*columns, title=_text(title, "bold"), title_justify="left", show_header=any(columns))
    for row in rows:
        made.add_row(*(_text(cell) for cell in row))
    return made


def tree(name: str, value: Mapping[str, object]) -> Tree:
    """Nested settings or results, one per line."""
    made = Tree(_text(name, "bold"))
    for key, item in value.items():
        if isinstance(item, Mapping) and {"success", "low", "high", "episodes"} <= set(item):
            interval = f"[{100 * item['low']:.1f}, {100 * item['high']:.1f}]"
            made.add(_text(f"{key}: {item['success']:.1%} {interval} of {item['episodes']} episodes"))
        elif isinstance(item, Mapping) and item:
            kind = str(item.get("class", "")).rpartition(":")[2]
            made.add(
                tree(f"{key}: {kind}" if kind else key, {name: part for name, part in item.items() if name != "class"})
            )
        else:
            made.add(_text(f"{key}: {item:.4g}" if isinstance(item, float) else f"{key}: {item}"))
    return made


def sizes(of: object) -> Table:
    """Parameters per module, and how many of them are trained; none for what is no network."""
    policy: Any = of
    trained = {id(item) for item in policy.trainable().values()} if hasattr(policy, "trainable") else None
    rows = []
    for name, module in [*policy.named_children(), ("all", policy)] if hasattr(policy, "named_children") else []:
        counts = [(item.numel(), trained is None or id(item) in trained) for item in module.parameters()]
        rows.append((name, f"{sum(n for n, _ in counts):,}", f"{sum(n for n, learns in counts if learns):,}"))
    return table(f"{type(policy).__name__}: parameters", ("module", "number", "trained"), rows)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)
