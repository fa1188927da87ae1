"""Fixtures of ``tests/commands.py``."""

import pytest

from tests.commands import complaint, quick, save_untrained, untrained
from vla_rl.policies.tiny import TinyVLA

__all__ = ["complaint", "quick", "untrained"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> TinyVLA:
    return TinyVLA.from_pretrained(save_untrained(tmp_path_factory.mktemp("policy") / "untrained"))


@pytest.fixture(scope="module", autouse=True)
def few_imagined_rollouts():
    """A decision about a world model is made from four of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vla_rl.recipes.imagine.recipe._ROLLOUTS", 4)
        yield
