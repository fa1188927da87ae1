"""Faults in rollouts whose halves take turns, and in environments that are split."""

from __future__ import annotations

from tests.mutants.fault import Fault

_OVERLAP, _DRIVER = "vla_rl/experience/overlap.py", "vla_rl/experience/driver.py"
_ENV, _ROLLOUT = "sims/isolation/env.py", "vla_rl/experience/rollout.py"
_ON, _ON_DRIVER = "tests/experience/test_overlap.py::test_", "tests/experience/test_driver.py::test_"
_AUDIT = (f"{_ON}nothing_is_lost_doubled_or_reordered",)
_TURNS = (f"{_ON}one_half_simulates_whenever_the_policy_decides_for_the_other",)
_REFUSED = (f"{_ON}an_environment_without_halves_is_refused_in_one_sentence",)
_ISOLATED = (f"{_ON}behind_isolation_and_what_is_split_is_not_stepped_as_a_whole",)

FAULTS = (
    Fault(
        "the halves do not overlap",
        _OVERLAP,
        "                half.begin()",
        "                half.begin() if half is late else None",
        _TURNS,
    ),
    Fault(
        "one half plays its whole window before the other",
        _OVERLAP,
        "late = min(self._halves, key=lambda half: half.decided)",
        "late = next(half for half in self._halves if not half.full)",
        _AUDIT,
    ),
    Fault(
        "a half decides again while it simulates",
        _OVERLAP,
        "if not (self.full or self.driver.begun):",
        "if not self.full:",
        _TURNS,
    ),
    Fault(
        "the second half writes its features over the first's",
        _OVERLAP,
        "return {name: item[:, rows] for name, item in self._whole.items()}",
        "return {name: item[:, : rows.stop - rows.start] for name, item in self._whole.items()}",
        _AUDIT,
    ),
    Fault(
        "a window writes into the features of the one before",
        _OVERLAP,
        "whole, self._whole = self._whole, {}",
        "whole = self._whole",
        _AUDIT,
    ),
    Fault(
        "features are joined by copying",
        _OVERLAP,
        "features=self._columns.take(), stream",
        "features={k: torch.cat([v, v])[: len(v)] for k, v in self._columns.take().items()}, stream",
        (f"{_ON}features_exist_once",),
    ),
    Fault(
        "the counters are those of one half",
        _OVERLAP,
        "sum(part.info.get(name, 0.0) for part in parts)",
        "parts[0].info.get(name, 0.0)",
        _AUDIT,
    ),
    Fault(
        "a new policy acts in the first half only",
        _OVERLAP,
        "            half.policy = policy",
        "            self._halves[0].policy = policy",
        (f"{_ON}both_halves_act_with_the_policy_that_was_published",),
    ),
    Fault(
        "one half is saved",
        _OVERLAP,
        'zip(self._halves, state["halves"], strict=True)',
        'zip(self._halves[:1], state["halves"][:1], strict=True)',
        (f"{_ON}equal_seeds_give_equal_rollouts_and_a_resumed_run_goes_on_in_mid_episode",),
    ),
    Fault(
        "a decision that has begun is forgotten when a state is saved",
        _ROLLOUT,
        "len(self._window.decisions) + self.driver.begun:",
        "len(self._window.decisions):",
        (f"{_ON}a_decision_of_a_window_that_has_only_begun_is_not_lost_in_silence",),
    ),
    Fault(
        "an environment without halves is taken",
        _OVERLAP,
        "if not isinstance(env, Halves):",
        "if False:",
        _REFUSED,
    ),
    Fault(
        "overlap is ignored",
        _ROLLOUT,
        "OverlappedSource if self.overlap else RolloutSource",
        "RolloutSource",
        (*_REFUSED, f"{_ON}ppo_reaches_the_optimum_of_the_point_mass"),
    ),
    Fault(
        "one worker is split",
        _ENV,
        "if len(self.workers) < 2:",
        "if len(self.workers) < 1:",
        _REFUSED,
    ),
    Fault(
        "the second half keeps the rows of the whole",
        _ENV,
        "worker.rows = slice(worker.rows.start - before, worker.rows.stop - before)",
        "pass",
        _ISOLATED,
    ),
    Fault(
        "what was split is still stepped as a whole",
        _ENV,
        "        if self._halved:",
        "        if False:",
        _ISOLATED,
    ),
    Fault(
        "waiting counts as simulation",
        _DRIVER,
        'with self._clock("time/wait_s"):',
        'with self._clock("time/env_s"):',
        (f"{_ON_DRIVER}an_environment_elsewhere_begins_before_it_is_waited_for",),
    ),
    Fault(
        "an environment elsewhere begins when it is waited for",
        _DRIVER,
        "self._elsewhere.step_async(action, observe=self.observe)",
        "pass",
        (f"{_ON_DRIVER}an_environment_elsewhere_begins_before_it_is_waited_for",),
    ),
)
