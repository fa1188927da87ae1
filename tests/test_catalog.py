"""Every string of the catalogue resolves, and an unknown name gets help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sims.catalog import CATALOG, make
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_every_entry_can_be_called(name):
    assert callable(load(CATALOG[name]))


def test_unknown_name_says_what_was_meant():
    with pytest.raises(UserError, match=r"'lfit'.*did you mean 'lift'"):
        make("lfit", num_envs=1)


def test_unknown_option_says_what_was_meant():
    with pytest.raises(UserError, match=r"'image_sise'.*did you mean 'image_size'"):
        make("lift", num_envs=1, image_sise=32)


def test_the_catalogue_imports_no_simulator():
    code = "import sims.catalog, sys; assert not {'mujoco', 'numpy', 'sims.mujoco'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
