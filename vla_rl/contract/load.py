"""Turn ``"module:function"`` strings into objects: the one place where names become imports."""

from __future__ import annotations

import importlib
from typing import Any

from vla_rl.contract.errors import UserError, did_you_mean


def load(target: str) -> Any:
    """Import ``"package.module:name"``.

    Raises UserError when the string has no colon or the module has no such name; a missing module keeps its own
    ImportError, so that the name of what is not installed stays visible.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise UserError(f"{target!r} names nothing that can be loaded; write it as 'package.module:function'.")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        public = [item for item in vars(module) if not item.startswith("_")]
        raise UserError(f"module {module_name!r} has no {name!r}, so it cannot be loaded; {did_you_mean(name, public)}")
    return getattr(module, name)
