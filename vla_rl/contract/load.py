"""Import the objects that ``"module:name"`` strings name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from vla_rl.contract.errors import UserError, did_you_mean

# Where the modules are now whose classes older checkpoints name.
MOVED = {
    f"vla_rl.policies.{old}": f"vla_rl.policies.{new}"
    for old, new in {
        "openvla": "openvla.policy",
        "openvla_decoding": "openvla.decoding",
        "openvla_network": "openvla.network",
        "openvla_options": "openvla.options",
        "openvla_public": "openvla.public",
        "openvla_vision": "openvla.vision",
        "pi0": "pi0.policy",
        "pi0_network": "pi0.network",
        "smolvla": "smolvla.policy",
        "smolvla_shape": "smolvla.shape",
    }.items()
}


def load(target: str) -> Any:
    """Import ``"package.module:name"``, also from the working folder, where installed packages come first.

    Modules in :data:`MOVED` are found by their old names.

    Raises UserError when the string has no colon or the module has no such name; a missing module raises its own
    ImportError, which names the package that is not installed.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise UserError(
            f"{target!r} has no module and name, so it cannot be loaded; write it as 'package.module:function'."
        )
    search_working_folder()
    module_name = MOVED.get(module_name, module_name)
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
