"""What the author of an environment declares beside it: expert, labelled scenes, swapped instruction, spec, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from vla_rl.contract.load import load
from vla_rl.contract.parameter import Parameter
from vla_rl.contract.spec import EnvSpec

Named: TypeAlias = str | Callable[..., Any]  # "package.module:name", or the object itself
Make = TypeVar("Make", bound=Callable[..., Any])
_ATTRIBUTE = "task_extras"


@dataclass(frozen=True)
class TaskExtras:
    """What belongs to a task besides its environment; every part is optional.

    expert           ``expert(horizon=H).act(obs) -> float32 [E,H,D]``, a scripted expert that demonstrates the task
    scenes           ``scenes(count, seed) -> (images, tasks, uv, state)``, labelled random scenes for grounding
    swapped_options  options of ``make`` for the same scenes with an instruction that names another object
    claims           ``claims(obs) -> [(task, label, known)]``, int and bool [E]: an instruction of each environment,
                     whether its picture shows that fulfilled, and whether that is known; reward models learn from it
    spec             ``spec(**options) -> EnvSpec`` of what ``make`` builds with these options, without building it
    progress         ``progress(obs) -> float [E]`` from 0 to 1: how far the task has come, as somebody who watches
                     could estimate it; it may read ``privileged/*``.  Scripted people take over by it
    parameters       ``parameters(**options) -> (Parameter, ...)``: what may differ between episodes; ``reset`` then
                     takes their values (``VariableEnv``)
    wraps            ``make`` takes the name of another environment as ``env`` and its options as ``options`` or
                     ``**options``; expert (without one of its own), scenes, swapped instruction, claims and progress
                     are those of that one
    """

    expert: Named | None = None
    scenes: Named | None = None
    swapped_options: Mapping[str, Any] | None = None
    spec: Callable[..., EnvSpec] | str | None = None
    claims: Named | None = None
    progress: Named | None = None
    parameters: Callable[..., tuple[Parameter, ...]] | str | None = None
    wraps: bool = False


def declare_task(
    expert: Named | None = None,
    scenes: Named | None = None,
    swapped_options: Mapping[str, Any] | None = None,
    spec: Callable[..., EnvSpec] | str | None = None,
    claims: Named | None = None,
    progress: Named | None = None,
    parameters: Callable[..., tuple[Parameter, ...]] | str | None = None,
    wraps: bool = False,
) -> Callable[[Make], Make]:
    """A decorator for ``make(num_envs, **options)`` that declares what else belongs to the task (``TaskExtras``)."""
    extras = TaskExtras(expert, scenes, swapped_options, spec, claims, progress, parameters, wraps)

    def declare(make: Make) -> Make:
        setattr(make, _ATTRIBUTE, extras)
        return make

    return declare


def extras_of(make: Callable[..., Any]) -> TaskExtras:
    """What ``make`` declares; nothing without :func:`declare_task`."""
    found: TaskExtras = getattr(make, _ATTRIBUTE, TaskExtras())
    return found


def resolve(named: Named) -> Any:
    """The object that ``named`` is or names; raises what :func:`vla_rl.contract.load.load` raises."""
    return load(named) if isinstance(named, str) else named
