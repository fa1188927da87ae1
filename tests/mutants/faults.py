"""The faults, by what they break.  One that a reader would call tempting is worth more than a silly one."""

from __future__ import annotations

import importlib
import pkgutil

from tests import mutants
from tests.mutants.fault import Fault

_FILES = sorted(one.name for one in pkgutil.iter_modules(mutants.__path__) if one.name.startswith("faults_"))
FAULTS: tuple[Fault, ...] = tuple(
    fault for name in _FILES for fault in importlib.import_module(f"tests.mutants.{name}").FAULTS
)
