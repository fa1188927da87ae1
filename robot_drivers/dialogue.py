"""Questions to a person, each asked again until its answer means something."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from robot_drivers.config import Part
from robot_drivers.devices import joysticks, serial_ports
from robot_drivers.driver import Asks
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """A "module:Class", "" for none, and options that are known with it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


_PLAIN = {"str": str, "int": int, "float": float, "bool": bool}  # options of other types are for the file's editor
_DEVICES: Mapping[str, Callable[[], dict[str, str]]] = {"port": serial_ports, "device": joysticks}
_YES = {"yes": True, "y": True, "true": True, "no": False, "n": False, "false": False}


class Dialogue:
    """Asks by ``ask``; remembers which devices were given, so that none is offered twice."""

    def __init__(self, ask: Asks) -> None:
        self._ask = ask
        self._taken: set[str] = set()

    def until(self, question: str, read: Callable[[str], T], default: str = "") -> T:
        """What ``read`` makes of the answer, ``default`` for an empty one; asked again with what it raises.

        ``read`` raises UserError or ValueError for an answer that means nothing.
        """
        wrong = ""
        while True:
            answer = self._ask(f"{wrong}{question}").strip() or default
            try:
                return read(answer)
            except (UserError, ValueError, ImportError) as error:
                wrong = f"{error}\n"

    def part(
        self,
        question: str,
        read: Callable[[str], Named],
        make: Callable[[str, dict[str, Any]], object],
        default: str = "",
        offered: Callable[[Named], Mapping[str, Any]] = lambda named: {},
    ) -> Part | None:
        """The thing that the answer means, with one question for each of its plain options; None for none.

        ``read`` gives its name and the options that are known with it.  ``make`` raises for options that do not fit:
        then all is asked again.  ``offered`` are the options' defaults in place of those of the class.
        """
        wrong = ""
        while True:
            found = self.until(f"{wrong}{question}", read, default)
            if not found.name:
                return None
            try:
                options = {**found.options, **self._options(found, offered(found))}
                make(found.name, options)
                return Part(found.name, options)
            except (UserError, ValueError, TypeError, ImportError) as error:
                wrong = f"{error}\n"

    def _options(self, found: Named, offered: Mapping[str, Any]) -> dict[str, Any]:
        given = {}
        for option in inspect.signature(load(found.name)).parameters.values():
            read = _reader(option)
            if read is None or option.name in found.options:
                continue
            default = offered.get(option.name, option.default)
            plugged = {one: what for one, what in _DEVICES.get(option.name, dict)().items() if one not in self._taken}
            if default is inspect.Parameter.empty and plugged:
                default = next(iter(plugged))
            value = self.until(_question(option.name, default, plugged), _or_default(read, default))
            if option.name in _DEVICES:
                self._taken.add(str(value))
            if value != option.default:
                given[option.name] = value
        return given


def among(kind: str, known: Mapping[str, str]) -> Callable[[str], Named]:
    """Reads one of ``known`` {word: "module:Class"}, or any "module:Class" that can be loaded."""

    def read(answer: str) -> Named:
        if answer in known:
            return Named(known[answer])
        if ":" not in answer:
            raise UserError(f"{answer!r} is no {kind} that is known; {did_you_mean(answer, known)}")
        load(answer)
        return Named(answer)

    return read


def number(low: float, high: float) -> Callable[[str], float]:
    """Reads a number from ``low`` to ``high``."""

    def read(answer: str) -> float:
        try:
            value = float(answer)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise UserError(f"{answer!r} is no number from {low:g} to {high:g}.")
        return value

    return read


def _reader(option: inspect.Parameter) -> Callable[[str], Any] | None:
    """Reads an option of plain types; None for another."""
    if option.kind in (option.VAR_KEYWORD, option.VAR_POSITIONAL):
        return None
    names = str(option.annotation).replace(" ", "").split("|")
    kinds = {_PLAIN.get(name.removeprefix("<class'").removesuffix("'>")) for name in names}
    if None in kinds:
        return None

    def read(answer: str) -> Any:
        if kinds == {bool}:
            if answer.lower() not in _YES:
                raise UserError(f"{answer!r} is neither yes nor no.")
            return _YES[answer.lower()]
        if kinds == {str}:
            return "" if answer in ("''", '""') else answer  # Enter is taken
        try:
            value = json.loads(answer)
        except ValueError:
            value = answer
        if (float in kinds and type(value) is int) or type(value) in kinds:
            return value
        wanted = " or ".join("a whole number" if kind is int else "a number" for kind in kinds if kind is not str)
        raise UserError(f"{option.name} is {wanted}, and {answer!r} is none.")

    return read


def _or_default(read: Callable[[str], Any], default: Any) -> Callable[[str], Any]:
    def answered(answer: str) -> Any:
        if answer:
            return read(answer)
        if default is inspect.Parameter.empty:
            raise UserError("This one is needed.")
        return default

    return answered


def _question(name: str, default: Any, found: Mapping[str, str]) -> str:
    there = ", ".join(f"{one} ({what})" for one, what in found.items())
    seen = f" Plugged in: {there}." if there else ""
    return f"{name}?{seen}" + ("" if default is inspect.Parameter.empty else f" (Enter: {default!r})")
