"""Faults in sources that are ahead of the learner, and in processes that are started again."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ASYNC, _WORKERS = "vla_rl/experience/asynchronous.py", "vla_rl/recipes/workers.py"
_ON_ASYNC, _ON_TRAINERS = "tests/experience/test_asynchronous.py::", "tests/recipes/test_trainers.py::"
_SLOW = f"{_ON_ASYNC}test_a_slow_source_holds_nobody_up_and_its_window_is_the_next_one_that_is_learnt_from"
_SAVED = f"{_ON_ASYNC}test_a_saved_run_goes_on_where_it_was_without_waiting"
_KILLED = f"{_ON_ASYNC}test_a_source_whose_process_is_killed_plays_its_window_again"

FAULTS = (
    Fault(
        "sources are further ahead than they may be",
        _ASYNC,
        "self._begun < self.windows * (self._asked + self.staleness)",
        "self._begun < self.windows * (self._asked + self.staleness + 1)",
        (f"{_ON_ASYNC}test_the_bound_is_on_what_is_begun",),
    ),
    Fault(
        "everybody waits for the slowest source",
        _ASYNC,
        "return len(self._finished()) >= self.windows",
        "return len(self._finished()) >= len(self._open)",
        (_SLOW,),
    ),
    Fault(
        "a window keeps the weights that it began with",
        _ASYNC,
        "if policy is not self._acting:",
        "if self._acting is None:",
        (f"{_ON_ASYNC}test_a_window_goes_on_over_a_change_of_weights",),
    ),
    Fault(
        "the newest windows are learnt from first",
        _ASYNC,
        "chosen = self._finished()[: self.windows]",
        "chosen = self._finished()[-self.windows :]",
        (f"{_ON_ASYNC}test_windows_one_by_one_are_streams_of_their_own", _SLOW),
    ),
    Fault(
        "a saved run plays its finished windows again",
        _ASYNC,
        "window.rollout, player.state = played",
        "window.rollout = played[0]",
        (_SAVED,),
    ),
    Fault(
        "a saved run forgets its finished windows",
        _ASYNC,
        'for number, item in enumerate(state["windows"])',
        'for number, item in enumerate(state["windows"][:0])',
        (_SAVED,),
    ),
    Fault(
        "a source that was made anew begins with other episodes",
        _ASYNC,
        "self._lost, self._placed = True, False",
        "self._lost = True",
        (_KILLED,),
    ),
    Fault(
        "an error is never forgotten",
        _ASYNC,
        "window.error = None",
        "pass",
        (f"{_ON_ASYNC}test_an_error_of_a_source_is_raised_by_next_and_repaired_weights_go_on",),
    ),
    Fault(
        "a dead process is not replaced",
        _WORKERS,
        "if self.all[number].lost:",
        "if False:",
        (f"{_ON_TRAINERS}test_asynchronous_collectors_are_processes_and_a_killed_one_is_started_again",),
    ),
)
