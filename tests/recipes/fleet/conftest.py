"""What a fleet's learner begins with: a small policy, and three episodes of demonstrations."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.commands import save_untrained
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import collect


class Start(NamedTuple):
    """Folders of a checkpoint and of a dataset, and what is in that."""

    policy: str
    demonstrations: str
    episodes: Demonstrations

    @property
    def options(self) -> tuple[str, ...]:
        """Of commands."""
        return "--policy", self.policy, "--demonstrations", self.demonstrations


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder, episodes = tmp_path_factory.mktemp("start"), collect(EnvConfig("lift"), 3, 1, 2)
    save_demonstrations(episodes, folder / "shown", video="never")
    return Start(str(save_untrained(folder / "policy")), str(folder / "shown"), episodes)
