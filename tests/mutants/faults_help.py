"""Faults in graded human help, in what is claimed about place, and in the recipe of a judge."""

from __future__ import annotations

from tests.mutants.fault import Fault

_HELP, _DESK = "vla_rl/experience/help.py", "vla_rl/experience/help_desk.py"
_HELPED, _PERSON = "vla_rl/experience/helped.py", "vla_rl/experience/person.py"
_ON = "tests/experience/test_help.py::"
_PLACE, _JUDGING = "sims/mujoco/tasks/place.py", "vla_rl/recipes/judging.py"
_CLAIMS = "tests/recipes/test_train_rewards.py::test_claims_about_place_by_hand"
_GROWS = f"{_ON}test_help_grows_with_failures_and_is_given_up_after_the_last_degree"
_BACK = f"{_ON}test_the_simulator_puts_the_robot_back_into_the_state_where_it_got_stuck"
_BUDGET = f"{_ON}test_the_budget_is_never_exceeded_and_less_help_is_given_instead"

_DUE = (
    Fault(
        "help does not grow", _HELP, "degree = -(-failures // self.attempts)", "degree = min(failures, 1)", (_GROWS,)
    ),
    Fault(
        "help is never given up",
        _HELP,
        "return Help(degree) if degree <= max(Help) else Help.NONE",
        "return Help(min(degree, max(Help)))",
        (_GROWS,),
    ),
    Fault(
        "who comes further is helped more",
        _HELP,
        "count += furthest <= best + gain or not count",
        "count += 1",
        (f"{_ON}test_who_comes_further_is_not_helped_more",),
    ),
    Fault(
        "a success does not end help",
        _DESK,
        "        if success:",
        "        if success and not self._situations[robot].reached:",
        (f"{_ON}test_a_success_ends_all_help", f"{_ON}test_a_success_in_the_simulator_ends_help"),
    ),
    Fault(
        "a demonstration counts as an attempt",
        _DESK,
        "if self._episodes[robot].shown:",
        "if self._episodes[robot].shown and not success:",
        (f"{_ON}test_a_demonstration_is_no_attempt_whatever_comes_of_it",),
    ),
    Fault(
        "a robot's failures are those of the first one",
        _DESK,
        "(*self._situations[robot].reached, furthest)",
        "(*self._situations[0].reached, furthest)",
        (f"{_ON}test_robots_do_not_touch_each_other",),
    ),
    Fault(
        "a person demonstrates as often as they like",
        _DESK,
        "shown=left > 0 and not self._shown[robot]",
        "shown=not self._shown[robot]",
        (_BUDGET,),
    ),
    Fault(
        "robots are put back as often as is wanted",
        _DESK,
        "return Episode(due) if returns > 0 else Episode()",
        "return Episode(due)",
        (_BUDGET,),
    ),
)

_GIVEN = (
    Fault(
        "nobody puts the robot back",
        _HELPED,
        "        if back.any():",
        "        if back.all() and not back.any():",
        (_BACK,),
    ),
    Fault(
        "the hard state is that of the last decision",
        _HELPED,
        "self._running & fresh & self._rule.advancing",
        "self._running & fresh",
        (_BACK,),
    ),
    Fault(
        "another scene is played while help is due",
        _HELPED,
        "np.where(same, self._scene[rows], fresh)",
        "fresh",
        (_BACK,),
    ),
    Fault(
        "a person takes over whatever help is due",
        _HELPED,
        "episode.help == Help.HUMAN_GUIDED_EXPLORE",
        "episode.help >= Help.NONE",
        (_BACK,),
    ),
    Fault(
        "a demonstration does not end before its episode",
        _PERSON,
        "(self._recovered | self._shows)",
        "(self._recovered & ~self._shows)",
        (_BACK,),
    ),
    Fault(
        "demonstrations exceed the person's share of steps",
        _HELPED,
        "return self._rule.affordable(self.help.demonstration)",
        "return len(rows)",
        (f"{_ON}test_demonstrations_and_guidance_share_the_persons_share_of_steps",),
    ),
    Fault(
        "a person who demonstrates is free for others",
        _PERSON,
        "        self._people.free -= len(rows)",
        "        pass",
        (f"{_ON}test_one_person_demonstrates_to_one_robot_at_a_time",),
    ),
    Fault(
        "an episode that is broken off does not end help",
        _HELPED,
        "for row in rows[self._running[rows]]:  # broken off from outside",
        "for row in rows[:0]:",
        (f"{_ON}test_an_episode_that_is_broken_off_ends_help",),
    ),
)

_LABELLED = (
    Fault(
        "every plate is the named one where a cube of place is claimed to be",
        _PLACE,
        "done(cubes[other_cube, rows], plates[other_plate, rows])",
        "done(cubes[other_cube, rows], plates[0])",
        (_CLAIMS,),
    ),
    Fault(
        "a cube that is still held counts as placed",
        _PLACE,
        " & (obs.state[:, 3] >= RELEASED)",
        "",
        (_CLAIMS,),
    ),
    Fault(
        "a judge is not written down",
        _JUDGING,
        'judge.save_pretrained(folder.checkpoint("judge"))',
        'folder.checkpoint("judge")',
        ("tests/recipes/test_judging.py::test_a_judge_is_made_from_a_models_folder_and_asked_about_test_scenes",),
    ),
)

FAULTS = (*_DUE, *_GIVEN, *_LABELLED)
