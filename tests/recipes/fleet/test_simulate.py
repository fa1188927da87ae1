"""``vla-rl fleet simulate``: fleets that learn by HG-DAgger and RECAP in virtual time, from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.commands import save_untrained
from tests.recipes.fleet import quick_fleet
from vla_rl.algorithms.chunks import DEMONSTRATED, chunks_of
from vla_rl.algorithms.recap import outcomes_of
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.fleet.sampler import AdaptiveSampler, SamplerConfig
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.fleet.learners import BalancedChunks, recorded_rollout
from vla_rl.recipes.imitate import collect

CONFIG = str(Path(quick_fleet.__file__).resolve())


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options that name a policy and its demonstrations."""
    folder = tmp_path_factory.mktemp("start")
    save_demonstrations(collect(EnvConfig("lift"), 2, 1, 2), folder / "shown", video="never")
    return "--policy", str(save_untrained(folder / "policy")), "--demonstrations", str(folder / "shown")


def simulated(config: str, out: Path, *options: str) -> dict:
    main(["fleet", "simulate", f"{CONFIG}:{config}", "--out", str(out), *options])
    return json.loads((out / "summary.json").read_text())


def test_fleets_of_several_sizes_learn_from_one_policy_and_there_is_a_page(start, tmp_path, capsys) -> None:
    found = simulated("hg_dagger", tmp_path / "run", *start)
    assert found["fleets"].keys() == {"1", "2"} and found["fleets"]["1"]["seconds_to_target"] == 0.0
    for robots, fleet in found["fleets"].items():
        rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        own = [row for row in rows if row["stage"] == f"robots-{robots}"]
        assert [row["step"] for row in own] == [0, 3, 6] and own[-1]["fleet/person"] == fleet["person"] > 0
        assert fleet["share"] == fleet["person"] / fleet["steps"] <= 0.5 and fleet["publications"] == 3
        assert load_policy(tmp_path / f"run/checkpoints/robots-{robots}").version == 0
    assert found["fleets"]["2"]["episodes"] > found["fleets"]["1"]["episodes"] > 3
    page = (tmp_path / "run/report.html").read_text()
    assert all(text in page for text in ("1 robots", "2 robots", "virtual seconds", "time to 0%"))
    assert "2 robots: " in capsys.readouterr().err


@pytest.mark.full
def test_recap_learns_in_a_fleet_and_the_same_seed_gives_the_same_weights(start, tmp_path) -> None:
    for run in ("one", "two"):
        found = simulated("recap", tmp_path / run, *start)
        assert found["fleets"]["2"]["seconds_to_target"] is None and found["fleets"]["2"]["received"] > 2
    one, two = (load_policy(tmp_path / run / "checkpoints/robots-2").trainable() for run in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    began = load_policy(start[1]).trainable()
    assert any(not torch.equal(one[f"base.{name}"], item) for name, item in began.items())


@pytest.mark.full
@pytest.mark.parametrize("config", ["residual", "rlpd"])
def test_off_policy_learners_learn_in_a_fleet_and_the_same_seed_gives_the_same_weights(start, tmp_path, config) -> None:
    for run in ("one", "two"):
        simulated(config, tmp_path / run, *start)
    rows = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["critic/steps"] >= 2 and rows[-1]["replay/size"] > 10
    one, two = (load_policy(tmp_path / run / "checkpoints/robots-2").trainable() for run in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_robots_explore_where_the_method_says_so(start) -> None:
    for explore, mode in ((True, "sample"), (False, "eval")):
        method = replace(quick_fleet.REPLAY, explore=explore)
        config = replace(quick_fleet.residual(), method=method, policy=start[1], demonstrations=start[3])
        with config.fleet(1) as fleet:
            assert fleet.robots[0].driver.mode == mode


def test_somebody_demonstrates_instead(start, tmp_path) -> None:
    found = simulated("demonstrations", tmp_path / "run", *start)["fleets"]["1"]
    assert 0 < found["person"] <= 20 + 10, "an episode that has begun is shown to its end"


def test_what_cannot_be_simulated_is_refused_in_one_sentence(start, complaint) -> None:
    with pytest.raises(UserError, match="robots is \\(\\)"):
        replace(quick_fleet.hg_dagger(), robots=())
    assert "none was named" in complaint("fleet", "simulate", f"{CONFIG}:hg_dagger")
    assert "did you mean 'simulate'" in complaint("fleet", "simulat")


def test_every_step_of_a_demonstration_begins_a_decision_whose_return_counts_what_is_left(start) -> None:
    episodes = collect(EnvConfig("lift"), 2, 1, 2)
    rollout = recorded_rollout(load_policy(start[1]), episodes)
    outcomes, known = outcomes_of(rollout, 40, 1.0)
    assert int(known.sum()) == len(episodes.state) and bool(outcomes.human.all())
    left = [end - step for begin, end in episodes.spans() for step in range(begin, end)]
    assert sorted(outcomes.to_end.tolist()) == sorted(left)
    np.testing.assert_array_equal(rollout.executed[0, :, 0], episodes.action[_begins(episodes, 5)])
    assert set(rollout.version[rollout.valid.any(-1)].tolist()) == {DEMONSTRATED}


def _begins(episodes, horizon: int) -> list[int]:
    return [begin + i for begin, _ in episodes.spans() for i in range(horizon)]


def test_corrections_are_drawn_as_often_as_the_sampler_says(start) -> None:
    policy = load_policy(start[1])
    rollout = recorded_rollout(policy, collect(EnvConfig("lift"), 2, 1, 2))
    chunks = chunks_of(replace(rollout, version=rollout.version.clone()), rollout.valid, policy)
    kind = torch.arange(len(chunks)) % 10  # 0: a correction, 1 to 4 alone, others recorded
    chunks = replace(chunks, version=torch.where(kind < 5, 3, DEMONSTRATED), task=torch.zeros(len(chunks), dtype=int))
    sampler = BalancedChunks(AdaptiveSampler(SamplerConfig(min_corrections=0.3)), torch.zeros(1, dtype=int))
    generator = torch.Generator().manual_seed(0)
    drawn = kind[sampler.draw(chunks, kind != 1, 4000, generator)]
    sampler.record(torch.ones(4000))
    assert abs((drawn < 5).double().mean() - 0.5) < 0.2
    assert sampler.state_dict()["losses"].keys() == {"0/0", "0/1", "0/2"}
