"""The supervisor with sensors, clocks and callers that are wrong: no command leaves the limits because of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st

from robot_drivers.driver import Measurement
from robot_drivers.executor import Executor, OpenLoop
from robot_drivers.record import Decision, HumanInput
from robot_drivers.safety import Request, Supervisor
from robot_drivers.simulated import VirtualClock
from tests.robot_drivers.arms import DT, LIMITS, ToyArm, measured, two_joints
from tests.robot_drivers.checking import check, holds_for
from tests.robot_drivers.test_safety import carried_on, moving, positions_of, stream
from vla_rl.contract.errors import ContractError


def drifts(measure, goal=0.0, seconds=4.0, confirm=False):
    """The quick joint is asked to go to ``goal`` and measured at ``measure(time, command)``: supervisor and commands.

    A person re-arms it every half second, and with ``confirm`` says that it is where it is measured.
    """
    limits, commands, times = two_joints(), [np.zeros(2)], [0.0]
    supervisor = Supervisor(limits)
    supervisor.step(measured(np.zeros(2), 0.0), None, 0.0)
    for index in range(1, round(seconds / DT)):
        now = DT * index
        seen = np.asarray(measure(now, commands[-1]), np.float64)
        if index % 25 == 0:
            supervisor.rearm(now, seen if confirm and np.isfinite(seen).all() else None)
        request = Request(np.array([goal, 0.0]), now, "policy") if index % 100 < 80 else None
        commands.append(supervisor.step(measured(seen, now), request, now).position)
        times.append(now)
    check(limits, times, commands)
    return supervisor, np.array(commands)


WRONG = ["drift", "jump", "stuck", "swapped", "noisy", "nan", "late"]


def sensor(kind, size):
    """What a sensor that is wrong in this way says at a time of an arm that is where it was sent."""
    generator, told = np.random.default_rng(0), []

    def measure(now, command):
        told.append(np.array(command))
        return {
            "drift": command + np.array([size * now, 0.0]),
            "jump": command + np.array([size if now > 1 else 0.0, 0.0]),
            "stuck": np.zeros(2),
            "swapped": command[::-1],
            "noisy": command + 0.1 * size * generator.standard_normal(2),
            "nan": command * (np.nan if 1 < now < 2 else 1),
            "late": told[max(0, len(told) - 1 - round(abs(size)))],
        }[kind]

    return measure


@holds_for(st.sampled_from(WRONG), st.floats(-8, 8), st.floats(-2, 2), st.booleans(), st.booleans(), gate=8, full=30)
def test_no_wrong_sensor_takes_a_command_out_of_the_limits(kind, size, goal, confirm, still):
    drifts(sensor(kind, size), goal, 1.5 if still else 3.0, confirm)


@holds_for(
    st.sampled_from(WRONG),
    st.floats(-8, 8),
    st.floats(-3, 3),
    st.sampled_from(["policy", "leader", "steering"]),
    st.sampled_from([0, 0, 30, 45]),  # control steps between two times that a person says that it is there; 0: never
    st.sampled_from([0.0, 0.0, 2.3, -2.5]),  # where it begins, of -2 to 2
    st.booleans(),  # whether what is asked for moves
    gate=6,
    full=25,
)
@example("jump", -2.0, -2.0, "policy", 30, -2.5, False)
def test_no_wrong_sensor_leads_farther_out_whoever_drives(kind, size, goal, driven, confirm, start, moves):
    """A policy or a person at a leader or a gamepad drives in mid-episode and presses "rearm"; somebody looks at it."""
    clock = VirtualClock()
    arm = WrongArm(clock, sensor(kind, size))
    arm.position[0] = start
    executor = Executor(arm, Supervisor(LIMITS), OpenLoop())
    executor.begin(1, 10_000)
    for index in range(140):
        now = clock.now = index * DT
        seen = executor.measure(now).position
        executor.alive(now, now)
        asked = goal * (math.cos(index / 7) if moves else 1.0)
        leads, steers = driven == "leader" and index > 20, driven == "steering" and index > 20
        place = np.array([asked, 0.5]) if leads else None
        speed = np.array([10 * asked, 0.0]) if steers else None
        executor.human(HumanInput(now, leads or steers, place, speed, ("rearm",) if index % 25 == 24 else ()), now)
        if confirm and index % confirm == confirm - 1 and np.isfinite(seen).all():
            executor.rearm(now, seen)
        executor.decided(Decision(np.full((8, 2), [asked, 0.5])), executor.step)
        executor.act(now)
    assert len(arm.commands) == 140
    check(LIMITS, DT * np.arange(140), arm.commands, inside=start == 0.0)


class WrongArm(ToyArm):
    """Is where it was sent and says something else; what it says of its beginning is true."""

    def __init__(self, clock, measure):
        super().__init__(clock)
        self._measure = measure

    def observe(self):
        position = self._measure(self._clock(), self.position) if self.commands else self.position.copy()
        return Measurement(np.asarray(position, np.float64), None, self._clock())


def test_an_arm_on_its_way_back_does_not_turn_to_what_moves_out():
    out = 1.4623175 + 0.0368072 * np.sin(28.0792984 * DT * np.arange(1, 25) + 4.3095178)  # it passes the limit of 1.5
    goals = [None, *np.stack([out, np.full(24, 0.3)], 1)]
    commands = stream(Supervisor(two_joints()), goals, start=[1.5297287, 0.3], source="human")
    check(two_joints(), DT * np.arange(25), positions_of(commands), inside=False)


@pytest.mark.parametrize("rate", [1.0, -4.0])
def test_a_drifting_sensor_leads_the_command_to_the_limit(rate):
    commands = stream(Supervisor(two_joints()), [[0, 0]] * 120, seen=lambda at: [rate * at, 0])
    check(two_joints(), DT * np.arange(120), positions_of(commands))
    assert commands[-1].position[0] == pytest.approx(1.5 if rate > 0 else -1.0)


@pytest.mark.parametrize("turns", [1, -1])
def test_an_encoder_that_jumps_by_a_turn_is_not_believed(turns):
    supervisor, commands = drifts(
        lambda now, command: command + np.array([2 * np.pi * turns * (now > 1), 0.0]), seconds=4.0
    )
    assert "not where it was sent" in supervisor.stopped or "jumped" in supervisor.stopped
    np.testing.assert_array_equal(commands[-1], commands[60])
    for nonsense in ([0.0], [np.nan, 0.0], "here"):
        with pytest.raises(ContractError, match="it stays stopped"):
            supervisor.rearm(5.0, nonsense)


@pytest.mark.parametrize("register", [None, [0.0, 0.0]])
def test_a_stuck_register_does_not_hide_how_fast_the_arm_moves(register):
    supervisor = Supervisor(two_joints())
    for index in range(15):
        now = DT * index
        supervisor.step(measured([0.0, 1.0 * now], now, register), None, now)
    assert supervisor.stopped.startswith("slow moves at 1/s")


def test_what_a_caller_writes_into_its_arrays_changes_nothing():
    supervisor, arm, asked, speed = Supervisor(two_joints()), np.zeros(2), np.array([0.5, 0.2]), np.zeros(2)
    other, positions = Supervisor(two_joints()), []
    for index in range(5):
        now, asked[:] = DT * index, [0.5, 0.2]
        request = Request(asked, now, "policy") if index == 1 else None
        positions.append(supervisor.step(Measurement(arm, speed, now), request, now).position)
        arm[:], asked[:], speed[:] = math.nan, math.nan, math.nan
        fresh = Request(np.array([0.5, 0.2]), now, "policy") if index == 1 else None
        np.testing.assert_array_equal(positions[-1], other.step(measured([0, 0], now, [0, 0]), fresh, now).position)
        arm[:], speed[:] = 0.0, 0.0
    assert positions[-1][0] > 0 and supervisor.stopped == other.stopped == ""


@pytest.mark.parametrize("step", [-3600.0, 3600.0, 1.1])
def test_a_clock_that_steps_stops_the_arm_and_hides_nothing(step):
    supervisor, now = Supervisor(two_joints()), 5000.0
    supervisor.step(measured([0, 0], now), None, now)
    supervisor.step(measured([0, 0], now), Request(np.array([0.1, 0.1]), now, "policy"), now)
    now += step
    supervisor.step(measured([0, 0], now), None, now)
    assert ("backwards" if step < 0 else f"nobody controlled the arm for {step:.1f} s") in supervisor.stopped
    supervisor.rearm(now)
    for index in range(1, 20):
        asked = Request(np.array([0.0, 0.0]), now + DT * index, "policy")
        command = supervisor.step(measured([0, 0], now + DT * index, [0, 0.9]), asked, now + DT * index)
        assert command.source == "policy" or index > 7
    assert supervisor.stopped.startswith("slow moves at 0.9/s")


def test_a_pause_that_the_watchdog_bears_is_no_gap():
    supervisor, commands = moving(two_joints())
    carried_on(supervisor, commands, [None], later=0.9 - DT)
    assert "nobody" not in supervisor.stopped


def test_an_arm_that_is_pushed_is_held_where_it_was_pushed_to():
    def pushed(at):  # over the lead of .6
        return [0.7 * float(np.clip((at / DT - 20) / 60, 0, 59 / 60)), 0]

    command = stream(Supervisor(two_joints()), [None] * 400, seen=pushed)[-1]
    np.testing.assert_allclose(command.position, pushed(8.0), atol=0.11)
    assert command.position[0] > 0.5
