"""Faults in the documentation: examples, tables, and the share of a run that is done."""

from __future__ import annotations

from tests.mutants.fault import Fault

_LOOP, _BALL, _HEIGHT = "vla_rl/training/loop.py", "docs/examples/ball_env.py", "docs/examples/height_reward.py"
_HOOKS, _RECORD = "docs/tables/hooks.py", "docs/examples/record_dataset.py"
_ON_EXAMPLES, _ON_SITE = "tests/docs/test_examples.py::", "tests/docs/test_site.py::"

FAULTS = (
    Fault(
        "more than all of a run is done",
        _LOOP,
        "return min(done, 1.0)",
        "return done",
        ("tests/training/test_loop.py::test_the_share_that_is_done_is_never_more_than_all",),
    ),
    Fault(
        "an observation of the example changes with the next step",
        _BALL,
        "mark = self._mark[:, None].copy()",
        "mark = self._mark[:, None]",
        (f"{_ON_EXAMPLES}test_the_ball_keeps_the_contract",),
    ),
    Fault(
        "the example's ball need not stop",
        _BALL,
        "success = at_mark & (np.abs(self._speed[active]) < SLOW)",
        "success = np.abs(self._speed[active]) < SLOW",
        (f"{_ON_EXAMPLES}test_its_expert_stops_at_the_mark_and_doing_nothing_does_not",),
    ),
    Fault(
        "the example's reward pays upside down",
        _HEIGHT,
        "rows = 1.0 - (np.arange",
        "rows = (np.arange",
        (f"{_ON_EXAMPLES}test_the_height_reward_pays_for_lifting_and_not_for_waiting",),
    ),
    Fault(
        "the example records one task for all",
        _RECORD,
        "task=np.full(steps, task),",
        "task=np.zeros(steps, np.int64),",
        (f"{_ON_EXAMPLES}test_the_recorded_dataset_comes_back_as_it_was",),
    ),
    Fault(
        "a field without a meaning is left empty",
        _HOOKS,
        "        if not texts:",
        "        if texts is None:",
        (f"{_ON_SITE}test_a_table_of_fields_refuses_one_without_a_meaning",),
    ),
    Fault(
        "a default of a factory is not shown",
        _HOOKS,
        "    if field.default_factory is not dataclasses.MISSING:",
        "    if field.default_factory is dataclasses.MISSING:",
        (f"{_ON_SITE}test_a_table_of_fields_shows_every_default",),
    ),
    Fault(
        "an interval of a table is broken into two lines",
        _HOOKS,
        'row = re.sub(r"(?<=\\d) (?=%|dB|mm|/s|ms)", "\\N{NO-BREAK SPACE}", row)',
        "pass",
        (f"{_ON_SITE}test_numbers_of_a_table_stay_with_their_units_and_intervals_whole",),
    ),
    Fault(
        "a metric without a meaning is left out",
        _HOOKS,
        "if name not in known]:",
        "if name in ()]:",
        (f"{_ON_SITE}test_a_table_of_metrics_refuses_one_without_a_meaning",),
    ),
)
