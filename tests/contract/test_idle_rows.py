"""An environment whose ended rows go on changing is found."""

from __future__ import annotations

import pytest

from sims.toy.counting import CountingEnv
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import ContractError


class Drifts(CountingEnv):
    """What an ended row shows changes with every further step."""

    def step(self, chunk, observe="last"):
        self._memory["echo"][self._book.done] += 1
        return super().step(chunk, observe)


def test_a_row_that_drifts_while_it_idles_is_found():
    with pytest.raises(ContractError, match="an idle row's observation changed"):
        check_env(Drifts(3), seed=11)
