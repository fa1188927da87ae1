"""``make peers``: every learner learns, cells are measured once, and ratios are paired; speed is not asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.benchmarks.peers import __main__ as peers
from tests.benchmarks.peers.plain_ppo import PlainPPO, Settings, single
from tests.benchmarks.peers.race import Row, Task
from tests.benchmarks.peers.report import ratio
from tests.benchmarks.peers.sides import PEERS

SMALL = peers.small(peers.TASK)


@pytest.mark.parametrize("name", PEERS)
def test_every_learner_moves_its_mean_action(name):
    side, state = PEERS[name](SMALL.recipe, 1), np.ones((3, 17), np.float32)
    before = side.act(state)
    side.advance(2)  # the first iteration of ours trains the critic only
    assert before.shape == (3, 6) and not np.array_equal(side.act(state), before)


def test_a_cell_is_measured_once_and_written_at_once(tmp_path, monkeypatch, capsys):
    asked: list[tuple[int, list[str]]] = []

    def race(task: Task, seed: int, missing: list[str], log: object) -> Iterator[Row]:
        asked.append((seed, list(missing)))
        for peer in missing:
            if len(asked) == 1 and peer == "rsl_rl":
                raise KeyboardInterrupt
            yield Row(task.name, peer, seed, 1.0, 1.0, 32, 0.0)  # not its end
            yield Row(task.name, peer, seed, 2.0, 2.0, 64, 7.0, True)

    monkeypatch.setattr(peers, "race", race)
    arguments = ["--small", "--out", str(tmp_path), "--seeds", "1", "2", "--peers", "ours", "rsl_rl"]
    with pytest.raises(SystemExit) as stop:
        peers.main(arguments)
    written = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert stop.value.code == 130 and [(row["peer"], row["seed"], row["steps"]) for row in written] == [("ours", 1, 64)]
    rows = peers.main(arguments)
    assert asked == [(1, ["ours", "rsl_rl"]), (1, ["rsl_rl"]), (2, ["ours", "rsl_rl"])]
    assert len({row.key for row in rows}) == len(rows) == 4
    assert (
        "| HalfCheetah-v5 | rsl_rl | 2 of 2 | 64 | 2.0 | 2.0 | 1.00 [1.00, 1.00] |"
        in (tmp_path / "results.md").read_text()
    )
    assert set(written[0]) == {"task", "peer", "seed", "seconds", "cpu_seconds", "steps", "score", "reached"}


def test_a_ratio_is_that_of_sums_over_pairs():
    ours = [3.0, 4.0, 5.0, 4.0]
    assert ratio(ours, [3 * value for value in ours]) == (pytest.approx(3), pytest.approx(3), pytest.approx(3))
    first, second = np.array([2.0, 3.0, 4.0, 3.0]), np.array([3.0, 5.0, 5.0, 4.0])
    middle, low, high = ratio(first.tolist(), second.tolist())
    assert low < middle < high and middle == pytest.approx(17 / 12)
    for end in (low, high):  # where the mean of "other - end x ours" is t standard errors from 0
        gap = second - end * first
        assert abs(gap.mean()) == pytest.approx(3.182446 * gap.std(ddof=1) / 2, rel=1e-4)


def test_plain_ppo_sums_what_follows_and_stops_at_an_end():
    side = PlainPPO(single(SMALL.recipe.env.options), 2, 4, 1, Settings(minibatches=2))
    generator = np.random.default_rng(0)
    rewards, values = (torch.as_tensor(generator.normal(size=(4, 2)), dtype=torch.float32) for _ in range(2))
    ended = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 1]]).float()
    with torch.no_grad():
        found = side._advantages(rewards, values, ended)
        last = side._critic(side._obs)[:, 0]
    ahead = torch.cat([values[1:], last[None]])
    for env in range(2):
        for start in range(4):
            total, weight = 0.0, 1.0
            for t in range(start, 4):
                runs = 1 - float(ended[t, env])
                total += weight * float(rewards[t, env] + 0.99 * runs * ahead[t, env] - values[t, env])
                weight *= 0.99 * 0.95 * runs
            assert float(found[start, env]) == pytest.approx(total, abs=1e-5)
    side.close()
