"""Check that ``sims``, ``world_models`` and ``robot_drivers`` are vla-rl's: other packages may have the same names."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from vla_rl.contract.errors import UserError

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
    owners = sorted(set(metadata.packages_distributions().get(name, ())) - {"vla-rl"})
    if beside:
        install = "install vla-rl again (pip install --force-reinstall --no-deps vla-rl) in an environment of its own."
        return f"uninstall {' and '.join(owners)}, then {install}" if owners else install
    if owners:
        return f"uninstall {' and '.join(owners)} or give vla-rl an environment of its own."
    return "rename it, or take its folder off Python's path (the current folder, PYTHONPATH)."
