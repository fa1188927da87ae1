"""check_env finds an environment that changes after its episode ended."""

from __future__ import annotations

import pytest

from sims.toy.counting import CountingEnv
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import ContractError


class Drifts(CountingEnv):
    """The observation after an episode's end changes with every further step."""

    def step(self, chunk, observe="last"):
        self._task_state["echo"][self._book.done] += 1
        return super().step(chunk, observe)


def test_a_change_of_an_idle_observation_is_found():
    with pytest.raises(ContractError, match="an idle environment's observation changed"):
        check_env(Drifts(3), seed=11)
