"""Frozen dataclass configs to JSON and back, so that workers are rebuilt from text; checks of the numbers in them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import name_of
from vla_rl.contract.trust import accept, named_class

_CLASS = "class"


def to_json(value: Any) -> Any:
    """Nested dataclasses, tuples, lists, dicts and scalars for JSON; a dataclass carries its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        name = name_of(kind)
        if ":" in name:
            accept([kind.__module__])  # a live object of this program, which may read again what it wrote
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_CLASS: name, **fields}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON; use plain fields in configs.")


def from_json(value: Any) -> Any:
    """Rebuild what :func:`to_json` wrote (sequences come back as tuples).

    Raises UserError for an unknown field, naming the nearest known one, and for classes of other versions.
    """
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {key: from_json(item) for key, item in value.items() if key != _CLASS}
    if _CLASS not in value:
        return fields
    kind = _class(value[_CLASS])
    if not dataclasses.is_dataclass(kind):
        raise UserError(
            f"{value[_CLASS]!r} is not a config class, so this JSON cannot be a config; use the config.json of a run."
        )
    known = {field.name for field in dataclasses.fields(kind)}
    for name in fields.keys() - known:
        raise UserError(f"{kind.__name__} has no field {name!r}, so it cannot be set; {did_you_mean(name, known)}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise UserError(
            f"{kind.__name__} cannot be rebuilt from this JSON ({error}), so it is not used; write it again with this "
            "version of vla-rl."
        ) from error


def _class(target: str) -> type:
    try:
        return named_class(target)
    except ModuleNotFoundError as error:
        if not f"{target.partition(':')[0]}.".startswith(f"{error.name}."):
            raise  # a package that the module imports
        raise UserError(
            f"{target!r} does not exist here, so the config that names it cannot be read; use the version of vla-rl "
            "that wrote it, or write it again."
        ) from error


JsonObject: TypeAlias = dict[str, Any]
"""A JSON object: a summary, a line of metrics, options of an environment."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""The same where it is only read."""


T = TypeVar("T")
_LIMITS = "limits"  # in the metadata of a field: (low, high), low None for what is above 0


class Checked:
    """A dataclass whose fields have their limits beside their defaults; a subclass's new default keeps the limits.

    Raises UserError for a number without meaning.
    """

    def __post_init__(self) -> None:
        for name, (low, high) in _limits(type(self)).items():
            if low is None:
                check_positive(self, name)
            check_limits(self, **{name: (low or 0, high)})


def _limits(kind: type) -> dict[str, tuple[float | None, float]]:
    own = (vars(base).get("__dataclass_fields__", {}).values() for base in reversed(kind.__mro__))
    return {field.name: field.metadata[_LIMITS] for fields in own for field in fields if _LIMITS in field.metadata}


def within(default: T, low: float, high: float) -> T:
    """A field of a :class:`Checked` dataclass: from ``low`` to ``high``, both included."""
    return dataclasses.field(default=default, metadata={_LIMITS: (low, high)})


def at_least(default: T, low: float) -> T:
    """A field of ``low`` or more."""
    return within(default, low, math.inf)


def above_zero(default: T, high: float = math.inf) -> T:
    """A field above 0, and at most ``high``."""
    return dataclasses.field(default=default, metadata={_LIMITS: (None, high)})


# Sizes that no network here has, and a config of somebody else's may: it would fill the memory.
WIDEST, DEEPEST = 10_000, 100


def check_limits(config: Any, **limits: tuple[float, float]) -> None:
    """Raise UserError unless each named field of ``config`` lies within its (low, high), both included."""
    for name, (low, high) in limits.items():
        value = getattr(config, name)
        if not low <= value <= high:  # a NaN is refused as well
            allowed = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise UserError(
                f"{type(config).__name__}.{name} is {value}, which has no meaning; choose a number {allowed}."
            )


def check_positive(config: Any, *names: str) -> None:
    """Raise UserError unless the fields ``names`` of ``config`` are above 0; infinity is allowed, NaN is not."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise UserError(
                f"{type(config).__name__}.{name} is {value}, which has no meaning; choose a number above 0."
            )


def check_ordered(config: Any, *names: str) -> None:
    """Raise UserError unless the fields ``names`` of ``config`` are None or pairs (lower, upper)."""
    for name in names:
        pair = getattr(config, name)
        if pair is not None and not pair[0] <= pair[1]:
            raise UserError(
                f"{type(config).__name__}.{name} is {pair}, so no number lies between them; give the lower bound first."
            )


def check_choice(config: Any, name: str, *choices: str) -> None:
    """Raise UserError unless the field ``name`` of ``config`` is one of ``choices``."""
    value = getattr(config, name)
    if value not in choices:
        allowed = " or ".join(map(repr, choices))
        raise UserError(f"{type(config).__name__}.{name} is {value!r}, which has no meaning; choose {allowed}.")
