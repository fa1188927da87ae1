"""Find config functions by ``FILE.py:function``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vla_rl
from vla_rl.contract.errors import UserError, did_you_mean


def find_file(name: str) -> Path:
    """The config file at the given path, in ``./configs``, or among those shipped with the package."""
    path = Path(name)
    shipped = Path(vla_rl.__file__).parent / "_configs"
    checkout = Path(vla_rl.__file__).parents[1] / "configs"
    places = [path, Path("configs") / path.name, shipped / path.name, checkout / path.name]
    for place in places:
        if place.is_file():
            return place
    known = {item.name for folder in (Path("configs"), shipped, checkout) for item in folder.glob("[!_]*.py")}
    raise UserError(f"there is no config file {name!r}, so nothing can be run; {did_you_mean(path.name, known)}")


def load_config(target: str) -> Any:
    """The config that ``FILE.py:function`` returns."""
    return config_function(target)()


def config_function(target: str) -> Callable[[], Any]:
    """``FILE.py:function`` itself, whose docstring says what its config is for."""
    file, colon, function = target.rpartition(":")
    if not colon:
        raise UserError(f"{target!r} names no config function, so nothing can be run; write FILE.py:function.")
    path = find_file(file)
    spec = importlib.util.spec_from_file_location(f"vla_rl_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{str(path)!r} is not a Python file, so it holds no config; name a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses defined in the file look themselves up here
    spec.loader.exec_module(module)
    made = [
        name
        for name, item in vars(module).items()
        if callable(item) and getattr(item, "__module__", "") == spec.name and not name.startswith("_")
    ]
    if function not in made:
        raise UserError(
            f"{str(path)!r} has no config function {function!r}, so nothing can be run; {did_you_mean(function, made)}"
        )
    found: Callable[[], Any] = getattr(module, function)
    return found
