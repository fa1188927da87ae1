"""Import what ``"module:name"`` strings name, and check that our packages are ours: others have the same names."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Iterable
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


def installed(module: str, otherwise: str, extra: str, name: str = "") -> Any:
    """``module`` of a library that not everybody has.

    Raises UserError where it, or what it needs, lacks: what is so ``otherwise``, and the ``extra`` that brings it.
    ``name`` is that of a library which is called otherwise than its module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = name or error.name or module
        raise UserError(f"{missing} is not installed, so {otherwise}; pip install 'vla-rl[{extra}]'.") from error


def search_working_folder() -> None:
    """Append the working folder to Python's path: a console script, unlike ``python -m``, does not have it there.

    At the end of the path, so that a file in it never hides an installed package.
    """
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()


GENERIC = ("sims", "world_models", "robot_drivers")
MARK = b"part of vla-rl"  # in the docstring of each of them
_HOME = Path(__file__).resolve().parents[2]


def check_packages(names: Iterable[str] = GENERIC) -> None:
    """Raise UserError, naming the file, when one of ``names`` is not the package that came with this ``vla_rl``.

    Nothing is imported.  The right package lies beside ``vla_rl`` and has a mark in its docstring, which a package
    that was installed over it lacks.
    """
    for name in names:
        found = _found(name)
        if found is None:
            raise UserError(
                f"the package {name!r} of vla-rl is not beside {str(_HOME / 'vla_rl')!r}, so nothing was started; "
                "install vla-rl again (pip install --force-reinstall --no-deps vla-rl)."
            )
        beside = found.parent.parent.resolve() == _HOME
        if not beside or not found.is_file() or MARK not in found.read_bytes():
            raise UserError(
                f"{str(found)!r} would be imported as {name!r} but is not vla-rl's, so nothing was started; "
                f"{_cure(name, beside)}"
            )


def _found(name: str) -> Path | None:
    """The file that ``import name`` would run, or the folder of a namespace package."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.has_location and spec.origin:
        return Path(spec.origin)
    return next(map(Path, spec.submodule_search_locations or ()), None)


def _cure(name: str, beside: bool) -> str:
    """How to remove the foreign package; ``beside``: it was installed over vla-rl's."""
    from importlib import metadata  # takes as long as a third of numpy

    owners = sorted(set(metadata.packages_distributions().get(name, ())) - {"vla-rl"})
    if beside:
        install = "install vla-rl again (pip install --force-reinstall --no-deps vla-rl) in an environment of its own."
        return f"uninstall {' and '.join(owners)}, then {install}" if owners else install
    if owners:
        return f"uninstall {' and '.join(owners)} or give vla-rl an environment of its own."
    return "rename it, or take its folder off Python's path (the current folder, PYTHONPATH)."
