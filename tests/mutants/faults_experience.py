"""Faults in collecting experience."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ROLLOUT, _EPISODES = "vla_rl/experience/rollout.py", "vla_rl/experience/demonstrations.py"
_DRIVER, _COLLECT = "vla_rl/experience/driver.py", "vla_rl/experience/collect.py"
_ON_ROLLOUT, _RECORDED = "tests/experience/test_rollout.py::", "tests/experience/test_demonstrations.py::"
_NUMBERS = f"{_ON_ROLLOUT}test_every_number_can_be_recomputed"

_ROLLOUTS = (
    Fault(
        "the last observation is the next episode's first",
        _ROLLOUT,
        "final = self.driver.final_features(index)",
        "final = (self._reset(truncated), self.driver.final_features(truncated))[1]",
        (_NUMBERS,),
    ),
    Fault(
        "last observations of terminated rows as well",
        _ROLLOUT,
        "np.flatnonzero(decision.host.truncated)",
        "np.flatnonzero(decision.host.done)",
        (_NUMBERS,),
    ),
    Fault(
        "a last observation belongs to the next decision",
        _ROLLOUT,
        "(len(window.decisions) - 1, int(env_id))",
        "(len(window.decisions), int(env_id))",
        (_NUMBERS,),
    ),
    Fault(
        "the policy's state is not reset",
        _DRIVER,
        "self.state = self.policy.reset_state(self.state, env_ids)",
        "self.policy.reset_state(self.state, env_ids)",
        (_NUMBERS,),
    ),
    Fault(
        "a decision is paired with the observation after it",
        _ROLLOUT,
        "held[len(self.decisions)] = features[name]",
        "held[len(self.decisions) - 1] = features[name]",
        (_NUMBERS,),
    ),
    Fault(
        "a decision has its successor's seed",
        _DRIVER,
        "step, self.seeds.copy(), host)",
        "step, self.seeds, host)",
        (_NUMBERS,),
    ),
    Fault(
        "a chunk counts as executed to its end",
        _ROLLOUT,
        "host.valid.sum() for host in hosts",
        "host.valid.size for host in hosts",
        (f"{_ON_ROLLOUT}test_counters_and_seconds_are_those_of_the_window",),
    ),
    Fault(
        "the version is not that of who acted",
        _ROLLOUT,
        "[[out.policy_version] * len(valid[0]) for out in outs]",
        "[[0] * len(valid[0]) for out in outs]",
        (f"{_ON_ROLLOUT}test_the_version_is_that_of_the_policy_that_acted",),
    ),
    Fault(
        "the rollout gives the policy privileged state",
        "vla_rl/contract/policy.py",
        "else obs.public()",
        "else obs",
        (
            f"{_ON_ROLLOUT}test_nothing_privileged_is_shown_to_the_policy",
            "tests/evaluation/test_run.py::test_nothing_privileged_reaches_the_policy",
        ),
    ),
    Fault(
        "a full window goes on",
        _ROLLOUT,
        "if len(self._window.decisions) < self.decisions:",
        "if True:",
        (f"{_ON_ROLLOUT}test_a_full_window_waits_until_it_is_delivered",),
    ),
)

_EXPERT = "tests/evaluation/test_run.py::test_"
_RECORDINGS = (
    Fault(
        "an expert observes only what a policy observes",
        "vla_rl/experience/expert.py",
        "reads_privileged = True",
        "reads_privileged = False",
        (f"{_EXPERT}a_scripted_expert_is_evaluated_and_recorded_by_the_same_driver",),
    ),
    Fault(
        "an expert executes its whole chunks",
        "vla_rl/experience/expert.py",
        "self.expert(observation_of(features))[:, : self.horizon]",
        "self.expert(observation_of(features))",
        (f"{_EXPERT}an_expert_in_chunks_may_execute_only_their_first_actions",),
    ),
    Fault(
        "a chunk runs into the next episode",
        _EPISODES,
        "self.action[np.minimum(ahead, last)]",
        "self.action[np.minimum(ahead, len(self.episode) - 1)]",
        (f"{_RECORDED}test_a_chunk_ends_with_its_episode",),
    ),
    Fault(
        "an action is paired with the observation after it",
        _COLLECT,
        "[decision.obs.select(slice(env_id, env_id + 1)) for",
        "[decision.step.obs.select(slice(env_id, env_id + 1)) for",
        (f"{_RECORDED}test_an_action_is_paired_with_the_observation_before_it",),
    ),
    Fault(
        "failures are imitated as well",
        _COLLECT,
        "if decisions[-1].step.success[env_id]:",
        "if decisions[-1].step.done[env_id]:",
        (f"{_RECORDED}test_successes_are_recorded_once_complete_and_in_order",),
    ),
)

FAULTS = (*_ROLLOUTS, *_RECORDINGS)
