"""The supervisor, with hypothesis: whatever comes, no command that leaves it violates a limit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import strategies as st

from robot_drivers import kinematics
from robot_drivers.driver import Measurement
from robot_drivers.limits import Box
from robot_drivers.motion import Course, JointBounds, Motion, RateBounds, ramp, run, steer, to_velocity
from robot_drivers.safety import Request, Supervisor
from tests.robot_drivers.arms import DT, measured, so101, two_joints
from tests.robot_drivers.checking import check, check_apart, check_workspace, holds_for, outside
from vla_rl.contract.errors import ContractError

ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)
PLACE = st.one_of(st.floats(-2, 2), ANY)
FOLLOWS = st.sampled_from([1.0, 0.9, 0.3, 0.0])  # how much of its way an arm makes in a step; 0: it is blocked
GAP = st.one_of(st.just(DT), st.just(DT), st.floats(0, 0.05), st.floats(0, 2), st.just(0.0))


def stream(supervisor, wanted, start=0.0, now=0.0, source="policy", lag=0.0, seen=None, deadman=None):
    """The commands at the control rate from ``now`` on, for ``wanted``: requests, positions or None.

    The arm begins at ``start`` and follows at once, or with a first-order ``lag`` in s; ``seen(time)`` is measured in
    its place.  ``deadman(time)`` is when the switch was last seen pressed.
    """
    commands, arm = [], np.array(start if np.ndim(start) else [start, start], np.float64)
    for index, one in enumerate(wanted):
        at = now + DT * index
        request = one if one is None or isinstance(one, Request) else Request(np.asarray(one, np.float64), at, source)
        measurement = measured(arm if seen is None else seen(at), at)
        commands.append(supervisor.step(measurement, request, at, deadman and deadman(at)))
        arm = arm + (commands[-1].position - arm) * (1 - math.exp(-DT / lag) if lag else 1.0)
    return commands


ONWARD = [1.4, 0.7]


def moving(limits):
    """A supervisor in the midst of a motion, and its commands so far."""
    supervisor = Supervisor(limits)
    return supervisor, stream(supervisor, [ONWARD] * 10)


def carried_on(supervisor, commands, wanted, later=0.0, **options):
    """The commands for ``wanted`` after ``commands``, of which the first was at 0."""
    return stream(supervisor, wanted, commands[-1].position, DT * len(commands) + later, **options)


def positions_of(commands):
    return [command.position for command in commands]


NOTHING = st.just(None)
REQUESTS = st.sampled_from(["", "", "", "none", "old", "future", "again", "shape", "nobody"])
MEASUREMENTS = st.sampled_from(["", "", "", "", "", "none", "old", "nan", "anywhere"])
STRETCH = st.tuples(
    st.tuples(PLACE, PLACE),  # where to
    st.sampled_from([0.0, 0.0, 0.5, -5.0, math.inf]),  # how fast that moves
    st.integers(1, 25),  # steps
    GAP,  # before each of them
    st.one_of(NOTHING, NOTHING, NOTHING, st.floats(-10, 3)),  # another gap before the first of them
    REQUESTS,  # what is wrong with the first of them
    MEASUREMENTS,
    st.sampled_from(["policy", "policy", "human"]),
    st.booleans(),  # whether a person re-arms before
    st.booleans(),  # whether the deadman switch is pressed
)


def asked(kind, position, now, source):
    """A request at ``now``, with what ``kind`` says wrong with it."""
    stamp = {"old": now - 1, "future": now + 1, "again": now - 1e-9}.get(kind, now)
    return (
        None
        if kind == "none"
        else Request(position[:1] if kind == "shape" else position, stamp, "nobody" if kind == "nobody" else source)
    )


def seen(kind, arm, position, now):
    """The arm as it is measured at ``now``, with what ``kind`` says wrong with it."""
    where = {"nan": np.full(2, math.nan), "anywhere": position}.get(kind, arm)
    return None if kind == "none" else measured(where, now - 1 if kind == "old" else now)


@holds_for(
    st.lists(STRETCH, min_size=1, max_size=8),
    st.floats(-1, 1.5),
    st.floats(-0.2, 0.8),
    st.booleans(),
    FOLLOWS,
    gate=24,
    full=150,
)
def test_no_command_violates_a_limit(stretches, quick, slow, deadman, follows):
    limits = two_joints(deadman=deadman)
    supervisor, arm = Supervisor(limits), np.array([quick, slow])
    now = clock = 0.0
    times, positions = [0.0], [supervisor.step(measured(arm, 0.0), None, 0.0).position]
    for goal, speed, steps, gap, pause, wrong, blind, source, rearm, pressed in stretches:
        if rearm:
            supervisor.rearm(now)
        for index in range(steps):
            waited = gap if index or pause is None else pause
            now, clock = now + waited, clock + max(waited, 0.0)
            position = np.array(goal) + (speed * index * DT if index else 0.0)
            request = asked("" if index else wrong, position, now, source)
            command = supervisor.step(
                seen("" if index else blind, arm, position, now), request, now, now if pressed else now - 9
            )
            times.append(clock)
            positions.append(command.position)
            arm = arm + (command.position - arm) * follows
    check(limits, times, positions)


@holds_for(st.data(), gate=4, full=25)
def test_no_point_of_the_arm_leaves_the_workspace(data):
    limits = so101(BOX)
    chain = kinematics.so101()
    supervisor = Supervisor(limits, chain)
    arm, positions, now = np.zeros(6), [], 0.0
    for _ in range(data.draw(st.integers(5, 25))):
        goal = [data.draw(st.floats(-2, 2)) for _ in range(6)]
        for _ in range(data.draw(st.integers(1, 8))):
            now += DT
            arm = supervisor.step(measured(arm, now), Request(np.array(goal), now, "policy"), now).position
            positions.append(arm)
    check_workspace(limits, chain, positions)
    check(limits, np.arange(len(positions)) * DT, positions)


def test_the_gripper_is_kept_off_the_arms_own_base_without_a_box():
    limits, chain, into_the_base = so101(), kinematics.so101(), [0.0, -0.7, 1.65, 1.6, 0.0, 0.0]
    commands = stream(Supervisor(limits, chain), [into_the_base] * 60, start=[0.0] * 6)
    assert commands[-1].reason == "workspace"
    check_apart(limits, chain, positions_of(commands))
    with pytest.raises(AssertionError, match="touch"):
        check_apart(limits, chain, [np.array(into_the_base)])


BOX = Box((-0.1, -0.25, -0.005), (0.42, 0.25, 0.3))


NARROW = Box((-0.1, -0.1, -0.005), (0.42, 0.1, 0.3))
STRAYED = st.tuples(*[st.floats(-0.45, 0.45)] * 5)  # within the lead, as the arm that is followed


@holds_for(
    STRAYED,
    st.lists(st.tuples(*[st.floats(-1.5, 1.5)] * 5), min_size=1, max_size=4),
    gate=5,
    full=40,
)
def test_an_arm_outside_its_workspace_is_led_inward_only(away, goals):
    """It sags, or somebody pushed it: the command is inside, and the arm keeps its distance from it."""
    limits, chain = so101(NARROW), kinematics.so101()
    supervisor, away = Supervisor(limits, chain), np.array([*away, 0.0])
    supervisor.step(measured(np.zeros(6), 0.0), None, 0.0)
    supervisor.step(measured(away / 2, DT * 4), None, DT * 4)
    command, positions, times = np.zeros(6), [np.zeros(6)], [0.0]
    for index in range(1, 10 * len(goals) + 1):
        now, goal = DT * (index + 8), np.array([*goals[(index - 1) // 10], 0.5])  # it strayed meanwhile
        command = supervisor.step(measured(command + away, now), Request(goal, now, "policy"), now).position
        positions.append(command)
        times.append(now)
    assert supervisor.stopped == ""
    out = outside(limits, chain, [position + away for position in positions[1:]])
    for before, after in zip(np.minimum.accumulate(out), out[1:], strict=False):
        if before <= 0.013:  # a centimetre is borne, over a margin of 2.5 mm
            break
        assert after <= before + 0.003, "the arm is outside and was led farther out"
    check_workspace(limits, chain, positions)
    check(limits, times, positions)


def strayed(goal):
    """The last command to an arm that is pushed out at its side, and asked to go to ``goal`` of its first joint."""
    limits, chain = so101(NARROW), kinematics.so101()
    supervisor, away = Supervisor(limits, chain), np.array([0.4, 0, 0, 0, 0, 0])
    command = np.zeros(6)
    supervisor.step(measured(command, 0.0), None, 0.0)
    supervisor.step(measured(away / 2, DT * 4), None, DT * 4)
    inside, away_from_it = outside(limits, chain, [command, command + away])
    assert inside < 0 < 0.02 < away_from_it
    for index in range(1, 8):
        now = DT * (index + 8)
        asked = Request(np.array([goal, 0, 0, 0, 0, 0]), now, "policy")
        last = supervisor.step(measured(command + away, now), asked, now)
        command = last.position
    return last


def test_an_arm_that_is_measured_outside_goes_in_and_not_out():
    assert strayed(-0.5).position[0] < -0.01
    farther_out = strayed(0.1)
    assert farther_out.position[0] == 0 and farther_out.reason == "workspace"


def followed(velocity, seconds, speed_is_measured=True, gap=DT):
    """A supervisor of an arm that moves at ``velocity`` [2] by itself for a while."""
    supervisor, limits = Supervisor(two_joints()), two_joints()
    for index in range(round(seconds / gap) + 1):
        now = gap * index
        position = np.array(velocity) * now
        supervisor.step(measured(position, now, velocity if speed_is_measured else None), None, now)
    assert (abs(position) < [joint.high for joint in limits.joints]).all()
    return supervisor


@pytest.mark.parametrize("speed_is_measured", [True, False])
def test_an_arm_that_is_measured_too_fast_for_a_while_is_stopped(speed_is_measured):
    fast = followed([0.0, 1.0], 0.2, speed_is_measured)  # the slow joint may do 0.5/s
    assert fast.stopped.startswith("slow moves at 1/s, faster than the 0.85/s")
    assert followed([0.0, 0.8], 0.3, speed_is_measured).stopped == ""  # a servo that catches up
    assert followed([0.0, 1.0], 0.14, speed_is_measured).stopped == ""  # a moment
    assert followed([0.0, 1.0], 0.16, speed_is_measured).stopped  # its first step counts, too
    fast.rearm(0.3)
    assert fast.stopped == "it is not where it was sent (slow is measured at 0.2, 0.2 away)"
    fast.rearm(1.0, [0.0, 0.2])
    fast.step(measured([0.0, 0.2], 1.0), None, 1.0)
    assert fast.stopped == ""


def test_moments_of_speed_do_not_add_up():
    supervisor = Supervisor(two_joints())
    for index in range(60):
        velocity = [0.0, 1.0 if index % 4 else 0.1]
        supervisor.step(measured([0.0, 0.0], DT * index, velocity), None, DT * index)
    assert supervisor.stopped == ""


@holds_for(
    st.lists(st.tuples(PLACE, PLACE, st.integers(1, 15)), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.05, 0.2]),
    gate=8,
    full=60,
)
def test_an_arm_that_does_what_it_is_sent_is_not_too_fast(goals, lag):
    supervisor = Supervisor(two_joints())
    stream(supervisor, [goal for *goal, steps in goals for _ in range(steps)], lag=lag)
    assert supervisor.stopped == ""


def test_the_jaw_does_not_open_into_the_table():
    limits, chain = so101(Box((-1.0, -1.0, 0.0), (1.0, 1.0, 1.0))), kinematics.so101()
    low_over_the_table = np.array([0.0, 0.93, 0.0, -1.01, 2.6, 0.0])
    opened = np.array([*low_over_the_table[:5], 1.0])
    commands = stream(Supervisor(limits, chain), [opened] * 40, start=low_over_the_table)
    assert commands[-1].reason == "workspace" and commands[-1].position[5] > 0.1
    check_workspace(limits, chain, positions_of(commands))


@holds_for(
    st.floats(1.51, 3.0),
    st.lists(st.sampled_from([-9.0, 9.0, 0.0, 1.4, 2.9]), min_size=10, max_size=60),
    gate=8,
    full=60,
)
def test_an_arm_outside_its_limits_moves_inward_only_and_slowly(start, goals):
    limits = two_joints()
    supervisor = Supervisor(limits)
    commands = stream(supervisor, [[goal, goal] for goal in goals], start=[start, 0.0])
    positions = positions_of(commands)
    check(limits, DT * np.arange(len(positions)), positions, inside=False)
    for before, after in itertools.pairwise(positions):
        if before[0] > 1.5:
            assert 0 <= before[0] - after[0] <= 0.1 * 3.0 * DT + 1e-9


@holds_for(st.floats(0.5, 3.0), st.floats(0, 1), st.booleans(), gate=6, full=60)
def test_a_request_that_runs_up_to_a_limit_is_braked_before_it(speed, phase, onward):
    limits = two_joints()
    path = -1 + speed * DT * (phase + np.arange(300))
    goals = [[place, 0.0] if onward or place <= 1.5 else None for place in path[: int(3 / speed / DT) + 20]]
    commands = stream(Supervisor(limits), goals, start=[-1.0, 0.0])
    check(limits, DT * np.arange(len(commands)), positions_of(commands))


@holds_for(st.floats(0.0, 0.5), st.floats(0, 2), st.sampled_from([-9.0, 9.0]), gate=10, full=60)
def test_a_late_step_finds_the_arm_braking_already(moving_for, gap, goal):
    limits = two_joints()
    supervisor, quick = Supervisor(limits), limits.joints[0]
    commands = stream(supervisor, [[goal, goal]] * (2 + int(moving_for / DT)))
    times = [*(DT * np.arange(len(commands))), DT * (len(commands) - 1) + gap]
    commands += carried_on(supervisor, commands, [None], later=gap - DT)
    check(limits, times, positions_of(commands))
    braking = quick.velocity**2 / (2 * quick.acceleration) + 0.05
    assert abs(commands[-1].position[0] - commands[-2].position[0]) <= braking + 2 * DT * quick.velocity


def test_a_gentle_stream_within_the_limits_passes_unchanged():
    """Gentle: with accelerations below a quarter of what the jerk limit builds up in a period."""
    times = DT * np.arange(220)
    path = np.stack([0.4 * np.sin(1.5 * times) ** 3, 0.2 + 0.04 * np.cos(times)], 1)
    supervisor = Supervisor(two_joints())
    commands = stream(supervisor, path, start=path[0], lag=0.05)
    for command, asked in zip(commands, path, strict=True):
        np.testing.assert_array_equal(command.position, asked)
        assert (command.source, command.reason) == ("policy", "") and not command.clipped.any()
    assert supervisor.counts == {"": 220} and not supervisor.clipped.any()


@holds_for(
    st.floats(-1, 1.5),
    st.floats(-0.2, 0.8),
    st.floats(-1, 1.5),
    st.floats(-0.2, 0.8),
    gate=7,
    full=60,
)
def test_a_request_within_the_limits_is_reached_soon_and_kept(quick, slow, first, second):
    limits = two_joints()
    goal = np.array([quick, slow])
    positions = positions_of(stream(Supervisor(limits), [goal] * 200, start=[first, second], lag=0.03))
    np.testing.assert_array_equal(positions[175:], [goal] * 25)
    for joint, path in zip(limits.joints, np.array(positions).T, strict=True):
        distance, name = abs(path[-1] - path[0]), joint.name
        ideal = distance / joint.velocity + joint.velocity / joint.acceleration + joint.acceleration / joint.jerk
        arrived = DT * int(np.argmax(abs(path - path[-1]) < 1e-6))
        assert arrived <= ideal + 10 * DT, f"{name} takes {arrived} s instead of {ideal} s"


def test_what_is_asked_for_stands_beside_what_is_sent():
    supervisor = Supervisor(two_joints())
    rate, joint_limit = stream(supervisor, [[0.5, 0.0], [9.0, 0.0]])
    assert rate.reason == "rate" and joint_limit.reason == "joint limit"
    np.testing.assert_array_equal(rate.requested, [0.5, 0.0])
    np.testing.assert_array_equal(joint_limit.requested, [9.0, 0.0])
    np.testing.assert_array_equal(rate.clipped, [True, False])
    assert supervisor.counts == {"rate": 1, "joint limit": 1}
    np.testing.assert_array_equal(supervisor.clipped, [2, 0])


def test_a_person_is_limited_like_a_policy_and_named():
    (command,) = stream(Supervisor(two_joints()), [[9.0, 9.0]], source="human")
    assert command.source == "human" and command.clipped.all()


def test_the_command_stays_near_an_arm_that_is_blocked():
    supervisor, lead = Supervisor(two_joints()), [joint.lead for joint in two_joints().joints]
    commands = stream(supervisor, [ONWARD] * 200, seen=lambda at: [0, 0])
    assert (np.abs(positions_of(commands)).max(0) <= lead).all() and commands[-1].reason == "lead"
    np.testing.assert_allclose(commands[-1].position, lead, atol=1e-9)


def test_a_held_arm_is_held_where_it_was_measured():
    supervisor = Supervisor(two_joints())
    command = stream(supervisor, [[0.5, 0.0]] * 60 + [None] * 140, seen=lambda at: [0.1, 0.0])[-1]
    assert command.source == "hold"
    np.testing.assert_allclose(command.position, [0.1, 0.0], atol=1e-9)


@pytest.mark.parametrize(
    ("measurement", "said"),
    [
        (measured([math.nan, 0], 1.0), "not finite"),
        (measured([0, 0], 1.0, velocity=[math.inf, 0]), "not finite"),
        (measured([0, 0, 0], 1.0), "another shape"),
        (measured([0, 0], 0.7), "stale"),
        (measured([0, 0], 1.1), "from the future"),
        (measured([0, 0], math.nan), "from the future"),
        (measured([0, 0], 0.9), "older"),
        (measured([0.5, 0], 1.0), "jumped"),
        *((Measurement(odd, None, 1.0), "the measurement") for odd in (None, ["x", "y"], [1j, 0], [10**400, 0], 1.0)),
    ],
)
def test_a_measurement_that_cannot_be_stops_the_arm(measurement, said):
    supervisor = Supervisor(two_joints())
    supervisor.step(measured([0, 0], 0.98), None, 0.98)
    command = supervisor.step(measurement, Request(np.array([0.1, 0.0]), 1.0, "policy"), 1.0)
    assert said in supervisor.stopped and command.reason == "stopped"
    np.testing.assert_array_equal(command.position, [0, 0])


def test_a_missing_measurement_is_borne_for_the_age_of_one():
    supervisor = Supervisor(two_joints(max_age=0.1))
    supervisor.step(measured([0, 0], 0.0), None, 0.0)
    assert supervisor.step(None, Request(np.array([0.1, 0]), 0.1, "policy"), 0.1).source == "policy"
    assert supervisor.step(None, Request(np.array([0.1, 0]), 0.12, "policy"), 0.12).reason == "stopped"
    assert "stale" in supervisor.stopped


def test_without_any_measurement_there_is_no_command():
    with pytest.raises(ContractError, match="first measurement is missing"):
        Supervisor(two_joints()).step(None, None, 0.0)
    with pytest.raises(ContractError, match="first measurement is not finite"):
        Supervisor(two_joints()).step(measured([math.nan, 0], 0.0), None, 0.0)


def test_the_watchdog_brings_the_arm_to_rest_within_its_time():
    limits = two_joints(watchdog=0.2)
    supervisor, commands = moving(limits)
    more = carried_on(supervisor, commands, [None] * 60)
    sources = [command.source for command in more]
    assert sources[:10] == ["policy"] * 10 and sources[10] == "safety" and more[10].reason == "watchdog"
    stopping = max(joint.velocity / joint.acceleration + joint.acceleration / joint.jerk for joint in limits.joints)
    still = 11 + math.ceil(stopping / DT)
    assert set(sources[still:]) == {"hold"}
    np.testing.assert_array_equal(positions_of(more[still:]), [more[-1].position] * len(more[still:]))
    commands += more
    check(limits, DT * np.arange(len(commands)), positions_of(commands))
    assert carried_on(supervisor, commands, [ONWARD])[0].source == "policy"


def test_a_stop_is_latched_until_a_person_re_arms():
    limits = two_joints()
    supervisor, commands = moving(limits)
    supervisor.stop("the person said so")
    supervisor.stop("something else")
    stopped = carried_on(supervisor, commands, [ONWARD] * 100)
    assert {command.reason for command in stopped} == {"stopped"} and stopped[-1].source == "hold"
    assert supervisor.stopped == "the person said so"
    np.testing.assert_array_equal(stopped[-1].position, stopped[-20].position)
    commands += stopped
    now = DT * len(commands)
    supervisor.rearm(now - DT / 2)
    (refused,) = carried_on(supervisor, commands, [Request(np.array(ONWARD), now - DT * 3 / 4, "human")])
    assert (refused.source, refused.reason) == ("hold", "before re-arming")
    np.testing.assert_array_equal(refused.position, stopped[-1].position)
    moved = carried_on(supervisor, [*commands, refused], [ONWARD] * 20)
    assert moved[0].source == "policy" and moved[-1].position[0] > stopped[-1].position[0]
    commands += [refused, *moved]
    check(limits, DT * np.arange(len(commands)), positions_of(commands))


def test_what_was_followed_before_a_stop_is_forgotten():
    supervisor, commands = moving(two_joints(watchdog=2.0))
    supervisor.stop("stop")
    supervisor.rearm(9 * DT)
    assert carried_on(supervisor, commands, [None])[0].source == "safety"


def test_re_arming_in_the_past_is_refused():
    supervisor, _ = moving(two_joints())
    for time in (9 * DT - 0.1, math.nan):
        with pytest.raises(ContractError, match="Re-arming"):
            supervisor.rearm(time)


def test_a_released_deadman_switch_brings_the_arm_to_rest():
    supervisor = Supervisor(two_joints(deadman=True, watchdog=0.1))
    commands = stream(supervisor, [None, ONWARD])
    assert commands[-1].reason == "deadman" and (commands[-1].position == 0).all()
    commands += carried_on(supervisor, commands, [ONWARD] * 10, deadman=lambda at: at - 0.05)
    assert commands[-1].source == "policy" and commands[-1].position[0] > 0.01
    released = carried_on(supervisor, commands, [ONWARD] * 60, deadman=lambda at: 11 * DT)
    assert [command.source for command in released[:6]] == ["policy"] * 5 + ["safety"]
    assert released[-1].source == "hold" and released[-1].reason == "deadman"
    commands += released
    for never in (math.nan, math.inf):
        commands += carried_on(supervisor, commands, [ONWARD], deadman=lambda at, never=never: never)
        assert commands[-1].reason == "deadman"


def test_a_clock_that_runs_backwards_stops_the_arm():
    for time in (0.01, math.nan):
        supervisor, commands = moving(two_joints())
        command = supervisor.step(measured(commands[-1].position, 0.01), None, time)
        assert "clock" in supervisor.stopped and command.reason == "stopped"
        np.testing.assert_array_equal(command.position, commands[-1].position)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(np.array([math.nan, 0]), 1.0, "policy"), "not finite"),
        (Request(np.array([0, -math.inf]), 1.0, "policy"), "not finite"),
        (Request(np.array([0.0, 0]), math.nan, "policy"), "not finite"),
        (Request(np.array([0.0]), 1.0, "policy"), "shape"),
        (Request(np.array([[0.0, 0.0]]), 1.0, "policy"), "shape"),
        (Request(np.array(["far", "near"]), 1.0, "policy"), "shape"),
        *((Request(odd, 1.0, "policy"), "shape") for odd in ([10**400, 0], np.array([9j, 0]), ["1", "0"], None)),
        *((Request(np.zeros(2), odd, "policy"), "not finite") for odd in ("now", None)),
        *((Request(np.zeros(2), 1.0, odd), "source") for odd in ("nobody", ["policy"], None)),
        (Request(np.array([0.0, 0]), 0.79, "policy"), "stale"),
        (Request(np.array([0.0, 0]), 1.01, "policy"), "from the future"),
        (Request(np.array([0.0, 0]), 0.9, "policy"), "out of order"),
    ],
)
def test_a_refused_request_is_counted_and_the_last_is_followed(request_, reason):
    supervisor = Supervisor(two_joints())
    supervisor.step(measured([0, 0], 0.78), None, 0.78)
    stamp = 0.9 if reason == "out of order" else 0.75
    supervisor.step(measured([0, 0], 0.9), Request(np.array([0.5, 0.2]), stamp, "policy"), 0.9)
    before = supervisor.step(measured([0, 0], 0.98), None, 0.98)
    command = supervisor.step(measured([0, 0], 1.0), request_, 1.0)
    assert command.reason == reason and supervisor.counts[reason] == 1
    assert command.source == "policy" and (command.position > before.position).all()
    assert command.clipped.all() and command.requested.shape == (2,)


# -- motions of one joint, against brute force

RATES = RateBounds(2.0, 10.0, 200.0)


@st.composite
def motions(draw):
    """Motions from which braking stays within the rates."""
    acceleration = draw(st.floats(-10, 10))
    room = 2.0 - acceleration**2 / 400
    velocity = draw(st.floats(-room, room)) - (acceleration * abs(acceleration) / 400) * draw(st.floats(0, 1))
    return Motion(draw(st.floats(-1, 1)), max(min(velocity, 2.0), -2.0), acceleration)


@st.composite
def courses(draw):
    return Course(draw(motions()), draw(st.floats(-2, 2)), draw(st.floats(0, 0.1)), RATES)


@holds_for(motions(), st.floats(-2, 2), gate=10, full=60)
def test_a_velocity_is_reached_at_rest_and_within_the_rates(motion, goal):
    phases = to_velocity(motion, goal, RATES)
    end = motion
    for duration, jerk in phases:
        assert duration >= 0 and abs(jerk) <= 200.0
        end = end.after(duration, jerk)
        assert abs(end.acceleration) <= 10.0 + 1e-9
    assert end.velocity == pytest.approx(goal, abs=1e-9) and end.acceleration == pytest.approx(0, abs=1e-6)


@holds_for(courses(), gate=10, full=60)
def test_the_extent_of_a_course_is_that_of_its_positions(course):
    times = np.linspace(0, course.lasts() + 0.1, 2000)
    positions = course.positions(times)
    np.testing.assert_allclose(positions, [course.at(time).position for time in times.tolist()], atol=1e-12)
    np.testing.assert_allclose(course.extent(), (positions.min(), positions.max()), atol=1e-5)
    speeds = abs(np.diff(positions)) / np.diff(times)
    assert speeds.max() <= course.fastest() + 1e-9


@holds_for(courses(), st.floats(-2, 2), gate=10, full=60)
def test_a_larger_goal_is_nowhere_behind(course, goal):
    low, high = (course._replace(goal=value) for value in sorted((course.goal, goal)))
    times = np.linspace(0, 1.5, 200)
    assert (low.positions(times) <= high.positions(times) + 1e-9).all()


@holds_for(motions(), st.floats(0, 0.5), st.floats(0, 0.5), gate=10, full=60)
def test_braking_goes_on_along_the_same_path(motion, first, second):
    at_once = run(motion, to_velocity(motion, 0.0, RATES), 0.0, first + second)
    between = run(motion, to_velocity(motion, 0.0, RATES), 0.0, first)
    again = run(between, to_velocity(between, 0.0, RATES), 0.0, second)
    np.testing.assert_allclose(again, at_once, atol=1e-6)


def test_a_moving_target_is_followed_beside_it_without_overshoot():
    joint, motion, target = JointBounds(RATES, -9.0, 9.0), Motion(0.0, 0.0, 0.0), 0.5
    for _ in range(100):
        target += 0.02 * 0.8
        motion = steer(joint, motion, target, 0.8, 0.02, 0.04).at(0.02)
        assert motion.position <= target + 1e-9
    assert motion == pytest.approx((target, 0.8, 0.0), abs=1e-6)


def test_the_slowest_joint_sets_the_time_and_all_arrive_together():
    way = ramp(np.array([0.0, 1.0]), np.array([0.4, 0.9]), np.array([1.0, 0.5]), 0.1)
    np.testing.assert_allclose(way, [[0.1, 0.975], [0.2, 0.95], [0.3, 0.925], [0.4, 0.9]], atol=1e-12)


def test_a_way_of_a_fraction_of_steps_is_slower_not_faster():
    start, goal, velocity = np.array([0.0]), np.array([0.25]), np.array([1.0])
    way = ramp(start, goal, velocity, 0.1)
    assert len(way) == 3 and np.diff(way[:, 0], prepend=0.0).max() <= 0.1
    assert way[-1, 0] == 0.25


@pytest.mark.parametrize("goal", [0.3, 0.3 + 1e-12])
def test_an_arm_that_is_there_already_gets_one_step(goal: float):
    way = ramp(np.array([0.3]), np.array([goal]), np.array([1.0]), 0.02)
    assert way.tolist() == [[goal]]
