"""What the author of an environment declares beside it: expert, labelled scenes, swapped instruction, parameters, ...

A run varies the parameters by a :class:`Randomization`, drawn from an episode's seed alone; ``reset(env_ids, seeds,
parameters)`` takes their values (:class:`VariableEnv`).  ``sims/randomize.py`` draws them for every episode.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.load import load

if TYPE_CHECKING:  # the catalogue is read without numpy
    import numpy as np

    from vla_rl.contract.env import Array, EnvSpec, Observation

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

    def __call__(self, make: Make) -> Make:
        """``make``, with which all this belongs."""
        setattr(make, _ATTRIBUTE, self)
        return make


declare_task = TaskExtras
"""The decorator for ``make(num_envs, **options)`` that declares what else belongs to the task."""


def extras_of(make: Callable[..., Any]) -> TaskExtras:
    """What ``make`` declares; nothing without ``declare_task``."""
    return getattr(make, _ATTRIBUTE, TaskExtras())


def resolve(named: Named) -> Any:
    """The object that ``named`` is or names; raises what :func:`vla_rl.contract.load.load` raises."""
    return load(named) if isinstance(named, str) else named


@dataclass(frozen=True)
class Parameter:
    """One number of an environment that may differ between episodes.

    ``nominal`` is its value in the environment as it is; ``low`` and ``high`` are the inclusive bounds in ``unit``;
    ``integer`` parameters take whole numbers only (an index, a count of control steps).
    """

    name: str
    nominal: float
    low: float
    high: float
    unit: str
    meaning: str
    integer: bool = False

    def check(self, value: float) -> None:
        """Raise UserError unless ``value`` is allowed."""
        whole = not self.integer or float(value).is_integer()
        if not (self.low <= value <= self.high and whole):
            kind = "whole number" if self.integer else "number"
            raise UserError(
                f"parameter {self.name!r} cannot be {value:g}; give a {kind} from {self.low:g} to {self.high:g} "
                f"({self.unit}: {self.meaning})."
            )

    def grid(self, count: int) -> tuple[float, ...]:
        """About ``count`` increasing values from ``low`` to ``high``, ``nominal`` among them.

        They are evenly spaced below ``nominal`` and above it, with as many on either side where both sides exist.
        """
        sides = [end for end in (self.low, self.high) if end != self.nominal]
        steps = max(1, (count - 1) // len(sides)) if sides else 0
        span = (self.nominal + (end - self.nominal) * i / steps for end in sides for i in range(1, steps + 1))
        # Six digits, as they are printed.
        rounded = (float(round(v)) if self.integer else float(f"{v:.6g}") for v in (self.nominal, *span))
        return tuple(sorted({min(max(value, self.low), self.high) for value in rounded}))


RANDOMIZATION = "privileged/randomization"  # extra: float32 [E,P], the value of every declared parameter


@dataclass(frozen=True)
class Uniform:
    """Uniform between ``low`` and ``high``; of an integer parameter, whole numbers with both ends."""

    low: float
    high: float

    def check(self, parameter: Parameter) -> None:
        """Raise UserError unless ``parameter`` may take every value."""
        parameter.check(self.low)
        parameter.check(self.high)
        if self.low > self.high:
            raise UserError(
                f"parameter {parameter.name!r} has no value between {self.low:g} and {self.high:g}; give the lower "
                "bound first."
            )

    def draw(self, parameter: Parameter, rng: np.random.Generator) -> float:
        if parameter.integer:
            return float(rng.integers(int(self.low), int(self.high) + 1))
        return float(rng.uniform(self.low, self.high))


@dataclass(frozen=True)
class Choice:
    """One of ``values``, all equally likely; a single one is a fixed value."""

    values: tuple[float, ...]

    def check(self, parameter: Parameter) -> None:
        """Raise UserError unless ``parameter`` may take every value."""
        if not self.values:
            raise UserError(f"parameter {parameter.name!r} has no value to choose from; give at least one.")
        for value in self.values:
            parameter.check(value)

    def draw(self, parameter: Parameter, rng: np.random.Generator) -> float:
        return self.values[int(rng.integers(len(self.values)))]


Distribution: TypeAlias = Uniform | Choice


@dataclass(frozen=True)
class Randomization:
    """How the parameters of an environment are drawn at every reset; those not named keep their nominal values.

    What an episode gets is a function of its seed and this description.  Every parameter is drawn by a generator of its
    own, so naming another one does not change it.
    """

    distributions: Mapping[str, Distribution] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Randomization:
        """From {name: number | {"low": a, "high": b} | {"values": [...]}}; raises UserError for anything else."""
        return cls({name: _distribution(name, item) for name, item in data.items()})

    def to_json(self) -> dict[str, Any]:
        return {
            name: {"low": item.low, "high": item.high} if isinstance(item, Uniform) else {"values": list(item.values)}
            for name, item in self.distributions.items()
        }

    def check(self, declared: Sequence[Parameter], env: str) -> None:
        """Raise UserError unless every named parameter is ``declared`` by ``env`` and may take its values."""
        known = {parameter.name: parameter for parameter in declared}
        for name, distribution in self.distributions.items():
            if name not in known:
                raise UserError(
                    f"environment {env!r} cannot vary {name!r}, so it was not made; {did_you_mean(name, known)}"
                )
            distribution.check(known[name])

    def draw(self, declared: Sequence[Parameter], seeds: Sequence[int] | np.ndarray) -> np.ndarray:
        """float64 [R,P]: the value of every ``declared`` parameter in the episodes of ``seeds`` [R]."""
        import numpy as np

        values = np.tile([parameter.nominal for parameter in declared], (len(seeds), 1))
        for column, parameter in enumerate(declared):
            distribution = self.distributions.get(parameter.name)
            if distribution is not None:
                for row, seed in enumerate(seeds):
                    values[row, column] = distribution.draw(parameter, parameter_generator(int(seed), parameter.name))
        return values.reshape(len(seeds), len(declared))


class VariableEnv(Protocol):
    """An environment whose ``reset`` takes values of the parameters that its ``make`` declares."""

    def reset(self, env_ids: Array, seeds: Array, parameters: Mapping[str, Array] | None = None) -> Observation:
        """As ``VecEnv.reset``; the episodes have the ``parameters`` {name: [R]}, and nominal values without."""


def parameter_rows(declared: Sequence[Parameter], given: Mapping[str, Array] | None, env_ids: np.ndarray) -> np.ndarray:
    """float64 [R,P]: ``given`` {name: [R]}, one value per entry of ``env_ids``, and nominal values for the rest.

    Raises UserError for a name that is not ``declared`` and ContractError for another number of values.
    """
    import numpy as np

    names = [parameter.name for parameter in declared]
    rows = np.tile([parameter.nominal for parameter in declared], (len(env_ids), 1)).reshape(len(env_ids), len(names))
    for name, values in (given or {}).items():
        if name not in names:
            raise UserError(f"there is no parameter {name!r}, so nothing was reset; {did_you_mean(name, names)}")
        if np.shape(values) != np.shape(env_ids):
            raise ContractError(
                f"parameter {name!r} has shape {np.shape(values)} for {len(env_ids)} environments, so nothing was "
                "reset; give one value for each."
            )
        rows[:, names.index(name)] = values
    return rows


def parameter_generator(seed: int, name: str) -> np.random.Generator:
    """The generator of parameter ``name`` in the episode of ``seed``."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])))


def _distribution(name: str, given: Any) -> Distribution:
    if isinstance(given, Uniform | Choice):
        return given
    if _is_number(given):
        return Choice((float(given),))
    if isinstance(given, Mapping):
        values = given.get("values")
        if set(given) == {"low", "high"} and all(map(_is_number, given.values())):
            return Uniform(float(given["low"]), float(given["high"]))
        if set(given) == {"values"} and isinstance(values, list | tuple) and all(map(_is_number, values)):
            return Choice(tuple(map(float, values)))
    raise UserError(
        f"parameter {name!r} is described by {given!r}, which says nothing about its values; give a number, "
        '{"low": a, "high": b} or {"values": [a, b]}.'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
