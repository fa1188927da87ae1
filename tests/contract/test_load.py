"""Import strings load objects, and errors suggest the nearest name."""

from __future__ import annotations

import pytest

from sims.catalog import CATALOG
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import MOVED, load


def test_a_string_loads_the_object_it_names():
    assert load("sims.catalog:CATALOG") is CATALOG
    assert load("vla_rl.contract.load:load") is load


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("openvla:OpenVLA", "openvla.policy"),
        ("openvla_decoding:Parallel", "openvla.decoding"),
        ("openvla_network:OpenVLAShape", "openvla.network"),
        ("openvla_options:OpenVLAOptions", "openvla.options"),
        ("openvla_public:OpenVLAPrompts", "openvla.public"),
        ("openvla_vision:ViTShape", "openvla.vision"),
        ("pi0:Pi0", "pi0.policy"),
        ("pi0_network:Gemma", "pi0.network"),
        ("smolvla:SmolVLA", "smolvla.policy"),
        ("smolvla_shape:TextShape", "smolvla.shape"),
    ],
)
def test_what_checkpoints_name_is_found_where_it_is_now(old, new):
    found = load(f"vla_rl.policies.{old}")
    assert (found.__module__, found.__qualname__) == (f"vla_rl.policies.{new}", old.partition(":")[2])
    assert len(MOVED) == 10


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
