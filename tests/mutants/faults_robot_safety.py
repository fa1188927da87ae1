"""Faults in the limits of an arm, its kinematics and the supervisor."""

from __future__ import annotations

from tests.mutants.fault import Fault

_MOTION, _LIMITING, _SAFETY, _WORKSPACE, _LIMITS, _KINEMATICS = (
    f"robot_drivers/{name}.py" for name in ("motion", "limiting", "safety", "workspace", "limits", "kinematics")
)
_ON = "tests/robot_drivers/test_safety.py::"
_ANY = f"{_ON}test_no_command_violates_a_limit"
_RUNS_UP = f"{_ON}test_a_request_that_runs_up_to_a_limit_is_braked_before_it"
_LATCHED = f"{_ON}test_a_stop_is_latched_until_a_person_re_arms_and_requests_are_fresh"
_REFUSED = f"{_ON}test_a_refused_request_is_counted_and_the_one_before_is_followed"
_IMPOSSIBLE = f"{_ON}test_a_measurement_that_cannot_be_stops_the_arm"

_TOO_FAST = f"{_ON}test_an_arm_that_is_measured_too_fast_for_a_while_is_stopped"
_WRONG = "tests/robot_drivers/test_wrong_sensors.py::"
_OVERSPEED = "robot_drivers/overspeed.py"

FAULTS = (
    Fault(
        "an arm that is measured outside its workspace is led farther out",
        _WORKSPACE,
        "if there > STRAY and not",
        "if there > 1e9 and not",
        (
            f"{_ON}test_an_arm_that_is_measured_outside_its_workspace_is_led_inward_only",
            f"{_ON}test_an_arm_that_is_measured_outside_goes_in_and_not_out",
        ),
    ),
    Fault(
        "an arm that is measured outside its workspace is not let in",
        _WORKSPACE,
        "not _inward_only(self.outside(path + lag)):",
        "self.outside(path + lag).max() > 0:",
        (f"{_ON}test_an_arm_that_is_measured_outside_goes_in_and_not_out",),
    ),
    Fault(
        "nobody looks how fast the arm is measured to move",
        _SAFETY,
        "            self.stop(fast)",
        "            pass",
        (_TOO_FAST,),
    ),
    Fault(
        "only robots that measure it are looked at for their speed",
        _OVERSPEED,
        "velocity = (measurement.position - before.position) / (measurement.captured - before.captured)",
        "velocity = np.zeros_like(measurement.position)",
        (_TOO_FAST,),
    ),
    Fault(
        "one moment of speed stops the arm",
        _OVERSPEED,
        "measurement.captured - self._since > LASTS",
        "measurement.captured - self._since > 0",
        (_TOO_FAST,),
    ),
    Fault(
        "moments of speed add up",
        _OVERSPEED,
        "np.minimum(self._since, before.captured), np.inf)",
        "np.minimum(self._since, before.captured), self._since)",
        (f"{_ON}test_moments_of_speed_do_not_add_up",),
    ),
    Fault(
        "an arm at its limit of speed is stopped",
        _OVERSPEED,
        "SHARE * joint.velocity + NOISE * (joint.high - joint.low)",
        "0.5 * joint.velocity",
        (f"{_ON}test_an_arm_that_does_what_it_is_sent_is_not_too_fast",),
    ),
    Fault(
        "nobody looks where braking ends",
        _MOTION,
        "return low <= below and above <= high",
        "return True",
        (_RUNS_UP,),
    ),
    Fault(
        "a joint accelerates beyond its limit",
        _MOTION,
        "peak = min(math.sqrt(max(jerk * gain + already * already / 2, least)), rates.acceleration)",
        "peak = math.sqrt(max(jerk * gain + already * already / 2, least))",
        (_ANY,),
    ),
    Fault(
        "acceleration is taken back twice as fast as the jerk limit allows",
        _MOTION,
        "(peak / jerk, -sign * jerk)",
        "(peak / (2 * jerk), -2 * sign * jerk)",
        (_ANY,),
    ),
    Fault(
        "a late step goes on at full speed",
        _MOTION,
        "span = joint.rates, min(dt, longest)",
        "span = joint.rates, dt",
        (f"{_ON}test_a_late_step_finds_the_arm_braking_already",),
    ),
    Fault(
        "the turning point of a motion is not looked at",
        _MOTION,
        "turns = (0.0, *_turns(self.start, self.jerk, self.time), self.time)",
        "turns = (0.0, self.time)",
        (_ANY, "tests/robot_drivers/test_motion.py::test_the_extent_of_a_course_is_that_of_its_positions"),
    ),
    Fault(
        "gentle requests are smoothed",
        _MOTION,
        "and abs(exact - drift) <= rates.acceleration * dt / 2",
        "and abs(exact - drift) < 0",
        (f"{_ON}test_a_gentle_stream_within_the_limits_passes_unchanged",),
    ),
    Fault(
        "what can be reached at once need not be safe",
        _MOTION,
        "and safe(exact)",
        "and drift == drift",
        (_RUNS_UP,),
    ),
    Fault(
        "the command may be anywhere",
        _LIMITING,
        "near, far = measured - joint.lead, measured + joint.lead",
        "near, far = joint.low, joint.high",
        (f"{_ON}test_the_command_stays_near_an_arm_that_is_blocked",),
    ),
    Fault(
        "an arm outside its limits hurries back",
        _LIMITING,
        "rates = _rates(joint, RECOVERY if outside else speed)",
        "rates = _rates(joint, speed)",
        (f"{_ON}test_an_arm_outside_its_limits_moves_inward_only_and_slowly",),
    ),
    Fault(
        "the last goal is held for ever",
        _LIMITING,
        "held = state.measured  # come to rest",
        "held = state.position  # come to rest",
        (f"{_ON}test_a_held_arm_is_held_where_it_was_measured_and_not_at_the_last_goal",),
    ),
    Fault(
        "clips are not counted",
        _SAFETY,
        "self.clipped += command.clipped",
        "self.clipped += 0 * command.clipped",
        (f"{_ON}test_what_is_asked_for_stands_beside_what_is_sent",),
    ),
    Fault(
        "the watchdog sleeps",
        _SAFETY,
        "if self._now - self._accepted > self.limits.watchdog:",
        "if self._now - self._accepted > 10 * self.limits.watchdog:",
        (f"{_ON}test_the_watchdog_brings_the_arm_to_rest_within_its_time",),
    ),
    Fault(
        "a stop ends with the next request",
        _SAFETY,
        "self._stamps[request.source] = float(request.stamp)",
        'self._stamps[request.source], self.stopped = float(request.stamp), ""',
        (_LATCHED,),
    ),
    Fault(
        "queued requests are followed after re-arming",
        _SAFETY,
        "if request.stamp <= self._armed:",
        "if request.stamp <= -math.inf:",
        (_LATCHED,),
    ),
    Fault(
        "what was followed before a stop is followed after it",
        _SAFETY,
        "self._followed, self._armed = None, now",
        "self._armed = now",
        (f"{_ON}test_what_was_followed_before_a_stop_is_not_followed_after_it",),
    ),
    Fault(
        "a NaN is passed on",
        _SAFETY,
        "if not (np.isfinite(asked).all() and is_number(request.stamp)):",
        "if not is_number(request.stamp):",
        (_REFUSED,),
    ),
    Fault(
        "an old request is fresh",
        _SAFETY,
        'return "stale" if self._now - request.stamp > self.limits.max_age else ""',
        'return ""',
        (_REFUSED,),
    ),
    Fault(
        "requests may come in any order",
        _SAFETY,
        "if request.stamp <= self._stamps[request.source]:",
        "if request.stamp < self._stamps[request.source]:",
        (_REFUSED,),
    ),
    Fault(
        "an arm may jump",
        _SAFETY,
        "<= np.add(reach, noise)).all():",
        "<= np.add(reach, noise)).any():",
        (_IMPOSSIBLE,),
    ),
    Fault(
        "an old measurement is good enough",
        _SAFETY,
        "if not self._now - captured <= self.limits.max_age:",
        "if not self._now - captured <= 9 * self.limits.max_age:",
        (_IMPOSSIBLE,),
    ),
    Fault(
        "a deadman switch may be pressed in the future",
        _SAFETY,
        "0 <= self._now - deadman_at <= self.limits.watchdog",
        "self._now - deadman_at <= self.limits.watchdog",
        (f"{_ON}test_a_released_deadman_switch_brings_the_arm_to_rest",),
    ),
    Fault(
        "a clock that runs backwards is no reason to stop",
        _SAFETY,
        'self.stop("the clock ran backwards")',
        "pass",
        (f"{_ON}test_a_clock_that_runs_backwards_stops_the_arm",),
    ),
    Fault(
        "points of the arm have no thickness",
        _WORKSPACE,
        "self._moved, thick = moved, radii[moved, None] + SLACK",
        "self._moved, thick = moved, SLACK",
        (f"{_ON}test_no_point_of_the_arm_leaves_the_workspace",),
    ),
    Fault(
        "the arm brakes through the wall of its workspace",
        _WORKSPACE,
        "path = _path([_slower(course, share) for course in courses_of_chain])",
        "path = _path([_slower(course, share) for course in courses_of_chain])[:1]",
        (f"{_ON}test_no_point_of_the_arm_leaves_the_workspace",),
    ),
    Fault(
        "the gripper may strike the arm's own base",
        _WORKSPACE,
        "np.maximum(worst, (self._apart - distances).max(1))",
        "np.maximum(worst, -np.ones(len(distances)))",
        (f"{_ON}test_the_gripper_is_kept_off_the_arms_own_base_without_a_box",),
    ),
    Fault(
        "the moving jaw stays closed",
        _KINEMATICS,
        "np.asarray(angles, np.float64) * self._turns",
        "np.asarray(angles, np.float64) * (self._turns == 1)",
        (f"{_ON}test_the_jaw_does_not_open_into_the_table",),
    ),
    Fault(
        "quarter speed is full speed",
        _LIMITS,
        "velocity=speed * joint.velocity)",
        "velocity=joint.velocity)",
        ("tests/robot_drivers/test_limits.py::test_quarter_speed_slows_and_brakes_as_before",),
    ),
    *(
        Fault(
            f"a file's limits are not compared with the hardware: {what}",
            _LIMITS,
            old,
            new,
            (
                "tests/robot_drivers/test_config.py::test_limits_are_never_wider_than_what_the_driver_says_of_its_hardware",
            ),
        )
        for what, old, new in (
            ("low", "if joint.low < hardware.low - rounding else []", "if False else []"),
            ("high", "if joint.high > hardware.high + rounding else []", "if False else []"),
            ("rates", "name: getattr(hardware, name) for name", "name: 1e9 for name"),
            ("lead and fastest", 'most |= {"lead": lead, "fastest": hardware.velocity}', "most |= {}"),
            ("control rate", "abs(self.control_hz - spec.control_hz) > 1e-3 * spec.control_hz", "False"),
        )
    ),
    Fault(
        "the control process believes limits that it is given",
        "robot_drivers/control.py",
        "limits.check_hardware(driver.spec)",
        "limits.joints",
        ("tests/robot_drivers/test_control.py::test_what_does_not_fit_is_refused_before_anything_moves",),
    ),
    Fault(
        "an arm in degrees is driven",
        "robot_drivers/driver.py",
        "if far > farthest:",
        "if far > 1e9:",
        ("tests/robot_drivers/test_config.py::test_a_driver_states_limits_that_an_arm_can_have",),
    ),
    *(
        Fault(what, file, old, new, (test,))
        for what, file, old, new, test in (
            (
                "a wrong sensor takes the command out of its limits",
                _LIMITING,
                "edge = min(near, highest) if near > joint.high else max(far, lowest)",
                "edge = near if near > joint.high else far",
                f"{_WRONG}test_a_sensor_that_drifts_away_leads_the_command_to_the_limit_at_most",
            ),
            (
                "a command on its way back inside turns where the measurement jumps",
                _LIMITING,
                "rest = Course(start, 0.0, 0.0, rates).legs()[-1].end.position if outside else start.position",
                "rest = start.position",
                f"{_WRONG}test_no_wrong_sensor_takes_a_command_farther_out_whoever_drives_and_re_arms",
            ),
            (
                "a command on its way back inside turns to meet what moves out",
                _LIMITING,
                "follows = target == goal and not outside",
                "follows = target == goal",
                f"{_WRONG}test_an_arm_on_its_way_back_does_not_turn_to_meet_what_moves_out",
            ),
            (
                "the longer nothing was believed, the farther an arm may have jumped",
                _SAFETY,
                "time = min(captured - self._captured, STEPS / self.limits.control_hz)",
                "time = captured - self._captured",
                f"{_WRONG}test_an_encoder_that_jumps_by_a_turn_is_not_believed_until_a_person_says_so",
            ),
            (
                "an arm that is not where it was sent is re-armed",
                _SAFETY,
                'if self._elsewhere else ""',
                'if False else ""',
                _TOO_FAST,
            ),
            (
                "a stuck register is believed",
                _OVERSPEED,
                "np.where(np.abs(said) > np.abs(velocity), said, velocity)",
                "said",
                f"{_WRONG}test_a_stuck_register_does_not_hide_how_fast_the_arm_moves",
            ),
            (
                "a request is followed in its owner's array",
                "robot_drivers/driver.py",
                'found = np.array(array, np.float64) if array.dtype.kind in "iuf" else None',
                'found = np.asarray(array, np.float64) if array.dtype.kind in "iuf" else None',
                f"{_WRONG}test_what_a_caller_writes_into_its_arrays_afterwards_changes_nothing",
            ),
            (
                "an hour that passed in one step is nothing",
                _SAFETY,
                "if elapsed > GAP:",
                "if False:",
                f"{_WRONG}test_a_clock_that_steps_stops_the_arm_and_hides_nothing_afterwards",
            ),
            (
                "after a clock was set back nobody is listened to",
                _SAFETY,
                "{source: min(stamp, self._now) for source, stamp in self._stamps.items()}",
                "{source: stamp for source, stamp in self._stamps.items()}",
                f"{_WRONG}test_a_clock_that_steps_stops_the_arm_and_hides_nothing_afterwards",
            ),
            (
                "an arm pushed away by one joint pushes back",
                _LIMITING,
                "> [joint.lead for joint in joints]).any()",
                "> [joint.lead for joint in joints]).all()",
                f"{_WRONG}test_an_arm_that_is_pushed_by_one_joint_is_held_where_it_was_pushed_to",
            ),
        )
    ),
    Fault(
        "joints turn the wrong way",
        _KINEMATICS,
        "np.eye(3) + sine * cross + (1 - cosine) * square",
        "np.eye(3) - sine * cross + (1 - cosine) * square",
        ("tests/robot_drivers/test_kinematics.py::test_points_are_where_mujoco_puts_them",),
    ),
)
