"""What ``vla-rl inspect`` says about an environment: what it declares, and whether it delivers that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from itertools import groupby

from rich.console import Console
from rich.table import Table

from vla_rl.contract.check import Checked, check_env
from vla_rl.contract.spec import ArraySpec, EnvSpec
from vla_rl.recipes import sims
from vla_rl.recipes.tables import table

NUM_ENVS = 4  # what is inspected is stepped side by side


def show_environment(show: Console, name: str, options: Mapping[str, object]) -> None:
    """Print the environment ``name`` with ``options``; raises ContractError when it does not keep the contract."""
    with closing(sims.make_env(name, NUM_ENVS, **options)) as env:
        show_spec(show, env.spec, getattr(env, "success_from", ""))
        show.print(_parameters(name, options))
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
    facts = [
        ("tasks", "\n".join(spec.tasks)),
        ("time limit", limit),
        ("success", ": ".join(filter(None, (spec.success or "none, compare returns", success_from)))),
    ]
    facts += [("device", spec.device), ("snapshots", "yes" if spec.can_snapshot else "no"), ("profile", spec.profile)]
    show.print(table("episodes", ("", ""), facts))


def _parameters(name: str, options: Mapping[str, object]) -> Table:
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
    rows = list(zip(names, _ranges(spec, size), units if len(units) == size else [spec.unit] * size, strict=True))
    if spec.names:
        return rows
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row[1:])]
    return [(run[0][0] if len(run) == 1 else f"{run[0][0]} to {run[-1][0]}", *run[0][1:]) for run in runs]


def _ranges(spec: ArraySpec, size: int) -> list[str]:
    """The range of every entry; ``size`` times the same when they share one."""
    low, high = (bound if isinstance(bound, tuple) else (bound,) * size for bound in (spec.low, spec.high))
    size = max(len(low), len(high))  # one of them may be shared
    low, high = (bound if len(bound) == size else bound * size for bound in (low, high))
    return [f"{a:g} .. {b:g}" for a, b in zip(low, high, strict=True)]
