"""Fixtures of ``tests/commands.py``."""

import pytest

from tests.commands import complaint, quick, untrained

__all__ = ["complaint", "quick", "untrained"]


@pytest.fixture(scope="module", autouse=True)
def few_imagined_rollouts():
    """A decision about a world model is made from four of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vla_rl.recipes.imagine.recipe._ROLLOUTS", 4)
        yield
