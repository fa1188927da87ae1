"""Faults in what `vla-rl robot` asks, reads and finds out about an arm."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CHECK, _CONFIG, _SETUP, _DIALOGUE, _DEVICES = (
    f"robot_drivers/{name}.py" for name in ("check", "config", "setup", "dialogue", "devices")
)
_CHECK_DEVICES, _BUDGET = "robot_drivers/check_devices.py", "robot_drivers/budget.py"
_PERSON = "tests/robot_drivers/test_check.py::test_a_teleoperator_that_does_not_fit_is_found"
_LATENCY = "tests/robot_drivers/test_check.py::test_the_latency_is_counted_in_control_steps"
_ON_SETUP = "tests/robot_drivers/test_setup.py::"
_ON_CHECK, _ON_CONFIG = "tests/robot_drivers/test_check.py::", "tests/robot_drivers/test_config.py::"
_FOUND = f"{_ON_CHECK}test_what_is_wrong_is_found"
_REFUSED = f"{_ON_CONFIG}test_what_is_unknown_or_missing_is_refused"

FAULTS = (
    Fault(
        "a check of an arm goes on without a calibration",
        _CHECK,
        "if not calibration.good:",
        "if False:",
        (f"{_ON_CHECK}test_an_arm_without_calibration_is_told_how_to_get_one",),
    ),
    Fault(
        "a check takes an arm outside its limits for good",
        _CHECK,
        "if not joint.low <= value <= joint.high",
        "if not value <= joint.high + 1",
        (_FOUND,),
    ),
    Fault(
        "a check takes measurements that are not finite for good",
        _CHECK,
        "finite = all(np.isfinite(one.position).all() for one in found)",
        "finite = True",
        (_FOUND,),
    ),
    Fault(
        "a check does not see time stamps that run backwards",
        _CHECK,
        "steps.min() < -_STILL",
        "steps.max() < -_STILL * 1e12",
        (_FOUND,),
    ),
    Fault(
        "a check counts lost answers as good",
        _CHECK,
        '"look at its power, cables and bus, and at what else uses them."',
        '""',
        (_FOUND,),
    ),
    Fault(
        "a check takes an arm for fast enough that needs longer than a control step",
        _CHECK,
        'cure if share > 1.0 else ""',
        'cure if share > 2.0 else ""',
        (f"{_ON_CHECK}test_an_arm_that_is_too_slow_for_its_rate_is_found",),
    ),
    Fault(
        "a check leaves the arm connected",
        _CHECK,
        "        driver.disconnect()",
        "        pass",
        (f"{_ON_CHECK}test_the_arm_is_left_also_when_nobody_reads_to_the_end",),
    ),
    Fault(
        "a check takes a slow camera for good",
        _CHECK,
        "elif camera.fps < _RATE * spec.fps:",
        "elif camera.fps < 0:",
        (f"{_ON_CHECK}test_a_camera_that_does_not_keep_its_word_is_found",),
    ),
    Fault(
        "a check takes a camera that has stopped for good",
        _CHECK,
        "if camera.stale(now) or camera.failures:",
        "if camera.failures > 100:",
        (f"{_ON_CHECK}test_a_camera_that_does_not_keep_its_word_is_found",),
    ),
    Fault(
        "a check looks at the cameras of an arm that answers only",
        _CHECK,
        "for name in config.cameras:",
        "for name in list[str]():",
        (f"{_ON_CHECK}test_a_camera_is_measured_also_when_the_arm_does_not_answer",),
    ),
    Fault(
        "an arm gets the limits of another one",
        "robot_drivers/limits.py",
        "if named != has:",
        "if len(named) > len(has):",
        (f"{_ON_CHECK}test_limits_of_another_arm_are_found_before_anything_is_opened",),
    ),
    Fault(
        "a robot's file is overwritten",
        _CONFIG,
        "if path.exists():",
        "if path.is_dir():",
        (f"{_ON_CONFIG}test_a_file_comes_back_as_it_was",),
    ),
    Fault(
        "unknown entries of a robot's file are ignored",
        _CONFIG,
        "for name in value.keys() - known.keys():",
        "for name in set[str]():",
        (_REFUSED,),
    ),
    Fault(
        "a robot's file may leave the driver out",
        _CONFIG,
        "if needed and name not in value]:",
        "if not needed and name not in value]:",
        (_REFUSED,),
    ),
    Fault(
        "setup takes an arm that does not exist",
        _DIALOGUE,
        'if ":" not in answer:',
        'if " " in answer:',
        (f"{_ON_SETUP}test_a_mistake_is_said_and_asked_again",),
    ),
    Fault(
        "setup does not insist on an option that is needed",
        _DIALOGUE,
        'raise UserError("This one is needed.")',
        'return ""',
        (f"{_ON_SETUP}test_a_mistake_is_said_and_asked_again",),
    ),
    Fault(
        "setup writes options that its parts do not take",
        _DIALOGUE,
        "                make(found.name, options)",
        "                dict(options)",
        (f"{_ON_SETUP}test_options_that_do_not_fit_are_asked_again",),
    ),
    Fault(
        "setup offers the arm's port to the leader",
        _DIALOGUE,
        "if one not in self._taken}",
        "if one}",
        (f"{_ON_SETUP}test_what_is_plugged_in_is_offered_once",),
    ),
    Fault(
        "setup offers a camera twice",
        _SETUP,
        "if camera.index not in used]",
        "if camera.index is not None]",
        (f"{_ON_SETUP}test_everything_that_a_file_holds_is_asked_for",),
    ),
    Fault(
        "a share of the speed is asked for and forgotten",
        _SETUP,
        ".scaled(share)",
        ".scaled(1.0)",
        (f"{_ON_SETUP}test_everything_that_a_file_holds_is_asked_for",),
    ),
    Fault(
        "a camera that gives no picture is found",
        _DEVICES,
        "if read and image is not None:",
        "if image is not None or not read:",
        (f"{_ON_SETUP}test_cameras_are_found_that_give_a_picture",),
    ),
    Fault(
        "a check does not see a port that is not there",
        _CHECK_DEVICES,
        "if Path(str(port)).exists() or port in found:",
        "if str(port) or port in found:",
        (f"{_ON_CHECK}test_ports_that_are_not_there_are_found_before_anything_is_opened",),
    ),
    Fault(
        "a check takes a teleoperator of another arm for good",
        _CHECK_DEVICES,
        "- {(joints,)}",
        "- {array.shape for array in said}",
        (_PERSON,),
    ),
    Fault(
        "a check takes a teleoperator that lags for good",
        _CHECK_DEVICES,
        "if most <= limits.max_age:",
        "if most:",
        (_PERSON,),
    ),
    Fault(
        "the delay of decisions is rounded down",
        _BUDGET,
        "delay = max(1, math.ceil(most * self.control_hz))",
        "delay = max(1, math.floor(most * self.control_hz))",
        (_LATENCY,),
    ),
    Fault(
        "the age of pictures is no part of the latency",
        _BUDGET,
        "before = sum(known.values())",
        "before = 0.0",
        (_LATENCY,),
    ),
    Fault(
        "a chunk that is over too early fits any execution",
        _BUDGET,
        "if horizon >= 2 * delay:",
        "if horizon >= delay:",
        (f"{_ON_CHECK}test_a_chunk_that_is_over_before_the_next_one_comes_is_found",),
    ),
    Fault(
        "decisions that are never executed are good",
        _BUDGET,
        "slow = most > PATIENCE",
        "slow = most > 100 * PATIENCE",
        (f"{_ON_CHECK}test_a_chunk_that_is_over_before_the_next_one_comes_is_found",),
    ),
)
