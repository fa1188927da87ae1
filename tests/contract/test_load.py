"""Import strings load objects, and errors suggest the nearest name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from sims.catalog import CATALOG
from tests.classes import table
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load, name_of, our_classes
from vla_rl.contract.trust import named_class


def test_a_string_loads_the_object_it_names():
    assert load("sims.catalog:CATALOG") is CATALOG
    assert load("vla_rl.contract.load:load") is load


def test_the_table_of_our_classes_is_that_of_the_source():
    assert our_classes() == table(), "run python -m tests.classes"


def test_a_class_of_the_table_is_named_by_itself_and_found():
    kinds = [load(f"{module}:{name}") for name, module in our_classes().items() if module.startswith("vla_rl.contract")]
    assert EnvSpec in kinds and all(named_class(name_of(kind)) is kind and ":" not in name_of(kind) for kind in kinds)


def test_a_class_of_somebody_else_is_named_with_its_module():
    assert name_of(Path) == f"{Path.__module__}:Path"


@dataclass(frozen=True)
class Double:
    """Has the name of one of ours."""


def test_a_class_of_ours_that_is_not_in_the_table_says_so():
    Double.__qualname__, Double.__module__ = "EnvSpec", "vla_rl.elsewhere"
    with pytest.raises(TypeError, match=r"classes.json has no class 'EnvSpec' of vla_rl.elsewhere"):
        name_of(Double)


@pytest.mark.parametrize("target", ["sims.catalog", "sims.catalog:", ":make", "", ":"])
def test_a_string_without_both_halves_is_refused(target):
    with pytest.raises(UserError, match="has no module and name"):
        load(target)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(UserError, match=r"'sims.catalog' has no 'mkae'.*did you mean 'make'"):
        load("sims.catalog:mkae")


def test_a_missing_package_is_named():
    with pytest.raises(ModuleNotFoundError, match="no_such_simulator"):
        load("no_such_simulator.env:make")


def test_suggestions():
    assert did_you_mean("lfit", ["lift", "stack"]) == "did you mean 'lift'?"
    assert did_you_mean("zzz", ["stack", "lift"]) == "known: lift, stack."
    assert did_you_mean("zzz", []) == "known: none."
