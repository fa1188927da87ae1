"""Faults in what a person at an arm is asked, shown and answers."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PERSON, _SESSION, _STATUS = (f"vla_rl/recipes/robots/{name}.py" for name in ("person", "session", "status"))
_ON = "tests/recipes/robots/test_person.py::"
_TELEOP = "tests/robot_drivers/test_teleop.py::"
_STOP = f"{_ON}test_a_stop_that_nobody_could_end_ends_the_episode_and_a_person_re_arms_before_the_next"
_LINE = f"{_ON}test_the_line_says_who_moves_the_arm_what_was_clipped_how_often_it_is_measured_and_why_it_is_stopped"

FAULTS = (
    Fault(
        "an Enter of long ago begins an episode",
        _PERSON,
        "while os.isatty(self._end) and self.entered():",
        "while not os.isatty(self._end) and self.entered():",
        (f"{_ON}test_enter_counts_once_it_is_pressed_after_the_question",),
    ),
    Fault(
        "a key of the teleoperator of long ago begins an episode",
        _PERSON,
        "        control.newest()  # what",
        "        control.later.insert(0, control.newest())  # what",
        (f"{_ON}test_the_teleoperator_answers_too_and_not_before_the_question",),
    ),
    Fault(
        "a keyboard that the teleoperator has taken presses Enter",
        _PERSON,
        "except OSError:  # the keyboard",
        "except EOFError:  # the keyboard",
        (f"{_ON}test_a_keyboard_that_the_teleoperator_has_is_not_read",),
    ),
    Fault(
        "nobody is waited for, for ever",
        _PERSON,
        "if terminal.over and not control.teleoperator_pid:",
        "if terminal.over and control.teleoperator_pid:",
        (f"{_ON}test_the_teleoperator_answers_too_and_not_before_the_question",),
    ),
    Fault(
        "the rate of a status line counts its ends twice",
        _STATUS,
        "(len(self._captured) - 1) / span",
        "len(self._captured) / span",
        (_LINE,),
    ),
    Fault(
        "a status line hides a stop",
        _STATUS,
        'f"STOPPED: {stopped}" if stopped else ""',
        'f"STOPPED: {stopped}" if not stopped else ""',
        (_LINE,),
    ),
    Fault(
        "a stop that nobody could end is taken for the time limit",
        _SESSION,
        'self._control.end("stopped")',
        'self._control.end("time_limit")',
        (_STOP,),
    ),
    Fault(
        "a stopped arm in virtual time is played on with",
        _SESSION,
        "        if self._executor.stopped:",
        "        if self._executor.stopped is None:",
        ("tests/recipes/robots/test_robot_recording.py::test_a_stopped_arm_ends_the_session_in_one_sentence",),
    ),
    Fault(
        "a re-arming is not counted",
        "robot_drivers/executor.py",
        "        self.rearmed += 1",
        "        self.rearmed += 0",
        (
            "tests/robot_drivers/test_executor.py::test_a_stop_is_latched_until_a_person_re_arms_and_then_a_fresh_chunk_is_needed",
        ),
    ),
    Fault(
        "Enter is no key of a keyboard that drives an arm",
        "robot_drivers/teleop/keyboard.py",
        '"\\n": "ready"',
        '"n": "ready"',
        (f"{_TELEOP}test_keys_move_joints_take_over_and_judge",),
    ),
    Fault(
        "keys that were meant for an arm are typed into the shell",
        "robot_drivers/teleop/terminal.py",
        "termios.TCSAFLUSH",
        "termios.TCSANOW",
        (f"{_TELEOP}test_a_terminal_is_given_back_as_it_was",),
    ),
    Fault(
        "a program ends before its terminal is given back",
        "robot_drivers/teleop/terminal.py",
        "while self._held and not self._holds()",
        "while self._held and self._holds()",
        (f"{_TELEOP}test_a_program_waits_until_it_has_its_terminal_again",),
    ),
    Fault(
        "a robot in virtual time is told to be given a teleoperator",
        "vla_rl/recipes/robots/teleop.py",
        "if load(config.driver.name) is SimulatedRobot:",
        "if load(config.driver.name) is None:",
        ("tests/cli/test_robot_terminal.py::test_nobody_can_drive_without_a_teleoperator_or_in_virtual_time",),
    ),
    Fault(
        "nobody learns why a teleoperator cannot be read",
        "robot_drivers/control.py",
        'if "failed" in message:',
        'if "failure" in message:',
        ("tests/cli/test_robot_terminal.py::test_a_teleoperator_that_cannot_be_read_ends_it_in_one_sentence",),
    ),
)
