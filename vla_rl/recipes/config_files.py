"""Config functions by ``FILE.py:function``, and copies of their files in run folders, so that runs can be resumed."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import vla_rl
from vla_rl.contract.config import from_json
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.trust import (
    CONFIG_FILE,
    accept,
    mark_file,
    names_ours_only,
    read_bytes,
    read_json,
    read_named,
    require_own,
)
from vla_rl.recipes.env_config import EnvConfig

_NOT_SUPPORTED = ("pi0_fast",)  # the name of a known one would be a false guess
_KEPT = "config_files"  # folder of a run


def find_file(name: str, folder: str = "") -> Path:
    """The config file at the path ``name``; a bare name, or one in ``configs/``, may be one that vla-rl ships.

    With ``folder``, that folder of ``configs/`` is meant.
    """
    path = Path(name)
    places = _places(folder)
    elsewhere = [place / path.name for place in places] if path.parent in (Path("."), places[0]) else []
    for place in (path, *elsewhere):
        if place.is_file():
            return place
    known = {item.name for item in config_files(folder)}
    if path.stem in _NOT_SUPPORTED:
        raise UserError(
            f"{path.stem!r} is a model of its own, which is not supported, so nothing can be run; choose one of "
            f"{', '.join(sorted(known))}."
        )
    raise UserError(f"there is no config file {name!r}, so nothing can be run; {did_you_mean(path.name, known)}")


def config_files(folder: str = "") -> list[Path]:
    """The config files that :func:`find_file` finds by their names; of equal names the first one found."""
    found = [item for place in _places(folder) for item in sorted(place.glob("[!_]*.py"))]
    return list({item.name: item for item in reversed(found)}.values())[::-1]


def _places(folder: str) -> tuple[Path, Path, Path]:
    """The working folder's configs, those of an installation, and those of a checkout."""
    ours = Path(vla_rl.__file__).parent
    return Path("configs") / folder, ours / "_configs" / folder, ours.parent / "configs" / folder


def file_of(target: str, folder: str = "") -> Path:
    """The file of ``FILE.py:function``."""
    file, colon, _ = target.rpartition(":")
    if not colon:
        raise UserError(f"{target!r} names no config function, so nothing can be run; write FILE.py:function.")
    return find_file(file, folder)


def load_config(target: str, folder: str = "") -> Any:
    """The config that ``FILE.py:function`` returns; ``folder`` as for :func:`find_file`."""
    return config_function(target, folder)()


def config_function(target: str, folder: str = "") -> Callable[[], Any]:
    """``FILE.py:function`` itself, whose docstring says what its config is for."""
    path, function = file_of(target, folder), target.rpartition(":")[2]
    made = functions_of(path)
    if function not in made:
        raise UserError(
            f"{str(path)!r} has no config function {function!r}, so nothing can be run; {did_you_mean(function, made)}"
        )
    return made[function]


def functions_of(path: Path) -> dict[str, Callable[[], Any]]:
    """The config functions of a file, by name."""
    module = _load_file(path)
    return {
        name: item
        for name, item in vars(module).items()
        if callable(item) and getattr(item, "__module__", "") == module.__name__ and not name.startswith("_")
    }


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{CONFIG_FILE}{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{str(path)!r} is not a Python file, so it holds no config; name a .py file.")
    module = importlib.util.module_from_spec(spec)
    accept([spec.name])
    sys.modules[spec.name] = module  # classes that are defined in the file are looked up here
    spec.loader.exec_module(module)
    return module


def keep_file(source: Path, run: Path) -> None:
    """Copy the config file ``source`` into the folder ``run``, where :func:`read_config` finds its classes."""
    (run / _KEPT).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, run / _KEPT / source.name)
    mark_file(run / _KEPT / source.name)


def load_kept_files(run: Path) -> None:
    """Load the run's own config file if its ``config.json`` names classes that are defined there.

    Raises UserError for one that this user's vla-rl did not write.
    """
    path = run / "config.json"
    text = read_bytes(path).decode("utf-8", "replace") if path.is_file() else ""
    for stem in sorted(set(re.findall(rf'"{CONFIG_FILE}([^":/]+):', text))):
        if (kept := run / _KEPT / f"{stem}.py").is_file():
            require_own(read_bytes(kept), f"the run's config names code in {str(kept)!r}")
            _load_file(kept)


def read_config(run: Path, part: str = "") -> Any:
    """The config of the run in the folder ``run``, or its entry ``part``.

    Raises UserError when there is none that can be read, and when it names what is not ours and is not the user's own.
    """
    path = run / "config.json"
    try:
        value = read_named(path, part)
        if f'"{CONFIG_FILE}' in json.dumps(value):
            load_kept_files(run)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(run)!r} holds no run that could be read ({error}), so this is no run of vla-rl; name a run folder."
        ) from error
    return from_json(value)


def env_config_of(checkpoint: str | Path, named: str = "") -> EnvConfig | None:
    """The environment of the run that a checkpoint lies in (``RUN/checkpoints/NAME``); None when it lies in none.

    Raises UserError when it is an environment that only the user may name, and the run is not the user's own.  Where
    the user has ``named`` another one, nothing of it is used, and there is none.
    """
    from vla_rl.pretrained import is_run  # torch, which inspect does without

    run = Path(checkpoint).resolve().parent.parent
    if not is_run(run):
        return None
    saved = read_json(run / "config.json").get("env") if named else None
    if named and not names_ours_only(saved) and not (isinstance(saved, dict) and saved.get("name") == named):
        return None
    found = read_config(run, "env")
    return found if isinstance(found, EnvConfig) else None
