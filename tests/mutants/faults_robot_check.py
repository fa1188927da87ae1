"""Faults in what `vla-rl robot` asks, reads and finds out about an arm."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CHECK, _CONFIG, _SETUP, _DIALOGUE, _DEVICES = (
    f"robot_drivers/{name}.py" for name in ("check", "config", "setup", "dialogue", "devices")
)
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
        'the first that was lost: {lost[0]}", good=False)',
        'the first that was lost: {lost[0]}")',
        (_FOUND,),
    ),
    Fault(
        "a check takes an arm for fast enough that needs longer than a control step",
        _CHECK,
        "good=share <= 1.0",
        "good=share <= 2.0",
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
        "good = camera.fps >= _RATE * spec.fps and",
        "good = camera.fps > 0 and",
        (f"{_ON_CHECK}test_a_camera_that_does_not_keep_its_word_is_found",),
    ),
    Fault(
        "a check takes a camera that has stopped for good",
        _CHECK,
        "and not camera.stale(now) and",
        "and",
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
        _CONFIG,
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
)
