"""Chunks are executed as their papers say, with the delay counted in control steps: numbers by hand, and any timing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robot_drivers.executor import Chunks, OpenLoop, Place, RecedingHorizon, TemporalEnsembling
from vla_rl.contract.errors import ContractError

WAYS: dict[str, Callable[[], Chunks]] = {
    "open loop": OpenLoop,
    "open loop of 2": lambda: OpenLoop(2),
    "receding horizon": lambda: RecedingHorizon(3),
    "ensembling": TemporalEnsembling,
}


def chunk(observed: int, length: int) -> np.ndarray:
    """[H,2]: for step ``t`` it holds (t, observed)."""
    steps = np.arange(observed, observed + length, dtype=float)
    return np.stack([steps, np.full(length, float(observed))], 1)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_policy_writes_into_its_chunk_afterwards_changes_nothing(way: str) -> None:
    chunks, mine = WAYS[way](), chunk(0, 4)
    chunks.add(mine, 0, 0)
    mine[:] = np.nan
    np.testing.assert_array_equal(chunks.action(0), [0, 0])


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


def test_open_loop_executes_whole_chunks_and_stands_still_while_it_waits() -> None:
    assert played(OpenLoop(), 0, 5, 2) == [[0, 0], [1, 0], [2, 2], [3, 2], [4, 4]]
    waiting = [None, None]
    assert played(OpenLoop(), 2, 9, 3) == [*waiting, [0, 0], [1, 0], [2, 0], *waiting, [5, 5], [6, 5]]
    assert played(OpenLoop(2), 1, 7) == [None, [0, 0], [1, 0], None, [3, 3], [4, 3], None]


def test_receding_horizon_goes_on_with_the_old_chunk_and_drops_the_first_actions_of_the_new() -> None:
    assert played(RecedingHorizon(2), 0, 5) == [[0, 0], [1, 0], [2, 2], [3, 2], [4, 4]]
    # asked at 0, 3, 5, ...; the first begins with its first action, the others count from one step later on
    assert played(RecedingHorizon(2), 1, 7) == [None, [0, 0], [1, 0], [2, 0], [4, 3], [5, 3], [6, 5]]
    # a delay longer than the horizon: the next question follows each answer after an action
    expected = [None, None, None, [0, 0], [1, 0], [2, 0], [3, 0], [7, 4], [8, 4], [9, 4]]
    assert played(RecedingHorizon(1), 3, 10, 7) == expected


def test_where_the_arm_stood_still_a_chunk_goes_on_from_there() -> None:
    # 5 arrives at 7, and the chunk before ended at 6: its action for step 6 is executed in step 7
    expected = [None, None, [0, 0], [1, 0], [2, 0], [3, 0], None, [6, 5], [7, 5], [8, 5], None, [10, 9]]
    assert played(RecedingHorizon(3), 2, 12, 4) == expected


@pytest.mark.parametrize("way", ["receding horizon", "ensembling"])
def test_a_first_chunk_begins_with_its_first_action_and_the_next_with_that_of_its_step(way: str) -> None:
    chunks = WAYS[way]()
    chunks.add(chunk(0, 9), 0, 5)
    assert chunks.place(5) == Place(0, 0) and chunks.consumed(5) == 0
    chunks.add(chunk(5, 9), 5, 10)
    assert chunks.place(10) == Place(5, 5) and chunks.consumed(10) == 5


def test_ensembling_weighs_the_oldest_most() -> None:
    chunks = TemporalEnsembling(decay=0.5)
    chunks.add(np.array([[1.0], [2.0], [3.0]]), 0, 0)
    assert chunks.action(0) == pytest.approx([1.0])
    chunks.add(np.array([[4.0], [5.0]]), 1, 1)
    weight = np.exp(-0.5)
    assert chunks.action(1) == pytest.approx([(2 + weight * 4) / (1 + weight)])
    chunks.add(np.array([[6.0]]), 2, 2)
    assert chunks.action(2) == pytest.approx([(3 + weight * 5 + weight**2 * 6) / (1 + weight + weight**2)])
    assert chunks.action(3) is None


def test_ensembling_weighs_by_age_and_not_by_arrival() -> None:
    chunks = TemporalEnsembling(decay=0.5)
    chunks.add(np.array([[4.0], [5.0]]), 1, 1)
    chunks.add(np.array([[1.0], [2.0], [3.0]]), 0, 1)
    weight = np.exp(-0.5)
    assert chunks.action(1) == pytest.approx([(2 + weight * 4) / (1 + weight)])
    assert chunks.place(1) == Place(1, 0)


def test_ensembling_of_act_has_its_decay() -> None:
    chunks = TemporalEnsembling()
    chunks.add(np.zeros((3, 1)), 0, 0)
    chunks.add(np.ones((3, 1)), 1, 1)
    assert chunks.action(1) == pytest.approx([np.exp(-0.01) / (1 + np.exp(-0.01))], abs=1e-12)


def test_places_name_the_chunk_and_the_action_that_are_executed() -> None:
    open_loop, horizon, ensemble = OpenLoop(), RecedingHorizon(2), TemporalEnsembling()
    for chunks in (open_loop, horizon, ensemble):
        chunks.add(chunk(0, 6), 0, 0)
        chunks.add(chunk(1, 6), 1, 3)
        assert chunks.place(4) == Place(1, 3) and chunks.place(7) is None
        assert chunks.consumed(5) == 4 and chunks.consumed(20) == 6, "no more than there were"


@pytest.mark.parametrize("way", ["receding horizon", "ensembling"])
def test_a_chunk_whose_steps_are_over_changes_nothing(way: str) -> None:
    chunks = WAYS[way]()
    chunks.add(chunk(0, 6), 0, 0)
    chunks.add(chunk(1, 3), 1, 4)
    assert chunks.place(4) == Place(0, 4) and chunks.consumed(4) == 4 and chunks.wants(4)


@pytest.mark.parametrize("way", WAYS)
def test_an_older_chunk_never_replaces_a_newer_one(way: str) -> None:
    chunks = WAYS[way]()
    chunks.add(chunk(3, 4), 3, 4)
    newest = chunks.action(5)
    if way != "ensembling":  # there it has its say
        chunks.add(chunk(2, 4), 2, 5)
    assert newest is not None and np.array_equal(chunks.action(5), newest)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((0, 3)), np.full((2, 3), np.nan), np.full((2, 3), -np.inf)])
def test_what_is_no_chunk_of_numbers_is_refused_and_the_rest_goes_on(way: str, wrong: np.ndarray) -> None:
    chunks = WAYS[way]()
    chunks.add(chunk(0, 4), 0, 0)
    with pytest.raises(ContractError, match=r"not \[H,D\] with finite numbers"):
        chunks.add(wrong, 1, 1)
    with pytest.raises(ContractError, match="step 9, but step 1"):
        chunks.add(chunk(9, 4), 9, 1)
    assert np.array_equal(chunks.action(1), [1, 0])


@pytest.mark.parametrize("way", WAYS)
def test_after_clearing_nothing_is_left(way: str) -> None:
    chunks = WAYS[way]()
    chunks.add(chunk(0, 4), 0, 0)
    chunks.clear()
    assert chunks.action(1) is None and chunks.place(1) is None and chunks.consumed(1) is None and chunks.wants(1)


@pytest.mark.parametrize("way", [OpenLoop, RecedingHorizon])
def test_no_steps_are_no_way_to_execute(way: Callable[[int], Chunks]) -> None:
    with pytest.raises(ContractError, match="steps is 0"):
        way(0)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(delays=st.lists(st.integers(0, 6), min_size=1, max_size=12), length=st.integers(1, 6))
def test_a_chunk_is_ahead_of_its_steps_by_the_time_that_the_arm_stood_still(
    way: str, delays: list[int], length: int
) -> None:
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


@settings(max_examples=60, deadline=None)
@given(delay=st.integers(0, 5), length=st.integers(6, 9), steps=st.integers(1, 6))
def test_open_loop_executes_every_action_in_order_and_nothing_else(delay: int, length: int, steps: int) -> None:
    done = [action for action in played(OpenLoop(steps), delay, 40, length) if action is not None]
    starts = sorted({int(observed) for _, observed in done})
    assert np.diff(starts).tolist() == [steps + delay] * (len(starts) - 1), "asked when the last one was over"
    expected = [[start + i, start] for start in starts for i in range(steps)]
    assert done == expected[: len(done)]
