"""``vla-rl fleet simulate``: fleets that learn by HG-DAgger and RECAP in virtual time, from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sims.toy.point_mass import PointMassEnv, optimal_action
from tests.recipes.fleet import configs
from tests.toys import Stateless
from vla_rl.cli import main
from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut, Features, Mode, State
from vla_rl.experience.intervention import DemonstratedEnv, DemonstratorConfig, PersonConfig, SupervisedEnv
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.fleet.simulate import (
    ARRIVAL,
    ROBOT,
    SECOND,
    FleetTimes,
    OutageConfig,
    Outages,
    Timeline,
    VirtualFleet,
    VirtualRobot,
    micros,
    steps_due,
)

CONFIG = str(Path(configs.__file__).resolve())


def simulated(config: str, out: Path, *options: str) -> dict:
    main(["fleet", "simulate", f"{CONFIG}:{config}", "--out", str(out), *options])
    return json.loads((out / "summary.json").read_text())


@pytest.mark.full
def test_fleets_of_several_sizes_learn_from_one_policy_and_there_is_a_page(start, tmp_path, capsys) -> None:
    found = simulated("hg_dagger", tmp_path / "run", *start.options)
    assert found["fleets"].keys() == {"1", "2"} and found["fleets"]["1"]["seconds_to_target"] == 0.0
    for robots, fleet in found["fleets"].items():
        rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        own = [row for row in rows if row["stage"] == f"robots-{robots}"]
        assert [row["step"] for row in own] == [0, 2, 4] and own[-1]["fleet/person"] == fleet["person"] > 0
        assert fleet["share"] == fleet["person"] / fleet["steps"] <= 0.5 and fleet["publications"] == 2
        assert load_policy(tmp_path / f"run/checkpoints/robots-{robots}").version == 0
    assert found["fleets"]["2"]["episodes"] > found["fleets"]["1"]["episodes"] > 3
    page = (tmp_path / "run/report.html").read_text()
    assert all(text in page for text in ("1 robots", "2 robots", "virtual seconds", "time to 0%"))
    assert "2 robots: " in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("config", ["recap", "residual", "rlpd"])
def test_others_learn_in_a_fleet_and_the_same_seed_gives_the_same_weights(start, tmp_path, config) -> None:
    for run in ("one", "two"):
        found = simulated(config, tmp_path / run, *start.options)["fleets"]["2"]
        assert found["seconds_to_target"] is None and found["received"] > 2
    one, two = (load_policy(tmp_path / run / "checkpoints/robots-2").trainable() for run in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    row = json.loads((tmp_path / "one/metrics.jsonl").read_text().splitlines()[-1])
    assert config == "recap" or (row["critic/steps"] >= 2 and row["replay/size"] > 10)


def test_robots_explore_where_the_method_says_so(start) -> None:
    for explore, mode in ((True, "sample"), (False, "eval")):
        method = replace(configs.REPLAY, explore=explore)
        config = replace(configs.residual(), method=method, policy=start.policy, demonstrations=start.demonstrations)
        with config.fleet(1) as fleet:
            assert fleet.robots[0].driver.mode == mode


def test_somebody_demonstrates_instead(start, tmp_path) -> None:
    found = simulated("demonstrations", tmp_path / "run", *start.options)["fleets"]["1"]
    assert 0 < found["person"] <= 20 + 10, "an episode that has begun is shown to its end"


def test_what_cannot_be_simulated_is_refused_in_one_sentence(start, complaint) -> None:
    with pytest.raises(UserError, match="robots is \\(\\)"):
        replace(configs.hg_dagger(), robots=())
    assert "none was named" in complaint("fleet", "simulate", f"{CONFIG}:hg_dagger")
    assert "did you mean 'simulate'" in complaint("fleet", "simulat")


# An episode of point_mass has 16 actions of .1 s, in 4 decisions of .1 s more: 2 s.  With the reset, one every 5 s.
TIMES = FleetTimes(decision=0.1, reset=3.0, upload=0.25, download=0.5, sync=20.0, updates_per_second=4.0)


class Walks(Stateless, nn.Module):
    """Goes to the origin, by a share of the way that is learnt; the noise of its generator is in every action."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        noise = torch.stack([torch.randn(4, 2, generator=one) for one in generator])
        action = (0.02 * noise - self.gain * features["state"][:, None]).clamp(-0.2, 0.2)
        return ActionOut(action, action, torch.zeros(len(action)), policy_version=self.version), state

    def trainable(self) -> dict[str, nn.Parameter]:
        return {"gain": self.gain}

    def save_pretrained(self, folder: Any) -> None:
        raise NotImplementedError


class Notes:
    """A learner that notes what it was given: (seconds, steps) and (seconds, episode); steps raise the gain."""

    def __init__(self) -> None:
        self.policy, self.timeline = Walks(), Timeline()
        self.learnt: list[tuple[float, int]] = []
        self.episodes: list[tuple[float, Rollout]] = []

    def add(self, rollout: Rollout) -> int:
        self.episodes.append((self.timeline.now / SECOND, rollout))
        return len(rollout.reward)

    def learn(self, steps: int) -> dict[str, float]:
        self.learnt.append((self.timeline.now / SECOND, steps))
        self.policy.gain.data += 0.001 * steps
        return {"loss": 1.0}


def made(
    envs: list[VecEnv] | None = None, times: FleetTimes = TIMES, seed: int = 1, seeds: Iterator[int] | None = None
) -> tuple[VirtualFleet, Notes]:
    learner = Notes()
    fleet = VirtualFleet(envs or [PointMassEnv(1)], learner, times, seeds or iter(range(10_000)), seed)
    learner.timeline = fleet.timeline
    return fleet, learner


def progress(obs: Observation) -> np.ndarray:
    return 1 - np.linalg.norm(obs.state, axis=1) / np.sqrt(2)


def expert(obs: Observation) -> np.ndarray:
    return optimal_action(obs)[:, None]


# -- the clock --------------------------------------------------------------------------------------------------------


def test_events_happen_in_the_order_of_their_time_then_their_kind_then_as_they_were_added() -> None:
    timeline, seen = Timeline(), []
    for name, time, kind in (("d", 7, ROBOT), ("b", 5, ROBOT), ("a", 5, ARRIVAL), ("c", 5, ROBOT), ("late", 9, ROBOT)):
        timeline.at(time, kind, lambda name=name: seen.append((name, timeline.now)))
    timeline.run(8)
    assert seen == [("a", 5), ("b", 5), ("c", 5), ("d", 7)] and timeline.now == 8
    with pytest.raises(ContractError, match="it is 8 us already"):
        timeline.at(7, ROBOT, lambda: None)


def test_the_steps_that_are_due_are_exact_however_often_one_asks() -> None:
    for rate in (0.1, 1 / 3, 7.0, 0.0):
        moments = [0, 1, micros(0.7), micros(10), micros(86_400)]
        each = [steps_due(time, rate) for time in moments]
        assert each == [time * round(rate * 1e6) // 10**12 for time in moments]
    assert steps_due(micros(0.3), 10) == 3, "where floats make 2 of it"


def test_an_episode_takes_its_control_steps_and_decisions_and_is_uploaded_after_its_end() -> None:
    fleet, learner = made()
    fleet.timeline.run(micros(7.24))
    assert [time for time, _ in learner.episodes] == [2.25]
    fleet.timeline.run(micros(7.25))  # the second one began at 5 s
    assert [time for time, _ in learner.episodes] == [2.25, 7.25]
    episode = learner.episodes[0][1]
    assert episode.executed.shape == (4, 1, 4, 2) and episode.robot == "robot-0" and bool(episode.valid.all())
    assert fleet.counts.steps == 2 * 16 and fleet.counts.episodes == 2


def test_gradient_steps_are_a_fixed_number_per_second_and_learn_from_what_has_arrived() -> None:
    fleet, learner = made()
    fleet.timeline.run(micros(40.0))
    # 4 a second: 9 until the first episode is there at 2.25 s, 20 until the next, 5 s later, and the rest at 20 s.
    assert learner.learnt[:2] == [(2.25, 9), (7.25, 20)]
    assert sum(steps for time, steps in learner.learnt if time <= 20.0) == 80
    assert sum(steps for _, steps in learner.learnt) == 160, "more robots would not make the learner faster"


def test_a_step_learns_from_what_arrived_before_it() -> None:
    fleet, learner = made()
    had: list[int] = []
    learner.learn = lambda steps: had.extend([len(learner.episodes)] * steps) or {}  # type: ignore[method-assign]
    fleet.timeline.run(micros(20.0))
    assert [had.count(episodes) for episodes in range(5)] == [9, 20, 20, 20, 11]


def test_a_policy_is_published_every_interval_and_taken_after_its_download_between_two_episodes() -> None:
    fleet, learner = made()
    fleet.timeline.run(micros(50.0))
    assert fleet.learner.publications == 2 and learner.policy.version == 2
    begun = {time - 2.25: set(rollout.version.flatten().tolist()) for time, rollout in learner.episodes}
    # Published at 20 and 40 s and there half a second later, when an episode has begun already.
    assert begun == {5.0 * i: {0 if i <= 4 else 1 if i <= 8 else 2} for i in range(10)}
    assert fleet.counts.swaps == 1 + 1


def test_a_published_policy_does_not_change_while_the_learner_goes_on() -> None:
    fleet, learner = made()
    fleet.timeline.run(micros(39.0))
    assert fleet.releases.newest.trainable()["gain"].item() == pytest.approx(0.08)  # type: ignore[attr-defined]
    assert learner.policy.gain.item() > 0.14


# -- outages ----------------------------------------------------------------------------------------------------------


class Once:
    """One outage, in place of random ones."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = micros(begin), micros(end)

    def next(self, time: int) -> tuple[int, int]:
        return (self.begin, self.end) if time < self.end else (2**62, 2**62)

    def over(self, time: int) -> int:
        return self.end if self.begin <= time < self.end else time


def with_outage(kind: str, begin: float, end: float) -> tuple[VirtualFleet, Notes]:
    fleet, learner = made()
    setattr(fleet.robots[0], kind, Once(begin, end))
    return fleet, learner


def test_a_robot_that_breaks_gives_nothing_and_loses_its_episode_alone() -> None:
    fleet, learner = with_outage("broken", 6.0, 20.0)
    fleet.timeline.run(micros(20.0))
    # The episode that began at 5 s is lost, and the next one begins 3 s after the repair.
    assert [(time, int(rollout.seeds[0, 0])) for time, rollout in learner.episodes] == [(2.25, 0)]
    assert fleet.counts.lost == 1 and fleet.counts.episodes == 1
    assert fleet.counts.steps == 16 + 8, "of the lost one, four from 5.1 to 5.5 s and four from 5.6 to 6 s"
    fleet.timeline.run(micros(25.24))
    assert len(learner.episodes) == 1
    fleet.timeline.run(micros(25.25))
    assert [int(rollout.seeds[0, 0]) for _, rollout in learner.episodes] == [0, 2]


def test_a_robot_that_is_broken_between_episodes_loses_none() -> None:
    fleet, learner = with_outage("broken", 3.0, 10.0)
    fleet.timeline.run(micros(12.25))
    assert [time for time, _ in learner.episodes] == [2.25, 12.25] and fleet.counts.lost == 0


def test_episodes_of_a_robot_without_a_link_arrive_once_when_it_is_back_and_it_keeps_its_policy() -> None:
    fleet, learner = with_outage("offline", 6.0, 31.0)
    fleet.timeline.run(micros(45.0))
    arrived = [(time, int(rollout.seeds[0, 0])) for time, rollout in learner.episodes]
    assert arrived == [(2.25, 0), *[(31.25, i) for i in range(1, 6)], (32.25, 6), (37.25, 7), (42.25, 8)]
    versions = {int(rollout.seeds[0, 0]): int(rollout.version[0, 0]) for _, rollout in learner.episodes}
    assert [versions[i] for i in (5, 6, 7)] == [0, 0, 1], "published at 20 s, taken by the one that begins at 35 s"


def test_outages_come_as_often_and_last_as_long_as_asked() -> None:
    outages, time, found = Outages(OutageConfig(6.0, 30.0), np.random.default_rng(1)), 0, []
    for _ in range(2000):
        found.append(outages.next(time))
        time = found[-1][1]
    lengths = np.array([end - begin for begin, end in found]) / SECOND
    up = time / SECOND - lengths.sum()
    assert 0.9 < 2000 / (up / 3600) / 6 < 1.1 and 27 < lengths.mean() < 33
    assert outages.over(found[-1][0]) == found[-1][1] and outages.over(found[-1][1]) == found[-1][1]
    never = Outages(OutageConfig(0.0), np.random.default_rng(1))
    assert never.over(10**15) == 10**15


# -- the person, and the whole ----------------------------------------------------------------------------------------


def test_the_persons_share_is_counted_as_it_reaches_the_learner() -> None:
    person = PersonConfig(patience=2, delay=1, hold=4, max_share=1.0)
    fleet, learner = made([SupervisedEnv(PointMassEnv(1), expert, progress, person) for _ in range(2)])
    fleet.timeline.run(micros(22.25))  # no robot is in an episode
    arrived = sum(int((rollout.intervened & rollout.valid).sum()) for _, rollout in learner.episodes)
    assert fleet.counts.person == arrived > 0 and fleet.counts.steps == 16 * len(learner.episodes) == 16 * 10
    assert fleet.counts.share == arrived / 160


def test_somebody_who_demonstrates_does_whole_episodes_up_to_the_share_and_the_number_of_steps() -> None:
    shows = DemonstratorConfig(max_share=0.3, steps=30)
    fleet, learner = made([DemonstratedEnv(PointMassEnv(1), expert, shows)])
    fleet.timeline.run(micros(50.0))
    shown = [bool(rollout.intervened.all()) for _, rollout in learner.episodes]
    assert shown == [i in (0, 4) for i in range(10)], "32 steps are enough"
    assert [bool(rollout.intervened.any()) for _, rollout in learner.episodes] == shown
    first = learner.episodes[0][1]
    assert bool(first.success.any()) and not first.version.any()


def history(seed: int) -> list[Any]:
    outage = OutageConfig(500.0, 5.0)
    times = replace(TIMES, broken=outage, offline=outage)
    watched = [SupervisedEnv(PointMassEnv(1), expert, progress, PersonConfig(patience=3)) for _ in range(3)]
    fleet, learner = made([*watched], times, seed)
    fleet.timeline.run(micros(50.0))
    assert fleet.counts.lost > 0
    rollouts = [(time, rollout.robot, rollout.executed.numpy().tobytes()) for time, rollout in learner.episodes]
    return [*rollouts, *learner.learnt, learner.policy.gain.item(), fleet.counts]


def test_the_same_seed_gives_the_same_run_bit_for_bit_and_another_one_another() -> None:
    assert history(3) == history(3) != history(4)


def test_every_episode_has_a_seed_of_its_own_and_reaches_the_learner_once() -> None:
    fleet, learner = made([PointMassEnv(1) for _ in range(4)], replace(TIMES, offline=OutageConfig(300.0, 20.0)))
    fleet.timeline.run(micros(80.0))
    seeds = [int(rollout.seeds[0, 0]) for _, rollout in learner.episodes]
    assert len(seeds) == len(set(seeds)) == fleet.learner.received > 40
    assert {rollout.robot for _, rollout in learner.episodes} == {f"robot-{i}" for i in range(4)}
    assert all(isinstance(robot, VirtualRobot) for robot in fleet.robots)
    fleet.close()
