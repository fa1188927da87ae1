"""Two episodes of the scripted expert on the simulated arm."""

from __future__ import annotations

import pytest

from tests.recipes.robots.arms import OPEN_LOOP, simulated
from vla_rl.recipes.robots import drive
from vla_rl.recipes.terminal import console


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """(what was said of them, the folder of the dataset)."""
    folder = tmp_path_factory.mktemp("robot") / "dataset"
    return drive.drive(simulated(), drive.EpisodesConfig("expert", 2, 1, OPEN_LOOP), folder, console), folder
