"""Faults in what a fleet makes of its records."""

from __future__ import annotations

from tests.mutants.fault import Fault

_EPISODES, _STEP, _PICTURES = (f"vla_rl/fleet/{name}.py" for name in ("episodes", "step", "pictures"))
_ON, _ON_STEP = "tests/fleet/test_episodes.py::", "tests/fleet/test_step.py::"
_SAME = "tests/recipes/robots/test_fleet_episodes.py::test_an_export_is_the_recording"

FAULTS = (
    Fault(
        "an episode without one of its steps counts",
        _EPISODES,
        "if [step.time for step in steps] != [*range(len(steps))]:",
        "if False:",
        (f"{_ON}test_a_step_that_comes_twice_breaks_its_episode",),
    ),
    Fault(
        "an episode with fewer steps than it says counts",
        _EPISODES,
        "or len(one.steps) != end.steps or not one.steps:",
        "or not one.steps:",
        (f"{_ON}test_an_episode_whose_last_steps_are_missing_is_left_out",),
    ),
    Fault(
        "all robots are one",
        _EPISODES,
        "one = self._open.get(record.robot)",
        'one = self._open.get("")',
        (f"{_ON}test_robots_do_not_mix",),
    ),
    Fault(
        "an episode that is to be played again counts",
        _EPISODES,
        'if end.outcome == "redo":',
        "if False:",
        (f"{_ON}test_what_is_to_be_played_again_is_left_out",),
    ),
    Fault(
        "an episode with an unreadable end counts as unfinished",
        _EPISODES,
        'found = "unreadable"',
        'found = "unfinished"',
        (f"{_ON}test_an_end_that_cannot_be_read_ends_nothing",),
    ),
    Fault(
        "a picture loses half of its colours",
        _PICTURES,
        "quality=quality, subsampling=0)",
        "quality=quality)",
        (f"{_ON_STEP}test_colours_keep_their_resolution",),
    ),
    Fault(
        "pictures of any size are taken",
        _PICTURES,
        "if max(image.size) > MAX_SIDE or image.mode",
        "if image.mode",
        (f"{_ON_STEP}test_what_is_no_picture_is_not_taken",),
    ),
    Fault(
        "a state of any type is taken",
        _STEP,
        "and value.dtype == np.float32",
        "and True",
        (f"{_ON_STEP}test_a_wrong_step_is_refused",),
    ),
    Fault(
        "an exported action is the one that was asked for",
        "vla_rl/recipes/robots/fleet_step.py",
        "action = one.record.executed.astype(np.float32)",
        "action = one.record.requested.astype(np.float32)",
        (_SAME,),
    ),
    Fault(
        "an exported label has another type",
        "vla_rl/recipes/robots/fleet_step.py",
        "name: np.asarray(value[0])",
        "name: np.asarray(value[0], np.float64)",
        (_SAME,),
    ),
    Fault(
        "a number far out of its range is learnt from",
        _STEP,
        "if not ((value >= low) & (value <= high)).all():",
        "if False:",
        (f"{_ON}test_a_step_that_does_not_fit_puts_its_episode_aside_by_name_and_the_next_is_whole",),
    ),
    Fault(
        "a robot that begins anew goes on with the episode that it was in",
        "vla_rl/fleet/episodes.py",
        "if spec is not None:  # the robot has begun anew",
        "if False:",
        ("tests/fleet/test_episodes.py::test_a_robot_that_introduces_itself_again_has_broken_its_episode_off",),
    ),
    Fault(
        "what a broken sensor says is a control step",
        "vla_rl/recipes/robots/session.py",
        "if not all(np.isfinite(np.asarray(item)).all() for item in numbers):",
        "if False:",
        ("tests/recipes/robots/test_streaming.py::test_an_episode_ends_before_the_first_step_that_is_not_finite",),
    ),
    Fault(
        "a robot's label may be a column that every dataset has, and no export is possible",
        "vla_rl/fleet/step.py",
        "if not _LABEL.fullmatch(name) or _OURS.fullmatch(name) or",
        "if not _LABEL.fullmatch(name) or",
        ("tests/fleet/test_step.py::test_a_wrong_step_is_refused",),
    ),
    Fault(
        "a robot's label may be empty, and no export is possible",
        "vla_rl/fleet/step.py",
        "if not 0 < value.size <= MAX_LABEL",
        "if not value.size <= MAX_LABEL",
        ("tests/fleet/test_step.py::test_a_wrong_step_is_refused",),
    ),
    Fault(
        "the seconds of all episodes may be no number",
        "vla_rl/fleet/episode_end.py",
        "if not 0 <= self.seconds <= _MOST_SECONDS:",
        "if not 0 <= self.seconds < float('inf'):",
        ("tests/fleet/test_status.py::test_a_wrong_end_is_refused",),
    ),
)
