"""Import the objects that ``"module:name"`` strings name."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from vla_rl.contract.errors import UserError, did_you_mean

OURS = ("vla_rl", "sims", "world_models", "robot_drivers")
CLASSES = Path(__file__).with_name("classes.json")


@functools.cache
def our_classes() -> dict[str, str]:
    """{name: module} of the classes of ours that data may name; ``python -m tests.classes`` writes the file."""
    found: dict[str, str] = json.loads(CLASSES.read_text(encoding="utf-8"))
    return found


def name_of(kind: type) -> str:
    """How data name a class: one of ours by its bare name, wherever it lies, another by ``"module:Class"``.

    Raises TypeError for one of ours that is not in the table.
    """
    name, module = kind.__qualname__, kind.__module__
    if our_classes().get(name) == module:
        return name
    if module.partition(".")[0] in OURS:
        raise TypeError(f"{CLASSES.name} has no class {name!r} of {module}, so no data can name it; make it anew.")
    return f"{module}:{name}"


def load(target: str) -> Any:
    """Import ``"package.module:name"``, also from the working folder, where installed packages come first.

    Raises UserError when the string has no colon or the module has no such name; a missing module raises its own
    ImportError, which names the package that is not installed.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise UserError(
            f"{target!r} has no module and name, so it cannot be loaded; write it as 'package.module:function'."
        )
    search_working_folder()
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        public = [item for item in vars(module) if not item.startswith("_")]
        raise UserError(f"module {module_name!r} has no {name!r}, so it cannot be loaded; {did_you_mean(name, public)}")
    return getattr(module, name)


def search_working_folder() -> None:
    """Append the working folder to Python's path: a console script, unlike ``python -m``, does not have it there.

    At the end of the path, so that a file in it never hides an installed package.
    """
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
