"""Faults in the timeline of a run: its spans, whose they are, what is kept, and what is said about them."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SPANS, _BACKGROUND = "vla_rl/experience/spans.py", "vla_rl/experience/background.py"
_TIMELINE, _LOOP = "vla_rl/training/timeline.py", "vla_rl/training/loop.py"
_PAGE, _BOTTLENECK = "vla_rl/recipes/timeline_page.py", "vla_rl/recipes/bottleneck.py"
_ON_SPANS, _ON_TIMELINE = "tests/experience/test_spans.py::test_", "tests/training/test_timeline.py::test_"
_ON_PAGE = "tests/recipes/test_timeline_page.py::test_"
_ONE_SENTENCE = (f"{_ON_PAGE}one_sentence_names_what_is_waited_for_and_the_argument",)

FAULTS = (
    Fault(
        "spans of one kind stay apart though they touch",
        _SPANS,
        "start - self._spans[-1][2] < _TOUCHING",
        "False",
        (f"{_ON_SPANS}spans_of_one_kind_that_touch_are_one_and_taking_them_begins_anew",),
    ),
    Fault(
        "spans are in the seconds of one process alone",
        _SPANS,
        "return _ZERO + time.perf_counter()",
        "return time.perf_counter()",
        (f"{_ON_SPANS}the_clock_of_spans_is_the_wall_clock",),
    ),
    Fault(
        "a rollout has all spans without end",
        _SPANS,
        "if len(self._spans) > LIMIT:",
        "if False:",
        (f"{_ON_SPANS}too_many_spans_become_fewer_with_the_same_seconds_in_order",),
    ),
    Fault(
        "thinned spans lose seconds",
        _SPANS,
        "at, at + seconds))",
        "at, at + seconds / 2))",
        (f"{_ON_SPANS}thinning_by_hand",),
    ),
    Fault(
        "drivers that take turns are one after the other",
        _SPANS,
        'spans[np.argsort(spans[:, 1], kind="stable")]',
        "spans",
        (f"{_ON_SPANS}drivers_that_take_turns_share_a_lane_in_order_of_time",),
    ),
    Fault(
        "collectors' spans are lost",
        _BACKGROUND,
        "beside(rollouts, self._waits.take())",
        "self._waits.take()",
        (f"{_ON_SPANS}collectors_beside_have_lanes_of_their_own_and_the_learner_waits",),
    ),
    Fault(
        "a saved rollout depends on how long it took",
        _BACKGROUND,
        ', "spans": {}}',
        "}",
        (f"{_ON_SPANS}a_saved_rollout_has_no_spans",),
    ),
    Fault(
        "a resumed run's timeline has the pause in it",
        _TIMELINE,
        "self._zero = now() - elapsed",
        "self._zero = now()",
        (f"{_ON_TIMELINE}a_resumed_run_goes_on_and_replaces_what_it_repeats",),
    ),
    Fault(
        "what a resumed run repeats counts twice",
        _TIMELINE,
        "[period for period in self.periods if period.last < iteration]",
        "list(self.periods)",
        (f"{_ON_TIMELINE}a_resumed_run_goes_on_and_replaces_what_it_repeats",),
    ),
    Fault(
        "a collector never waits",
        _TIMELINE,
        "if beside and idle_since < spans[0][1]:",
        "if False:",
        (f"{_ON_TIMELINE}a_collector_waits_between_its_rollouts_and_before_the_first",),
    ),
    Fault(
        "nobody waits for a source that records nothing",
        _TIMELINE,
        "if OWN not in spans:",
        "if False:",
        (f"{_ON_TIMELINE}who_brings_no_spans_was_waited_for",),
    ),
    Fault(
        "saving counts twice where it was waiting",
        _TIMELINE,
        "period.count(OWN, KINDS[other], start - stop)",
        "pass",
        (f"{_ON_TIMELINE}what_a_source_says_later_about_a_span_is_more_exact",),
    ),
    Fault(
        "waiting for a rollout to save it is not waiting",
        _BACKGROUND,
        'self._waits.add("waiting", start, time.perf_counter())',
        "pass",
        (f"{_ON_SPANS}a_learner_that_saves_waits_for_the_rollout_that_is_being_collected",),
    ),
    Fault(
        "a long run keeps a period for every iteration",
        _TIMELINE,
        "if len(self.periods) >= 2 * PERIODS:",
        "if False:",
        (f"{_ON_TIMELINE}a_long_run_keeps_recent_spans_and_the_seconds_of_all",),
    ),
    Fault(
        "an iteration keeps spans without end",
        _TIMELINE,
        "if len(kept) > LIMIT:",
        "if False:",
        (f"{_ON_TIMELINE}one_iteration_keeps_a_bounded_number_of_spans",),
    ),
    Fault(
        "learning is not on the timeline",
        _LOOP,
        'phase_of_memory(LEARN), self.timeline.span("learning")',
        "phase_of_memory(LEARN)",
        (f"{_ON_TIMELINE}the_loop_says_what_it_does",),
    ),
    Fault(
        "the iteration shown closely lacks what its collectors did",
        _PAGE,
        "[n for n in plain if n in followed] or plain",
        "plain",
        (f"{_ON_PAGE}the_iteration_that_is_shown_closely_is_one_whose_collectors_have_delivered",),
    ),
    Fault(
        "the page of a run that recorded nothing is written",
        _PAGE,
        'if not (self.timeline.periods and (self._folder / "metrics.jsonl").exists()):',
        "if False:",
        (f"{_ON_PAGE}a_run_writes_its_timeline_and_a_resumed_one_continues_it",),
    ),
    Fault(
        "more collectors than cores are advised",
        _BOTTLENECK,
        "if arguments.collectors < arguments.cores:",
        "if True:",
        _ONE_SENTENCE,
    ),
    Fault(
        "collecting ahead is advised where it is done",
        _BOTTLENECK,
        "0.0 if arguments.rollouts_ahead else",
        "",
        _ONE_SENTENCE,
    ),
    Fault(
        "spans outside the window are drawn",
        "vla_rl/evaluation/lanes.py",
        "max(start, low), min(stop, high)",
        "start, stop",
        (f"{_ON_PAGE}the_page_has_a_lane_for_every_process_and_only_what_happened_then",),
    ),
)
