"""Environments by name: those of the catalogue, and those of a user as "package.module:make".

An environment module is imported only when it is needed.  The other parts of a task (a scripted expert, labelled
scenes, a swapped instruction, claims, the spec) are declared by its ``make``; see ``vla_rl.contract.task``.  For an
environment that wraps another, they follow from its ``options``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.contract.task import Parameter, TaskExtras, extras_of, resolve

if TYPE_CHECKING:
    from vla_rl.contract.env import EnvSpec

CATALOG: dict[str, str] = {
    "lift": "sims.mujoco.tasks.lift:make",
    "place": "sims.mujoco.tasks.place:make",
    "push": "sims.mujoco.tasks.push:make",
    "mixed": "sims.mujoco.tasks.mixed:make",
    "so101": "sims.mujoco.tasks.so101:make",
    "genesis": "sims.genesis:make",
    "gym": "sims.gym:make",
    "isolated": "sims.isolated:make",
    "libero": "sims.libero:make",
    "maniskill": "sims.maniskill.make:make",
    "maniskill_lift": "sims.maniskill.lift:make",
    "metaworld": "sims.metaworld:make",
    "multi_task": "sims.multi_task:make",
    "randomize": "sims.randomize:make",
    "robosuite": "sims.robosuite:make",
    "remote": "sims.isolation.remote:make",
    "warp": "sims.warp:make",
    "counting": "sims.toy.counting:make",
    "point_mass": "sims.toy.point_mass:make",
}


def make(name: str, **options: Any) -> Any:
    """Make the environment ``name`` with its own ``options``; ``num_envs`` is one of them.

    ``name`` is in ``CATALOG`` or "package.module:function", which is also looked for in the working folder.  Raises
    UserError for an unknown name or option.
    """
    return call(name, find(name), options)


def find(name: str) -> Callable[..., Any]:
    """The function ``make(num_envs, **options)`` of environment ``name``; raises UserError for an unknown name."""
    if name not in CATALOG and ":" not in name:
        raise UserError(
            f"no environment is called {name!r}, so nothing can be made; {did_you_mean(name, CATALOG)}  "
            "An environment of your own is named 'package.module:make'."
        )
    return load(CATALOG.get(name, name))


def spec_of(name: str, **options: Any) -> EnvSpec:
    """The spec of environment ``name`` with ``options``.

    The environment is not built if its module declares the spec; otherwise one is built and closed.
    """
    declared = declared_spec(name, **options)
    if declared is not None:
        return declared
    env = find(name)(num_envs=1, **options)
    try:
        return env.spec
    finally:
        env.close()


def declared_spec(name: str, **options: Any) -> EnvSpec | None:
    """The spec that the module of environment ``name`` declares, without building anything; None if it does not."""
    builder = find(name)
    check_options(name, builder, options)
    declared = extras_of(builder).spec
    return None if declared is None else resolve(declared)(**options)


def extras(name: str, /, **options: Any) -> TaskExtras:
    """The extras that the module of environment ``name`` declares; of one that wraps another, those of that one."""
    declared = extras_of(find(name))
    if not declared.wraps:
        return declared
    inner, inner_options = _wrapped(name, options)
    found = extras(inner, **inner_options)
    return replace(found, expert=declared.expert) if declared.expert else found


def parameters(name: str, /, **options: Any) -> tuple[Parameter, ...]:
    """What environment ``name`` with ``options`` can vary between episodes; nothing if it declares nothing."""
    declared = extras_of(find(name)).parameters
    return () if declared is None else resolve(declared)(**options)


def expert(name: str, horizon: int, /, **options: Any) -> Any:
    """The scripted expert of ``name``, which plans ``horizon`` actions; raises UserError if it declares none."""
    return _declared(name, options, "expert", "scripted expert", "nobody can demonstrate its task")(horizon=horizon)


def scenes(name: str, /, **options: Any) -> Callable[..., Any]:
    """The function ``(count, seed)`` that draws labelled scenes of ``name``; raises UserError if it declares none."""
    without = "no policy can be grounded on them (imitate.py:from_dataset learns without)"
    return _declared(name, options, "scenes", "labelled scenes", without)


def swapped_options(name: str, /, **options: Any) -> Mapping[str, Any]:
    """Options of ``name`` for an instruction that names another object; raises UserError if it declares none."""
    if extras_of(find(name)).wraps:
        inner, inner_options = _wrapped(name, options)
        swapped = swapped_options(inner, **inner_options)
        return {"options": {**inner_options, **swapped}} if _takes_a_dict(name) else swapped
    return _declared(name, {}, "swapped_options", "swapped instruction", "following the instruction cannot be tested")


def claims(name: str, /, **options: Any) -> Callable[..., Any]:
    """The claims of ``name`` about an observation's pictures (``TaskExtras``); raises UserError if it declares none."""
    return _declared(name, options, "claims", "claims about its pictures", "no frame can be labelled")


def progress(name: str, /, **options: Any) -> Callable[..., Any]:
    """How far the task of ``name`` has come, as a person would see it (``TaskExtras``); raises UserError without it."""
    return _declared(name, options, "progress", "progress", "no scripted person sees when to take over")


def _declared(name: str, options: Mapping[str, Any], argument: str, what: str, consequence: str) -> Any:
    """What ``name`` declares as ``argument``, its ``what``; raises UserError, with the ``consequence``, for nothing."""
    found = getattr(extras(name, **options), argument)
    if found is None:
        raise UserError(
            f"environment {name!r} declares no {what}, so {consequence}; declare one by "
            f"@declare_task({argument}=...) above its make function (vla_rl.contract.task)."
        )
    return resolve(found)


def _wrapped(name: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and options of the environment that ``name`` with ``options`` wraps."""
    own = inspect.signature(find(name)).parameters
    inner = options.get("env", own["env"].default)
    if _takes_a_dict(name):
        return inner, options.get("options") or {}
    return inner, {option: value for option, value in options.items() if option not in own}


def _takes_a_dict(name: str) -> bool:
    """Whether ``name`` takes the options of the environment that it wraps as the one option ``options``."""
    parameter = inspect.signature(find(name)).parameters["options"]
    return parameter.kind is not parameter.VAR_KEYWORD


def call(name: str, builder: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """``builder(**options)`` of environment ``name``; raises UserError for an option that it does not take."""
    check_options(name, builder, options)
    return builder(**options)


def check_options(name: str, builder: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise UserError for options that ``builder`` does not take; any are left to one with ``**options``."""
    parameters = inspect.signature(builder).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    check_names(f"environment {name!r}", [parameter.name for parameter in parameters], options)


def check_names(what: str, known: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise UserError for one of ``options`` that ``what`` does not know."""
    for option in options:
        if option not in known:
            raise UserError(f"{what} has no option {option!r}, so it cannot be made; {did_you_mean(option, known)}")
