"""Off-policy learning by two processes with a share of the replay each is that of one with all of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.by_hand import Recorded, batch, build, seeded
from tests.toys import TwoProcesses
from vla_rl.algorithms.guard import FallbackConfig, ReleaseConfig
from vla_rl.algorithms.residual_td3 import ConservativeConfig, ResidualTD3
from vla_rl.contract.batch import OneProcess, Reducer
from vla_rl.contract.errors import UserError

SIZE = 40
# No random numbers: all target critics are in the minimum, and targets are not smoothed.
EXACT = {"num_min_q": 4, "target_noise": 0.0, "batch": SIZE, "grad_norm": 0.3}


def part(found: Any, rows: slice) -> Any:
    """The same rows of every tensor, in double precision."""
    if isinstance(found, dict):
        return {name: part(item, rows) for name, item in found.items()}
    if is_dataclass(found):
        return replace(found, **{f.name: part(getattr(found, f.name), rows) for f in fields(found)})  # type: ignore[type-var]
    return found[rows].double() if found.is_floating_point() else found[rows]


class Batches(Recorded):
    """Other decisions at every step, of which this process draws ``rows``; asked for the right number of them."""

    def __init__(self, rows: slice) -> None:
        super().__init__()
        self.rows, self.drawn = rows, 0

    def sample(self, size, generator):
        if size > SIZE:  # for the statistics of inputs
            return part(self.found, self.rows)
        self.drawn += 1
        found = part(batch(SIZE, seed=self.drawn), self.rows)
        assert len(found.reward) == size
        return found


def learner(reducer: Reducer, rows: slice, **changes: Any) -> ResidualTD3:
    made = build(replay=Batches(rows), reducer=reducer, **(EXACT | changes))
    for module in (made.policy, made.critic, made.target_critic):
        module.double()
    made.target_parameters = {name: item.detach().clone() for name, item in made.learnt.items()}
    return made


def taught(reducer: Reducer, rows: slice, decisions: int) -> tuple[ResidualTD3, dict[str, float]]:
    one = learner(reducer, rows)
    return one, one.update(SimpleNamespace(valid=torch.ones(decisions, 1, 1, dtype=torch.bool)))


def both(work: Any) -> list[Any]:
    """What ``work(reducer, rows)`` gives in each of two processes, which have half of the rows each."""
    with ThreadPoolExecutor(2) as pool:
        halves = (slice(0, SIZE // 2), slice(SIZE // 2, None))
        return list(pool.map(work, TwoProcesses.pair(), halves))


def test_two_processes_take_the_steps_of_one_with_all_decisions():
    """Half of the decisions in each: as many steps, and the weights of one, in double precision."""
    (one, said), (other, _) = both(lambda reducer, rows: taught(reducer, rows, 25))
    whole, expected = taught(OneProcess(), slice(None), 50)
    assert one.steps == other.steps == whole.steps == 20 and one.decisions == whole.decisions == 50
    assert not torch.equal(whole.policy.w, build().policy.w.double())
    for name in ("policy", "critic", "target_critic"):
        of = [getattr(found, name).state_dict() for found in (one, other, whole)]
        for key, value in of[2].items():
            assert torch.equal(of[0][key], of[1][key]), "the processes have different weights"
            torch.testing.assert_close(of[0][key], value, rtol=1e-9, atol=1e-12)
    assert said["rollout/decisions"] == expected["rollout/decisions"] == 50
    assert said["replay/size"] == 2 * SIZE, "the sum of both replays, which in this test pretend to hold 40 each"


def test_nobody_learns_while_a_process_has_nothing_to_draw():
    def work(reducer: Reducer, rows: slice) -> int:
        found = Recorded(batch(0)) if reducer.rank else Recorded()
        made = build(replay=found, reducer=reducer, **EXACT)
        made.update(SimpleNamespace(valid=torch.ones(30, 1, 1, dtype=torch.bool)))
        return made.steps

    assert both(work) == [0, 0]


def test_processes_may_draw_different_noise():
    """Smoothed targets, Cal-QL's draws and the critics of the minimum follow each process's own generator."""

    def work(reducer: Reducer, rows: slice) -> torch.Tensor:
        made = learner(reducer, rows, num_min_q=2, target_noise=0.2, conservative=ConservativeConfig())
        made.generator = seeded(reducer.rank)
        for _ in range(12):
            made.step()
        return made.policy.w.detach()

    one, other = both(work)
    assert torch.equal(one, other) and bool(one.isfinite().all())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 33}, "a batch of 33 cannot be drawn equally from the replays of 2 processes"),
        ({"release": ReleaseConfig()}, "watch the episodes of one process"),
        ({"fallback": FallbackConfig()}, "watch the episodes of one process"),
    ],
)
def test_what_processes_cannot_share_is_said(changes, said):
    with pytest.raises(UserError, match=said):
        build(reducer=TwoProcesses(), **changes)
