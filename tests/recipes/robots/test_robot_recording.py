"""Episodes on the simulated SO-101: played through the supervisor, recorded with labels, read back."""

from __future__ import annotations

import io
from collections import Counter
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from robot_drivers.config import Part, RobotConfig
from robot_drivers.limits import Limits
from robot_drivers.record import SOURCES, Decision, Query
from robot_drivers.runtime import ControlProcess
from robot_drivers.simulated import SimulatedRobot
from tests.robot_drivers.simulated_robot import SimulatedProcess
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.real_time_chunking import RealTimeChunking
from vla_rl.recipes.imitate import NewTinyOfJoints
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.drive import PolicyDecider, Recorder, episode_of, hold_position
from vla_rl.recipes.robots.person import EpisodeLines
from vla_rl.recipes.robots.session import ControlStep, LockstepSession, RealTimeSession, open_session
from vla_rl.recipes.terminal import console

OPTIONS = {"image_size": 16, "threads": 1}
OPEN_LOOP = drive.execution("open_loop", 8, 1.0)


def simulated(**options) -> RobotConfig:
    arm = {"options": {**OPTIONS, **options}}
    limits = Limits.of(SimulatedRobot(**arm).spec, margin=0.0).to_json()
    return RobotConfig(Part("robot_drivers.simulated:SimulatedRobot", arm), limits=limits)


def wait(sentence: str, control: ControlProcess) -> None:
    raise AssertionError(f"nobody has to do anything: {sentence}")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two episodes of the scripted expert."""
    folder = tmp_path_factory.mktemp("robot") / "dataset"
    summary = drive.drive(simulated(), drive.EpisodesConfig("expert", 2, 1, OPEN_LOOP), folder, console)
    return summary, load_demonstrations(folder)


def test_the_expert_succeeds_under_supervision_and_is_recorded(recorded):
    summary, episodes = recorded
    assert summary.outcomes == Counter(success=2) and episodes.count == 2
    assert summary.steps == len(episodes.state) and summary.intervened == 0
    assert len(set(episodes.seed.tolist())) == 2 and episodes.fps == 25
    ends = episodes.extras["next.success"]
    assert np.flatnonzero(ends).tolist() == [end - 1 for _, end in episodes.spans()]
    assert episodes.state_names == episodes.action_names == SimulatedRobot(options=OPTIONS).spec.names
    assert {name: image.shape[1:] for name, image in episodes.images.items()} == {"front": (16, 16, 3)}


def test_every_step_says_what_was_requested_and_by_whom(recorded):
    _, episodes = recorded
    label = {name.removeprefix("complementary_info."): values for name, values in episodes.extras.items()}
    assert label["asked"].all() and set(label["source"].tolist()) == {SOURCES.index("policy")}
    differ = np.abs(label["requested"] - episodes.action) > 1e-5
    assert differ.any() and (label["clipped"][differ] == 1).all()  # what was changed is marked
    assert not label["intervention"].any()
    assert (np.diff(label["captured"][: episodes.spans()[0][1]]) > 0.03).all()
    assert (label["step_in_chunk"] == 0).all()  # the expert plans one action at a time


def test_what_is_recorded_was_seen_before_it_was_done():
    """The observation of a step is that of the measurement which its action was decided and supervised on."""
    config = simulated()
    with closing(LockstepSession(config, OPEN_LOOP)) as session:
        decide = drive.build_decider(session, config, drive.EpisodesConfig("expert", 1, 1, OPEN_LOOP))
        seen = list(session.play(decide, 1, 7))
    states = np.stack([one.obs.state[0] for one in seen])
    np.testing.assert_array_equal(states, np.stack([one.record.position for one in seen]).astype(np.float32))
    assert [int(one.obs.time[0]) for one in seen] == list(range(len(seen)))


def test_two_recordings_are_the_same(recorded, tmp_path):
    _, episodes = recorded
    drive.drive(simulated(), drive.EpisodesConfig("expert", 2, 1, OPEN_LOOP), tmp_path / "again", console)
    again = load_demonstrations(tmp_path / "again")
    np.testing.assert_array_equal(again.action, episodes.action)
    np.testing.assert_array_equal(again.images["front"], episodes.images["front"])


def test_a_slower_speed_holds(tmp_path):
    config = simulated(seconds=1.0)
    with closing(LockstepSession(config, drive.execution("open_loop", 8, 0.1))) as session:
        decide = drive.build_decider(session, config, drive.EpisodesConfig("expert", 1, 1, OPEN_LOOP))
        seen = list(session.play(decide, 1, 7))
    executed = np.stack([one.record.executed for one in seen])
    assert np.abs(np.diff(executed, axis=0)).max() * 25 <= 0.1 * 3.0 + 1e-6  # rad/s
    assert seen[-1].record.outcome == "time_limit"


@pytest.mark.parametrize(("milliseconds", "steps"), [(0, 0), (80, 2), (81, 3)])
def test_a_delay_of_the_policy_lasts_whole_control_steps(milliseconds: float, steps: int):
    asked: list[Query] = []

    def decide(query: Query) -> Decision:
        asked.append(query)
        return Decision(np.repeat(np.asarray(query.obs.state, np.float64), 4, axis=0))

    execution = drive.execution("receding_horizon", 4, 1.0, milliseconds / 1000)
    with closing(LockstepSession(simulated(seconds=1.0), execution)) as session:
        seen = list(session.play(decide, 1, 7))
    sources = [one.record.source for one in seen]
    assert sources.index("policy") == steps and {query.delay for query in asked} == {steps}
    assert seen[steps].record.latency == pytest.approx(steps * 0.04)


def test_a_delay_is_not_set_on_an_arm_in_real_time():
    arm = Part("robot_drivers.simulated_process:SimulatedArm", {"address": "nobody looks"})
    with pytest.raises(UserError, match="one of 200 ms cannot be set"):
        open_session(RobotConfig(arm), drive.execution("receding_horizon", 8, 1.0, 0.2), wait)


def test_an_episode_that_ran_out_of_time_is_no_success():
    config = replace(simulated(), seconds=0.4)
    with closing(LockstepSession(config, OPEN_LOOP)) as session:
        episode = episode_of(list(session.play(hold_position, 1, 7)), session.spec, 7)
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
        drive.drive(simulated(), drive.EpisodesConfig("expert", 5, 1, OPEN_LOOP), tmp_path / "kept", console)
    assert load_demonstrations(tmp_path / "kept").count == 1


def test_test_scenes_are_no_demonstrations(monkeypatch):
    shown = drive.EpisodesConfig("expert", 3, 1, OPEN_LOOP)
    assert not set(drive._seeds(shown)) & set(drive._seeds(replace(shown, scenes="test")))
    assert drive._seeds(shown) != drive._seeds(replace(shown, seed=2))


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


def test_a_stopped_arm_ends_the_session_in_one_sentence():
    with closing(LockstepSession(simulated(), OPEN_LOOP)) as session:
        session.prepare("Episode 1 of 2")
        session._executor.stop("the measurement jumped")
        with pytest.raises(UserError, match=r"before Episode 2 of 2 \(the measurement jumped\)"):
            session.prepare("Episode 2 of 2")


def test_the_expert_of_a_real_arm_is_refused(tmp_path):
    settings = drive.EpisodesConfig("expert", 1, 1, OPEN_LOOP)
    real = RobotConfig(Part("tests.robot_drivers.arms:FileArm", {"path": str(tmp_path / "commands.txt")}))
    with pytest.raises(UserError, match=r"scripted expert reads .* drive it by a teleoperator"):
        drive.build_decider(SimpleNamespace(), real, settings)
    with pytest.raises(UserError, match=r"scripted person reads .*FileArm does not have"):
        drive.drive(real, replace(settings, policy="", person=True), None, console)


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


def test_a_recorder_keeps_what_is_whole_when_the_next_fails(recorded, tmp_path):
    config = simulated()
    with closing(LockstepSession(config, OPEN_LOOP)) as session:
        decide = drive.build_decider(session, config, drive.EpisodesConfig("expert", 1, 1, OPEN_LOOP))
        seen = list(session.play(decide, 1, 7))
    episode = episode_of(seen, session.spec, 7)
    broken = replace(episode, state=np.full_like(episode.state, np.nan))
    with pytest.raises(UserError, match="not finite"), Recorder(tmp_path / "kept") as recorder:
        recorder.add(episode)
        recorder.add(broken)
    assert load_demonstrations(tmp_path / "kept").count == 1


def test_the_same_in_real_time_with_an_arm_that_is_a_process():
    """Nothing but the file differs: the arm holds where it is while nobody takes over, and the time limit ends it."""
    with SimulatedProcess(robot={"options": {**OPTIONS, "seconds": 600}}) as process:
        parts = {"address": process.address, "options": {**OPTIONS, "seconds": 600}}
        arm = Part("robot_drivers.simulated_process:SimulatedArm", parts)
        limits = Limits.of(arm.make().spec, margin=0.0).to_json()
        camera = Part("robot_drivers.simulated_process:SimulatedCamera", {**parts, "camera": "front"})
        config = RobotConfig(arm, {"front": camera}, limits=limits, tasks=("wait",), seconds=0.4)
        with closing(open_session(config, OPEN_LOOP, wait)) as session:
            assert isinstance(session, RealTimeSession) and isinstance(session._control, ControlProcess)
            seen = list(session.play(hold_position, 1, 3))
        episode = episode_of(seen, session.spec, 3)
    assert seen[-1].record.outcome == "time_limit" and len(seen) == 10
    assert episode.images["front"].shape == (10, 16, 16, 3) and episode.images["front"].any()
    assert np.abs(episode.state - episode.state[0]).max() < 0.2 and episode.tasks == ("wait",)


@pytest.fixture(scope="module")
def checkpoint(recorded, tmp_path_factory):
    """A policy for the arm that has learnt nothing."""
    _, episodes = recorded
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
    summary = drive.drive(simulated(seconds=1.0), settings, None, console)
    assert summary.outcomes == Counter(time_limit=1) and summary.steps == 25


def test_the_next_chunk_of_real_time_chunking_continues_the_last(checkpoint, monkeypatch):
    told, go_on = [], RealTimeChunking.continue_chunk

    def watched(policy, state, env_ids, consumed, delay):
        told.append((int(consumed[0]), int(delay[0])))
        return go_on(policy, state, env_ids, consumed, delay)

    monkeypatch.setattr(RealTimeChunking, "continue_chunk", watched)
    settings = drive.EpisodesConfig(
        str(checkpoint), 1, 1, drive.execution("receding_horizon", 4, 0.25), "identity", "test"
    )
    drive.drive(simulated(seconds=1.0), settings, None, console)
    assert told == [(4, 0)] * 6  # 25 control steps, four actions of each chunk, none of them late
