"""A control step: who is in control, that nothing jumps when this changes, and what every step is labelled with."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robot_drivers.driver import DriverError, Measurement
from robot_drivers.executor import _SHRINK, Chunks, OpenLoop, Place, RecedingHorizon, TakeOver, TemporalEnsembling
from robot_drivers.record import SOURCES, Decision, HumanInput, Query, Record
from tests.robot_drivers.arms import DT, LIMITS, EpisodesInLockstep, ToyArm, lockstep, towards
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.wire import pack, unpack

GOAL = np.array([0.8, 0.2])
SILENT = round(LIMITS.watchdog / DT)  # control steps


def by_hand(
    holds: range = range(0),
    moved: float = 0.0,
    silent: Container[int] = (),
    keys: Mapping[int, str] | None = None,
    velocity: list[float] | None = None,
) -> Callable[[int, Measurement], HumanInput | None]:
    """A person holds control in the steps ``holds``, with a leader far away that moves by ``moved`` a step, or steers.

    In the steps ``silent`` nothing comes of the person.
    """

    def person(step: int, measured: Measurement) -> HumanInput | None:
        if step in silent:
            return None
        pressed = (keys[step],) if keys and step in keys else ()
        if step not in holds:
            return HumanInput(step * DT, keys=pressed)
        leader = np.array([-1.5, 1.0]) + moved * (step - holds.start)
        return HumanInput(step * DT, True, *((leader, None) if velocity is None else (None, np.array(velocity))))

    return person


def horizon(
    steps: int = 4, delay: int = 0, length: int = 8, speed: float = 0.5, **person: object
) -> tuple[EpisodesInLockstep, ToyArm]:
    """A run of a receding horizon towards ``GOAL``, watched by that person."""
    watches = by_hand(**person) if person else None  # type: ignore[arg-type]
    return lockstep(RecedingHorizon(steps), towards(GOAL, length, speed), delay, watches)


def whole_chunks(length: int = 100, steps: int = 5) -> tuple[EpisodesInLockstep, list[Record]]:
    """A run of long chunks in the midst of an episode, and its steps so far."""
    run, _ = lockstep(OpenLoop(), towards(GOAL, length, 0.2))
    run.begin(1, 10_000)
    return run, [run.step() for _ in range(steps)]


def sources(records: list[Record]) -> list[str]:
    return [record.source for record in records]


def stands(records: list[Record]) -> bool:
    return bool(np.ptp([record.executed for record in records], axis=0).max() < 1e-3)


def largest_step(records: list[Record]) -> float:
    return float(np.abs(np.diff([record.executed for record in records], axis=0)).max())


def test_a_step_is_labelled_with_what_was_asked_and_done() -> None:
    run, arm = horizon(delay=2)
    records = run.episode(3, 30)
    assert [record.step for record in records] == list(range(30)) and {record.episode for record in records} == {3}
    assert [record.outcome for record in records] == [""] * 29 + ["time_limit"]
    assert set(sources(records)) <= set(SOURCES)
    assert sources(records[:3]) == ["hold", "hold", "policy"], "the first chunk is 2 steps late"
    for record in records[2:]:
        ahead = 2 if record.chunk == 0 else 0  # so long the arm stood still, before the first chunk's first action
        assert record.chunk + record.step_in_chunk == record.step - ahead and record.policy_version == 7
        assert record.latency == pytest.approx((record.step - record.chunk) * DT), "since the chunk was decided on"
        assert np.array_equal(record.clipped, record.requested != arm.commands[record.step])
        assert record.intervention == 0 and not record.intervened
    assert np.isnan(records[0].requested).all() and records[0].chunk == records[0].policy_version == -1
    assert not np.array_equal(records[3].executed, arm.commands[3]), "what the robot says that it was sent"
    assert np.array_equal(records[3].executed, records[4].position)
    speed = (records[9].position - records[8].position) / DT
    assert records[9].velocity == pytest.approx(speed), "the difference of positions, where none is measured"
    received = Record(**unpack(pack(asdict(records[0]))))
    for name, value in vars(records[0]).items():
        assert np.array_equal(getattr(received, name), value, equal_nan=isinstance(value, np.ndarray)), name


@pytest.mark.parametrize(("way", "delay"), [(OpenLoop, 1), (lambda: RecedingHorizon(3), 3), (TemporalEnsembling, 0)])
def test_the_arm_gets_there_in_the_same_way_every_time(way, delay: int) -> None:
    runs = [lockstep(way(), towards(GOAL), delay)[0].episode(1, 200) for _ in range(2)]
    assert np.abs(runs[0][-1].position - GOAL).max() < 0.02
    assert [pack(asdict(record)) for record in runs[0]] == [pack(asdict(record)) for record in runs[1]], "bit for bit"


def test_the_policy_is_told_what_was_consumed_and_is_delayed() -> None:
    asked: list[Query] = []

    def decide(query: Query) -> Decision:
        asked.append(query)
        return towards(GOAL)(query)

    run, _ = lockstep(RecedingHorizon(4), decide, delay=3)
    run.episode(1, 12)
    run.episode(2, 9)
    assert [(query.step, query.consumed, query.delay) for query in asked] == [
        (0, None, 3),  # its first action is executed in step 3
        (7, 4, 3),
        (11, 4, 3),
        (12, None, 3),  # a new episode: nothing counts any more
        (19, 4, 3),
    ]
    assert [int(query.obs.time[0]) for query in asked] == [0, 7, 11, 0, 7]


def test_a_person_takes_over_and_hands_back_without_a_jump() -> None:
    records = horizon(delay=2, holds=range(20, 40))[0].episode(1, 80)
    undisturbed = horizon(delay=2)[0].episode(1, 80)
    assert [record.step for record in records if record.source == "human"] == list(range(20, 40))
    assert [record.intervention for record in records] == [0] * 20 + [1] * 20 + [0] * 40
    at_hand = records[19].executed
    assert np.array_equal(records[20].requested, at_hand), "the leader is 1.5 rad away and stands still"
    assert largest_step(records) <= largest_step(undisturbed) + 1e-6  # rad
    acceleration = np.abs(np.diff([record.executed[0] for record in records], 2)).max() / DT**2
    assert acceleration <= LIMITS.joints[0].acceleration + 1e-6
    back = records[40:]
    assert sources(back[:3]) == ["hold", "hold", "policy"], "a fresh chunk, 2 steps later"
    assert min(record.chunk for record in back if record.source == "policy") >= 40
    assert np.abs(records[-1].position - GOAL).max() < np.abs(at_hand - GOAL).max()


def test_the_leaders_offset_shrinks_by_half_of_what_it_moves() -> None:
    records = horizon(delay=2, holds=range(10, 60), moved=0.01)[0].episode(1, 60)
    offset = records[9].executed - np.array([-1.5, 1.0])
    for i, record in enumerate(records[10:]):
        left = np.sign(offset) * np.maximum(np.abs(offset) - 0.5 * 0.01 * i, 0.0)  # never while it rests
        assert record.requested == pytest.approx(np.array([-1.5, 1.0]) + 0.01 * i + left)


def test_a_steering_device_never_runs_ahead_of_the_arm() -> None:
    records = horizon(holds=range(5, 30), velocity=[50.0, 0.0])[0].episode(1, 30)
    for before, record in pairwise(records[4:]):
        assert record.requested == pytest.approx(before.executed + np.array([50.0, 0.0]) * DT)


def test_chunks_decided_before_a_hand_back_are_refused() -> None:
    run, _ = horizon(30, delay=5, length=40, holds=range(8, 10))
    records = run.episode(1, 20)  # asked at 0, arrived at 5; handed back at 10, so asked again
    assert sources(records[10:16]) == ["hold"] * 5 + ["policy"] and records[15].chunk == 10
    executor = run.executor
    refused = executor.refused
    executor.human(HumanInput(0.0, engaged=True), 0.0)
    during = [executor.act(run.clock.now) for _ in range(3)]
    executor.human(HumanInput(0.0), 0.0)
    executor.decided(Decision(np.zeros((9, 2))), during[-1].step)
    assert executor.refused == refused + 1 and during[-1].intervention == 2, "two interventions have two numbers"


def test_a_silent_teleoperator_keeps_control_and_the_arm_holds() -> None:
    records = horizon(holds=range(5, 80), moved=0.004, silent=range(15, 80))[0].episode(1, 80)
    assert set(sources(records[5:15])) == {"human"}
    assert set(sources(records[15:])) <= {"human", "safety", "hold"}, "the policy does not resume"
    assert {record.intervention for record in records[15 + SILENT :]} == {1}
    assert stands(records[15 + SILENT :]), "within the watchdog's time"


def test_an_attended_arm_holds_when_the_person_falls_silent() -> None:
    records = horizon(speed=0.2, silent=range(10, 61))[0].episode(1, 90)
    assert set(sources(records[:10])) == {"policy"} == set(sources(records[70:]))
    assert stands(records[10 + SILENT : 60])


def test_a_policy_that_falls_silent_in_a_chunk_leaves_it_holding() -> None:
    run, moving = whole_chunks(200, 10)
    assert moving[-1].source == "policy" and moving[-1].executed[0] > moving[-2].executed[0]
    records = run.alone(60)  # the policy's process is gone: no sign of life, and 190 actions are left
    assert stands(records[SILENT:]) and set(sources(records[SILENT:])) <= {"hold", "safety"}


def test_a_policy_that_was_silent_has_to_look_again() -> None:
    run, _ = whole_chunks()
    executor = run.executor
    run.alone(20)
    executor.decided(Decision(np.zeros((50, 2))), executor.step - 5)  # on what was seen before the silence ended
    executor.alive(run.clock.now, run.clock.now)
    (record,) = run.alone(1)
    assert record.source == "hold" and np.isnan(record.requested).all() and executor.refused == 1
    assert record.asks and record.consumed == -1, "asked anew"


def test_after_re_arming_a_fresh_chunk_is_needed() -> None:
    run, _ = horizon(20, delay=2, length=60, keys={10: "stop", 30: "rearm"})
    records = run.episode(1, 60)
    assert set(sources(records[10:30])) <= {"safety", "hold"} and stands(records[22:30])
    assert {record.reason for record in records[10:30]} == {"stopped"}
    again = [record for record in records[30:] if record.source == "policy"]
    assert run.executor.rearmed == 1 and not run.executor.supervisor.stopped
    assert again[0].step >= 32 and min(record.chunk for record in again) >= 30, "nothing that was queued is replayed"


@pytest.mark.parametrize("key", ["success", "failure", "redo"])
def test_a_key_ends_the_episode_and_then_nothing_happens(key: str) -> None:
    run, _ = horizon(keys={6: key})
    records = run.episode(1, 50)
    assert len(records) == 7 and records[-1].outcome == key
    between = [run.step() for _ in range(10)]
    assert {(record.episode, record.source, record.asks) for record in between} == {(0, "hold", False)}
    assert run.episode(2, 8)[-1].outcome == "time_limit"


def test_a_robot_that_judges_itself_ends_its_episode() -> None:
    run, arm = horizon()
    run.begin(1, 1000)
    run.step()
    arm.outcome = "success"
    assert run.step().outcome == "success" and run.step().episode == 0


def test_one_unanswered_call_is_counted_and_more_stop_the_arm() -> None:
    run, arm = horizon()
    arm.fails = {"observe"}
    with pytest.raises(DriverError, match="lift did not answer"):
        run.step()
    assert not arm.commands, "a robot that never answered is not commanded"
    arm.fails = set()
    run.begin(1, 1000)
    before = [run.step() for _ in range(8)][-1]
    arm.fails = {"observe"}
    once = run.step()
    assert run.executor.faults == 1 and np.array_equal(once.position, before.position)
    arm.fails = set()
    assert run.step().source == "policy"
    arm.fails = {"command"}
    deaf = [run.step() for _ in range(SILENT + 2)]
    assert deaf[0].source == "policy" and deaf[-1].reason == "stopped"
    assert np.array_equal(deaf[0].executed, deaf[-1].executed), "nothing was sent"
    arm.fails = set()
    assert run.step().reason == "stopped", "until a person re-arms"
    arm.fails = {"observe"}
    run.executor.rearm(run.clock.now)
    assert [run.step() for _ in range(SILENT)][-1].reason == "stopped"


@pytest.mark.parametrize("answer", [[np.nan, 0.0], [0.0], None])
def test_an_answer_that_is_no_position_is_not_believed(answer) -> None:
    run, arm = horizon()
    run.begin(1, 1000)
    before = [run.step() for _ in range(8)][-1]
    arm.command = lambda position: answer
    wrong = [run.step() for _ in range(SILENT + 2)]
    assert all(np.array_equal(record.executed, before.executed) for record in wrong)
    assert run.executor.faults == len(wrong) and run.step().reason == "stopped", "until a person re-arms"


def test_a_device_that_reuses_its_array_takes_over_smoothly() -> None:
    take_over, leader, last = TakeOver(), np.array([-1.5, 1.0]), np.array([0.2, 0.1])
    for moved in (0.0, 0.0, 0.1):
        leader += moved
        wanted = take_over.request(HumanInput(0.0, True, leader), last, DT)
        assert wanted is not None and np.abs(wanted - last).max() <= 1.5 * moved + 1e-12
    assert not np.array_equal(wanted, last), "the leader's movement is seen"
    np.testing.assert_allclose(np.abs(wanted - leader), np.array([1.7, 0.9]) - _SHRINK * 0.1)


def test_what_is_of_another_robot_is_refused() -> None:
    run, _ = lockstep(RecedingHorizon(4), lambda query: Decision(np.zeros((4, 3))))
    with pytest.raises(ContractError, match=r"shape \[4, 3\] and toy has 2 joints"):
        run.episode(1, 3)
    run, _ = horizon()
    run.step()
    for wrong in ({"position": np.zeros(3)}, {"velocity": np.array([0.0, np.nan])}):
        with pytest.raises(ContractError, match="not 2 finite numbers"):
            run.executor.human(HumanInput(0.0, True, **wrong), 0.0)
    assert run.step().intervention == 0


@pytest.mark.parametrize("stamp", [np.inf, 1e9, np.nan])
def test_a_sign_of_life_from_the_future_is_none(stamp: float) -> None:
    run, _ = whole_chunks(steps=1)
    run.executor.alive(stamp, stamp)
    assert run.alone(20)[-1].source == "hold"


@pytest.mark.parametrize(("silent", "stays"), [(1.9, False), (2.1, True)])
def test_a_frozen_process_drives_on_after_a_person_re_armed(silent: float, stays: bool) -> None:
    run, _ = whole_chunks()
    run.alone(round(silent / DT))  # only the control process goes on
    records = [run.step() for _ in range(20)]
    assert (records[-1].reason == "stopped") == stays == bool(run.executor.supervisor.stopped)
    if stays:
        assert f"its policy's process was silent for {silent + DT:.1f} s" in run.executor.supervisor.stopped
        run.executor.rearm(run.clock.now)
        assert [run.step() for _ in range(20)][-1].source == "policy"


def test_a_frozen_teleoperator_leaves_the_arm_to_nobody() -> None:
    run, _ = lockstep(OpenLoop(), towards(GOAL, 100), 0, by_hand(silent=range(20, 20 + round(2.5 / DT))))
    assert run.episode(1, 180)[-1].reason == "stopped"
    assert "its teleoperator was silent for 2.5 s" in run.executor.supervisor.stopped


def test_a_robot_that_resets_itself_is_found_there_still_stopped() -> None:
    run, arm = horizon()
    with pytest.raises(UserError, match="toy cannot reset its scene"):
        run.executor.reset(5)
    arm.reset = lambda seed: setattr(arm, "position", np.array([seed / 4, 0.0]))
    run.episode(1, 30)
    run.executor.reset(5)
    first = run.episode(2, 30)[0]
    assert first.position[0] == 1.25 and first.reason == "rate" and first.velocity[0] == 0, "nothing has jumped"
    run.executor.stop("for a test")
    run.executor.reset(6)
    assert run.step().reason == "stopped"


WAYS: dict[str, Callable[[], Chunks]] = {
    "open loop": OpenLoop,
    "open loop of 2": lambda: OpenLoop(2),
    "receding horizon": lambda: RecedingHorizon(3),
    "ensembling": TemporalEnsembling,
}
every_way = pytest.mark.parametrize("way", WAYS)
OVERLAPPING = ["receding horizon", "ensembling"]
overlapping_ways = pytest.mark.parametrize("way", OVERLAPPING)


def chunk(observed: int, length: int) -> np.ndarray:
    """[H,2]: for step ``t`` it holds (t, observed)."""
    steps = np.arange(observed, observed + length, dtype=float)
    return np.stack([steps, np.full(length, float(observed))], 1)


def played(chunks: Chunks, delay: int, steps: int, length: int = 4) -> list[list[float] | None]:
    """What is executed when every question is answered ``delay`` steps later, one question at a time."""
    asked, result = None, []
    for step in range(steps):
        if asked is not None and step >= asked + delay:
            chunks.add(chunk(asked, length), asked, step)
            asked = None
        if asked is None and chunks.wants(step):
            asked = step
            if not delay:
                chunks.add(chunk(asked, length), asked, step)
                asked = None
        action = chunks.action(step)
        result.append(None if action is None else [float(number) for number in action])
    return result


def test_open_loop_executes_whole_chunks_and_waits_in_between() -> None:
    assert played(OpenLoop(), 0, 5, 2) == [[0, 0], [1, 0], [2, 2], [3, 2], [4, 4]]
    waiting = [None, None]
    assert played(OpenLoop(), 2, 9, 3) == [*waiting, [0, 0], [1, 0], [2, 0], *waiting, [5, 5], [6, 5]]
    assert played(OpenLoop(2), 1, 7) == [None, [0, 0], [1, 0], None, [3, 3], [4, 3], None]


def test_receding_horizon_drops_the_first_actions_of_a_new_chunk() -> None:
    assert played(RecedingHorizon(2), 0, 5) == [[0, 0], [1, 0], [2, 2], [3, 2], [4, 4]]
    # asked at 0, 3, 5, ...; the first begins with its first action, the others count from one step later on
    assert played(RecedingHorizon(2), 1, 7) == [None, [0, 0], [1, 0], [2, 0], [4, 3], [5, 3], [6, 5]]
    # a delay longer than the horizon: the next question follows each answer after an action
    expected = [None, None, None, [0, 0], [1, 0], [2, 0], [3, 0], [7, 4], [8, 4], [9, 4]]
    assert played(RecedingHorizon(1), 3, 10, 7) == expected
    # where the arm stood still, a chunk goes on from there: 5 arrives at 7, and the one before ended at 6
    expected = [None, None, [0, 0], [1, 0], [2, 0], [3, 0], None, [6, 5], [7, 5], [8, 5], None, [10, 9]]
    assert played(RecedingHorizon(3), 2, 12, 4) == expected


@overlapping_ways
def test_a_first_chunk_begins_at_its_start_and_the_next_in_step(way: str) -> None:
    chunks = WAYS[way]()
    chunks.add(chunk(0, 9), 0, 5)
    assert chunks.place(5) == Place(0, 0) and chunks.consumed(5) == 0
    chunks.add(chunk(5, 9), 5, 10)
    assert chunks.place(10) == Place(5, 5) and chunks.consumed(10) == 5


def test_ensembling_weighs_the_oldest_most() -> None:
    chunks, weight = TemporalEnsembling(decay=0.5), np.exp(-0.5)
    chunks.add(np.array([[1.0], [2.0], [3.0]]), 0, 0)
    assert chunks.action(0) == pytest.approx([1.0])
    chunks.add(np.array([[4.0], [5.0]]), 1, 1)
    assert chunks.action(1) == pytest.approx([(2 + weight * 4) / (1 + weight)])
    chunks.add(np.array([[6.0]]), 2, 2)
    assert chunks.action(2) == pytest.approx([(3 + weight * 5 + weight**2 * 6) / (1 + weight + weight**2)])
    assert chunks.action(3) is None
    act = TemporalEnsembling()  # has the decay of ACT
    act.add(np.zeros((3, 1)), 0, 0)
    act.add(np.ones((3, 1)), 1, 1)
    assert act.action(1) == pytest.approx([np.exp(-0.01) / (1 + np.exp(-0.01))], abs=1e-12)


def test_ensembling_weighs_by_age_and_not_by_arrival() -> None:
    chunks, weight = TemporalEnsembling(decay=0.5), np.exp(-0.5)
    chunks.add(np.array([[4.0], [5.0]]), 1, 1)
    chunks.add(np.array([[1.0], [2.0], [3.0]]), 0, 1)
    assert chunks.action(1) == pytest.approx([(2 + weight * 4) / (1 + weight)])
    assert chunks.place(1) == Place(1, 0)


@every_way
def test_a_queue_keeps_its_own_copies_and_forgets_all_of_them(way: str) -> None:
    chunks, mine = WAYS[way](), chunk(0, 4)
    chunks.add(mine, 0, 0)
    mine[:] = np.nan
    np.testing.assert_array_equal(chunks.action(0), [0, 0])
    chunks.clear()
    assert chunks.action(1) is None and chunks.place(1) is None and chunks.consumed(1) is None and chunks.wants(1)


def test_places_name_the_chunk_and_the_action_that_are_executed() -> None:
    for chunks in (OpenLoop(), RecedingHorizon(2), TemporalEnsembling()):
        chunks.add(chunk(0, 6), 0, 0)
        chunks.add(chunk(1, 6), 1, 3)
        assert chunks.place(4) == Place(1, 3) and chunks.place(7) is None
        assert chunks.consumed(5) == 4 and chunks.consumed(20) == 6, "no more than there were"


@every_way
def test_a_chunk_that_is_over_or_older_changes_nothing(way: str) -> None:
    chunks = WAYS[way]()
    chunks.add(chunk(0, 6), 0, 0)
    chunks.add(chunk(1, 3), 1, 4)
    if way in OVERLAPPING:
        assert chunks.place(4) == Place(0, 4) and chunks.consumed(4) == 4 and chunks.wants(4)
    if way != "ensembling":  # there an older one has its say
        chunks.add(chunk(5, 4), 5, 6)
        newest = chunks.action(7)
        chunks.add(chunk(4, 4), 4, 7)
        assert newest is not None and np.array_equal(chunks.action(7), newest)


@every_way
def test_what_is_no_chunk_is_refused_and_the_rest_goes_on(way: str) -> None:
    chunks = WAYS[way]()
    chunks.add(chunk(0, 4), 0, 0)
    for wrong in (np.zeros(3), np.zeros((0, 3)), np.full((2, 3), np.nan), np.full((2, 3), -np.inf)):
        with pytest.raises(ContractError, match=r"not \[H,D\] with finite numbers"):
            chunks.add(wrong, 1, 1)
    with pytest.raises(ContractError, match="step 9, but step 1"):
        chunks.add(chunk(9, 4), 9, 1)
    assert np.array_equal(chunks.action(1), [1, 0])
    for kind in (OpenLoop, RecedingHorizon):
        with pytest.raises(ContractError, match="steps is 0"):
            kind(0)


@every_way
@settings(max_examples=30, deadline=None)
@given(delays=st.lists(st.integers(0, 6), min_size=1, max_size=12), length=st.integers(1, 6))
def test_a_chunk_is_late_by_the_time_that_the_arm_stood_still(way: str, delays: list[int], length: int) -> None:
    """One question at a time, each answered after a delay of its own."""
    chunks, answers = WAYS[way](), list(delays)
    waiting: list[int] = []  # the step observed, and how late the answer is
    arrived, still = {}, []
    for step in range(60):
        for late in (True, False):  # an answer that was waited for; one without delay
            if waiting and step >= sum(waiting):
                chunks.add(chunk(waiting[0], length), waiting[0], step)
                arrived[waiting[0]] = step
                waiting = []
            if late and not waiting and answers and chunks.wants(step):
                waiting = [step, answers.pop(0)]
        place, action = chunks.place(step), chunks.action(step)
        still.append(place is None)
        assert (action is None) == (place is None)
        if place is not None:
            waited = sum(still[place.chunk : arrived[place.chunk]])
            assert place.index == step - place.chunk - waited
            if way != "ensembling":
                assert action is not None and action.tolist() == [step - waited, place.chunk]


@settings(max_examples=30, deadline=None)
@given(delay=st.integers(0, 5), length=st.integers(6, 9), steps=st.integers(1, 6))
def test_open_loop_executes_every_action_in_order_and_no_other(delay: int, length: int, steps: int) -> None:
    done = [action for action in played(OpenLoop(steps), delay, 40, length) if action is not None]
    starts = sorted({int(observed) for _, observed in done})
    assert np.diff(starts).tolist() == [steps + delay] * (len(starts) - 1), "asked when the last one was over"
    expected = [[start + i, start] for start in starts for i in range(steps)]
    assert done == expected[: len(done)]
