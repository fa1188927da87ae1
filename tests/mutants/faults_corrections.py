"""Faults in learning from what a person corrected."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CHUNKS, _DAGGER = "vla_rl/algorithms/chunks.py", "vla_rl/algorithms/hg_dagger.py"
_LEARNER = "vla_rl/algorithms/chunk_learner.py"
_ON = "tests/algorithms/test_hg_dagger.py::"
_PERSON, _SUPERVISED = "vla_rl/experience/person.py", "vla_rl/experience/supervised.py"
_ON_PERSON = "tests/experience/test_person.py::"
_MASK = f"{_ON}test_only_what_a_person_chose_and_was_executed_is_imitated"

FAULTS = (
    Fault(
        "HG-DAgger imitates whole chunks of which a person chose a part",
        _CHUNKS,
        "return losses[chunks.counts].mean()",
        "return losses.mean()",
        (f"{_ON}test_places_outside_the_mask_have_no_gradient",),
    ),
    Fault(
        "corrections that were never executed are imitated",
        _DAGGER,
        "human = rollout.intervened & rollout.valid",
        "human = rollout.intervened",
        (_MASK,),
    ),
    Fault(
        "what a person did is imitated in physical units",
        _CHUNKS,
        "policy.action_scale.normalize(flatten(rollout.executed, used).float())",
        "flatten(rollout.executed, used).float()",
        (_MASK,),
    ),
    Fault(
        "what the policy wanted is imitated in place of what was executed",
        _CHUNKS,
        "flatten(rollout.executed, used)",
        "flatten(rollout.sample * 0.0, used)",
        (_MASK,),
    ),
    Fault(
        "tasks with more data are drawn more often",
        _CHUNKS,
        "1.0 / count[group].double()",
        "torch.ones_like(count[group]).double()",
        (f"{_ON}test_tasks_are_equally_likely",),
    ),
    Fault(
        "demonstrations enter with full weight",
        _LEARNER,
        "loss + config.alpha * recorded",
        "loss + recorded",
        (f"{_ON}test_demonstrations_enter_by_their_weight",),
    ),
    Fault(
        "the newest corrections leave",
        _LEARNER,
        "[-self.config.capacity :]",
        "[: self.config.capacity]",
        (f"{_ON}test_the_oldest_corrections_leave",),
    ),
    Fault(
        "a resumed HG-DAgger has lost its corrections",
        _LEARNER,
        'Chunks(**state["kept"]) if state["kept"] else None',
        "None",
        (f"{_ON}test_a_resumed_learner_is_the_same_bit_for_bit",),
    ),
    Fault(
        "the loss of an action is that of another",
        "vla_rl/policies/flow.py",
        "errors.unflatten(0, (draws, len(chunks)))",
        "errors.unflatten(0, (len(chunks), draws)).transpose(0, 1)",
        (f"{_ON}test_the_loss_of_each_action_belongs_to_its_decision",),
    ),
    Fault(
        "a person takes over without a delay",
        _PERSON,
        "(self._seen > config.delay)",
        "(self._seen > 0)",
        (f"{_ON_PERSON}test_a_person_takes_over_after_what_is_seen_and_a_delay_and_hands_back_when_it_is_better",),
    ),
    Fault(
        "a person takes over where nothing is visible",
        _PERSON,
        "failing = (self._stalled >= config.patience)",
        "failing = (self._stalled >= 0)",
        (f"{_ON_PERSON}test_a_person_takes_over_after_what_is_seen_and_a_delay_and_hands_back_when_it_is_better",),
    ),
    Fault(
        "a fall is not seen",
        _PERSON,
        " | (progress < self._best - config.slip)",
        "",
        (f"{_ON_PERSON}test_a_slip_is_seen_at_once",),
    ),
    Fault(
        "a person hands back inside a chunk",
        _SUPERVISED,
        "            self._obs = steps[-1].obs",
        "            self._obs = steps[-1].obs\n            self._rule.hand_back()",
        (f"{_ON_PERSON}test_a_take_over_inside_a_chunk_lasts_to_its_end",),
    ),
    Fault(
        "a person acts as often as they like",
        _PERSON,
        "max(0, int(left / cost)) if cost else self.num_envs",
        "self.num_envs",
        (f"{_ON_PERSON}test_a_person_acts_in_no_larger_share_of_steps_than_allowed",),
    ),
    Fault(
        "one person is with several robots at once",
        _PERSON,
        "return min(max(0, int(left / cost)) if cost else self.num_envs, self._people.free)",
        "return max(0, int(left / cost)) if cost else self.num_envs",
        (f"{_ON_PERSON}test_one_person_is_with_one_robot_at_a_time_and_free_again_afterwards",),
    ),
    Fault(
        "a person never comes back from a robot whose episode has ended",
        _PERSON,
        "        self._people.free += int((self._held[rows] > 0).sum())",
        "        pass",
        (f"{_ON_PERSON}test_one_person_is_with_one_robot_at_a_time_and_free_again_afterwards",),
    ),
    Fault(
        "the noise of a person is that of another seed",
        _SUPERVISED,
        "np.random.default_rng([int(seed), 1])",
        "np.random.default_rng([int(row), 1])",
        (f"{_ON_PERSON}test_the_noise_of_a_person_follows_from_the_seed_and_stays_within_the_bounds",),
    ),
    Fault(
        "what a person did is not said",
        _SUPERVISED,
        "intervened=person & valid",
        "intervened=person & ~valid",
        (f"{_ON_PERSON}test_a_person_takes_over_after_what_is_seen_and_a_delay_and_hands_back_when_it_is_better",),
    ),
    Fault(
        "demonstrations are not imitated beside corrections",
        "vla_rl/recipes/corrected.py",
        "wanted = context.demonstrations and self.algorithm.alpha",
        "wanted = not context.demonstrations",
        ("tests/recipes/test_corrected.py::test_demonstrations_are_imitated_beside_corrections",),
    ),
)
