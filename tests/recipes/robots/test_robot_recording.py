"""Episodes on the simulated SO-101: played through the supervisor, recorded with labels, read back."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from robot_drivers.record import SOURCES, ControlStep, Decision, Query
from robot_drivers.simulated import SimulatedRobot
from tests.recipes.robots.arms import BLIND, OPEN_LOOP, OPTIONS, expert_plays, file_arm, simulated
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.real_time_chunking import RealTimeChunking
from vla_rl.policies.residual import DeterministicResidual
from vla_rl.recipes.imitate import NewTinyOfJoints
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.drive import PolicyDecider, Recorder, episode_of, hold_position
from vla_rl.recipes.robots.person import EpisodeLines
from vla_rl.recipes.robots.session import LockstepSession
from vla_rl.recipes.terminal import console


def test_the_expert_succeeds_under_supervision_and_is_recorded(recorded):
    summary, folder = recorded
    episodes = load_demonstrations(folder)
    assert summary.outcomes == Counter(success=2) and episodes.count == 2
    assert summary.steps == len(episodes.state) and summary.intervened == 0
    assert len(set(episodes.seed.tolist())) == 2 and episodes.fps == 25
    ends = episodes.extras["next.success"]
    assert np.flatnonzero(ends).tolist() == [end - 1 for _, end in episodes.spans()]
    assert episodes.state_names == episodes.action_names == SimulatedRobot(options=OPTIONS).spec.names
    assert {name: image.shape[1:] for name, image in episodes.images.items()} == {"front": (16, 16, 3)}


def test_every_step_says_what_was_requested_and_by_whom(recorded):
    episodes = load_demonstrations(recorded[1])
    label = {name.removeprefix("complementary_info."): values for name, values in episodes.extras.items()}
    assert label["asked"].all() and set(label["source"].tolist()) == {SOURCES.index("policy")}
    differ = np.abs(label["requested"] - episodes.action) > 1e-5
    assert differ.any() and (label["clipped"][differ] == 1).all()  # what was changed is marked
    assert not label["intervention"].any()
    assert (np.diff(label["captured"][: episodes.spans()[0][1]]) > 0.03).all()
    assert (label["step_in_chunk"] == 0).all()  # the expert plans one action at a time


def test_what_is_recorded_was_seen_before_it_was_done():
    """The observation of a step is that of the measurement which its action was decided and supervised on."""
    _, seen = expert_plays(simulated(1.0, **BLIND))
    states = np.stack([one.obs.state[0] for one in seen])
    np.testing.assert_array_equal(states, np.stack([one.record.position for one in seen]).astype(np.float32))
    assert [int(one.obs.time[0]) for one in seen] == list(range(len(seen)))


def test_two_recordings_are_the_same(recorded, tmp_path):
    drive.drive(simulated(), drive.EpisodesConfig("expert", 1, 1, OPEN_LOOP), tmp_path / "again", console)
    first, again = load_demonstrations(recorded[1], [0]), load_demonstrations(tmp_path / "again")
    np.testing.assert_array_equal(again.action, first.action)
    np.testing.assert_array_equal(again.images["front"], first.images["front"])


def test_a_slower_speed_holds():
    _, seen = expert_plays(simulated(1.0, **BLIND), execution=drive.execution("open_loop", 8, 0.1))
    executed = np.stack([one.record.executed for one in seen])
    assert np.abs(np.diff(executed, axis=0)).max() * 25 <= 0.1 * 3.0 + 1e-6  # rad/s
    assert seen[-1].record.outcome == "time_limit"


def test_an_episode_that_ran_out_of_time_is_no_success():
    session, seen = expert_plays(simulated(0.4, **BLIND))
    episode = episode_of(seen, session.spec, 7)
    assert episode.extras["next.done"].tolist() == [False] * 9 + [True]
    assert not episode.extras["next.success"].any() and not episode.extras["next.reward"].any()


def test_ctrl_c_keeps_the_episodes_before(monkeypatch, tmp_path):
    play, played = LockstepSession.play, []

    def interrupted(session, decide, number, seed):
        if played:
            raise KeyboardInterrupt
        played.append(number)
        return play(session, decide, number, seed)

    monkeypatch.setattr(LockstepSession, "play", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped with 1 episodes recorded in"):
        drive.drive(simulated(0.2), drive.EpisodesConfig("expert", 5, 1, OPEN_LOOP), tmp_path / "kept", console)
    assert load_demonstrations(tmp_path / "kept").count == 1


def test_a_recorder_keeps_what_is_whole_when_the_next_fails(tmp_path):
    session, seen = expert_plays(simulated(0.4))
    episode = episode_of(seen, session.spec, 7)
    broken = replace(episode, state=np.full_like(episode.state, np.nan))
    with pytest.raises(UserError, match="not finite"), Recorder(tmp_path / "kept") as recorder:
        recorder.add(episode)
        recorder.add(broken)
    assert load_demonstrations(tmp_path / "kept").count == 1


def test_the_expert_of_a_real_arm_is_refused(tmp_path):
    settings, real = drive.EpisodesConfig("expert", 1, 1, OPEN_LOOP), file_arm(tmp_path / "commands")
    with pytest.raises(UserError, match=r"scripted expert reads .* drive it by a teleoperator"):
        drive.build_decider(SimpleNamespace(), real, settings)
    with pytest.raises(UserError, match=r"scripted person reads .*FileArm does not have"):
        drive.drive(real, replace(settings, policy="", person=True), None, console)


class Ends:
    """A session whose episodes end as ``outcomes`` say."""

    def __init__(self, *outcomes: str, reason: str = "") -> None:
        self.outcomes, self.reason, self.numbers, self.titles = list(outcomes), reason, [], []

    def prepare(self, title):
        self.titles.append(title)

    def play(self, decide, number, seed):
        self.numbers.append((number, seed))
        record = SimpleNamespace(
            outcome=self.outcomes.pop(0),
            reason=self.reason,
            clipped=np.array([False, True]),
            intervened=True,
            captured=1.0,
            source="human",
        )
        yield ControlStep(None, record)


def test_an_episode_that_a_person_rejects_is_played_again():
    session, show = Ends("redo", "failure", "redo", "success"), Console(file=io.StringIO(), width=200)
    settings = drive.EpisodesConfig("", 2, 1, OPEN_LOOP)
    with EpisodeLines(show, 2) as display:
        summary = drive._play(session, hold_position, settings, None, display)
    assert show.file.getvalue().splitlines() == [
        f"Episode {number} of 2: {outcome}, 0.0 s, 100% a person's, 100% clipped"
        for number, outcome in ((1, "redo"), (1, "failure"), (2, "redo"), (2, "success"))
    ]
    assert session.titles == [f"Episode {number} of 2" for number in (1, 1, 2, 2)]
    numbers, seeds = zip(*session.numbers, strict=True)
    assert summary.outcomes == Counter(failure=1, success=1) and numbers == (1, 2, 3, 4)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert str(summary) == (
        "success 50.0% [2.7, 97.3] of 2 (1 failure, 1 success); of 2 control steps 100% were clipped, 100% a person's"
    )


def query(consumed: int | None, delay: int = 1) -> Query:
    obs = SimpleNamespace(state=np.zeros((1, 2)), public=lambda: obs)
    return Query(obs, 0, consumed, delay)


class Remembers(FunctionPolicy):
    """Counts its decisions since it began anew, and says so in its chunk; a real-time policy."""

    def initial_state(self, num_envs):
        return {"count": np.zeros(num_envs, int)}

    def reset_state(self, state, env_ids):
        return {"count": np.zeros(1, int)}

    def continue_chunk(self, state, env_ids, consumed, delay):
        self.continued = (np.asarray(env_ids).tolist(), int(consumed[0]), int(delay[0]))
        return state

    def encode(self, obs):
        return {"state": obs.state}

    def act(self, features, state, mode, generator):
        assert mode == "eval"
        chunk = np.full((1, 6, 2), state["count"][0], np.float32)
        return SimpleNamespace(action=chunk), {"count": state["count"] + 1}


def test_a_policy_goes_on_until_no_chunk_counts():
    spec = SimulatedRobot(options=OPTIONS).env_spec
    policy = Remembers(spec, None)
    decide = PolicyDecider(policy, None)
    assert isinstance(decide(query(None)), Decision)
    assert decide(query(4, delay=1)).chunk[0, 0] == 1 and policy.continued == ([0], 4, 1)
    decide(query(5, delay=3))
    assert policy.continued == ([0], 5, 1)  # a late query: one action is left
    assert decide(query(None)).chunk[0, 0] == 0


SPEC = SimulatedRobot(options=OPTIONS).env_spec
MIDDLE = (np.asarray(SPEC.action.low) + np.asarray(SPEC.action.high)) / 2


def counting(obs: Observation) -> np.ndarray:
    """[E,3,D]: a little beside the middle, by the clock when it was chosen and the number in the chunk."""
    number = np.asarray(obs.time)[:, None] + 0.1 * np.arange(3)
    return (MIDDLE + 0.001 * number[..., None] * np.ones_like(MIDDLE)).astype(np.float32)


class OfState:
    """The features are the joints alone."""

    spec = SPEC

    def __init__(self) -> None:
        self.feature_sizes = {"state": SPEC.state.shape[0]}

    def encode(self, obs: Observation) -> dict[str, torch.Tensor]:
        return {"state": torch.as_tensor(obs.state)}


def seen_at(time: int, consumed: int | None) -> Query:
    state = np.broadcast_to(MIDDLE, (1, *SPEC.state.shape)).astype(np.float32)
    pictures = {name: np.zeros((1, *image.shape), np.uint8) for name, image in SPEC.images.items()}
    return Query(Observation(pictures, state, np.zeros(1, np.int64), np.array([time])), time, consumed, 0)


def test_a_residual_follows_its_bases_chunk_on_an_arm() -> None:
    """A policy whose decisions depend on its own state acts on an arm as it does elsewhere."""
    policy = DeterministicResidual(FunctionPolicy(SPEC, counting), OfState())  # type: ignore[arg-type]
    decide = PolicyDecider(policy, torch.Generator())
    asked = [(0, None), (1, 1), (2, 1), (3, 1), (4, None), (5, 1)]
    chunks = np.stack([decide(seen_at(*one)).chunk for one in asked])
    assert chunks.shape == (6, 1, SPEC.action_dim)
    wanted = np.array([0, 0.1, 0.2, 3, 4, 4.1])  # the base chose at 0, 3 and, after an intervention, at 4
    np.testing.assert_allclose((chunks[:, 0] - MIDDLE) / 0.001, wanted[:, None] * np.ones_like(MIDDLE), atol=1e-2)


@pytest.fixture(scope="module")
def checkpoint(recorded, tmp_path_factory):
    """A policy for the arm that has learnt nothing."""
    episodes = load_demonstrations(recorded[1], [0])
    folder = tmp_path_factory.mktemp("policy")
    sampler = FlowSampler(Ode(), AllSteps(), 2)
    new = NewTinyOfJoints(horizon=8, condition=16, width=16, sampler=sampler)
    new.build(SimulatedRobot(options={**OPTIONS, "seconds": 1.0}).env_spec, episodes, 1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("real_time", ["", "identity", "vjp"])
def test_a_checkpoint_drives(real_time, checkpoint):
    settings = drive.EpisodesConfig(
        str(checkpoint), 1, 1, drive.execution("receding_horizon", 4, 0.25), real_time, "test"
    )
    summary = drive.drive(simulated(0.4), settings, None, console)
    assert summary.outcomes == Counter(time_limit=1) and summary.steps == 10


def test_the_next_chunk_of_real_time_chunking_continues_the_last(checkpoint, monkeypatch):
    told, go_on = [], RealTimeChunking.continue_chunk

    def watched(policy, state, env_ids, consumed, delay):
        told.append((int(consumed[0]), int(delay[0])))
        return go_on(policy, state, env_ids, consumed, delay)

    monkeypatch.setattr(RealTimeChunking, "continue_chunk", watched)
    settings = drive.EpisodesConfig(
        str(checkpoint), 1, 1, drive.execution("receding_horizon", 4, 0.25), "identity", "test"
    )
    drive.drive(simulated(0.4), settings, None, console)
    assert told == [(4, 0)] * 2  # 10 control steps, four actions of each chunk, none of them late
