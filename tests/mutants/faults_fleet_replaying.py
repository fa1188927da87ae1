"""Faults in the off-policy learners of a fleet."""

from __future__ import annotations

from tests.mutants.fault import Fault

_REPLAYING, _RELABELLING = (f"vla_rl/recipes/fleet/{name}.py" for name in ("replaying", "relabelling"))
_ON = "tests/recipes/fleet/test_replaying.py::"
_SLOTS = f"{_ON}test_what_a_robot_sent_is_in_the_replay_slot_by_slot_as_the_simulation_had_it"
_STARTS = f"{_ON}test_nothing_is_learnt_before_the_robots_have_done_enough_and_the_critics_begin"
_CHUNKS = f"{_ON}test_a_chunk_begins_at_every_step_for_a_policy_that_decides_by_chunks"

FAULTS = (
    Fault(
        "a fleet's critics learn before the robots have done enough",
        _REPLAYING,
        "if inner.decisions < max(1, inner.config.learning_starts):",
        "if inner.decisions < 1:",
        (_STARTS,),
    ),
    Fault(
        "an episode brings gradient steps that the fleet does not count",
        _REPLAYING,
        "replace(self.algorithm, utd_ratio=_NEVER)",
        "replace(self.algorithm)",
        (_STARTS,),
    ),
    Fault(
        "the replay of a fleet has instructions as its tasks",
        _REPLAYING,
        "else replace(rollout, task=families[rollout.task])",
        "else rollout",
        (f"{_ON}test_tasks_are_families",),
    ),
    Fault(
        "a base goes on with its chunk after a person has acted",
        _RELABELLING,
        "if self.after[self._step]:",
        "if self.after[0]:",
        (_SLOTS,),
    ),
    Fault(
        "a simulated robot goes on with its chunk after a person has acted",
        "vla_rl/recipes/fleet/virtual.py",
        "if on_host(decision.step.intervened).any():",
        "if decision is None:",
        (_SLOTS,),
    ),
    Fault(
        "a failure that a person judged has a value after its end",
        _RELABELLING,
        "if episode.end.outcome in _TERMINAL:",
        "if episode.end.success:",
        (_SLOTS,),
    ),
    Fault(
        "what nobody judged is terminated",
        _RELABELLING,
        "if episode.end.outcome in _TERMINAL:",
        "if episode.end.outcome:",
        (f"{_ON}test_an_episode_that_nobody_judged_is_truncated_before_its_last_action",),
    ),
    Fault(
        "a failure counts as a success",
        _RELABELLING,
        "success = column.success & episode.end.success",
        "success = column.success",
        (_SLOTS,),
    ),
    Fault(
        "a version that the fleet never had counts as a new one",
        _RELABELLING,
        "[one if one in known else 0 for one in episode.versions]",
        "[*episode.versions]",
        (f"{_ON}test_a_version_of_another_policy_counts_as_the_first",),
    ),
    Fault(
        "a chunk has the version of another step",
        _RELABELLING,
        "version[first::horizon]",
        "version[first:]",
        (_CHUNKS,),
    ),
    Fault(
        "robots of a fleet that should explore do not",
        "vla_rl/recipes/fleet/simulate.py",
        "self.seed, self.method.mode)",
        'self.seed, "eval")',
        ("tests/recipes/fleet/test_simulate.py::test_robots_explore_where_the_method_says_so",),
    ),
    Fault(
        "an arm's policy does not know its own state",
        "vla_rl/recipes/robots/decide.py",
        "encode_observation(self.policy, query.obs, self._state, self._generator)",
        "(self.policy.encode(query.obs.public()), self._state)",
        (
            "tests/recipes/robots/test_deciding.py::test_a_residual_follows_its_bases_chunk_on_an_arm_until_no_chunk_counts",
        ),
    ),
    Fault(
        "losses count for what was drawn last, whatever its number",
        "vla_rl/experience/strata.py",
        "self._drawn[size] = drawn",
        "self._drawn = {size: drawn}",
        ("tests/experience/test_strata.py::test_losses_are_of_the_batch_although_a_learner_has_drawn_others_since",),
    ),
)
