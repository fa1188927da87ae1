"""Faults in environments with a reward model, and in truncated members of groups."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _CLI = "vla_rl/rewards/env.py", "vla_rl/recipes/rewarded.py"
_MEMBERS, _GROUPS = "vla_rl/experience/members.py", "vla_rl/experience/groups.py"
_RELATIVE, _COLUMNS = "vla_rl/algorithms/group_relative.py", "vla_rl/experience/columns.py"
_ON_ENV, _WITHIN = "tests/rewards/test_env.py::", "tests/recipes/test_rewarded.py::"
_TOY = "tests/recipes/imagine/test_truncated.py::"
_DIFFERENCES = f"{_ON_ENV}test_progress_is_rewarded_by_its_differences"
_WEIGHTS = f"{_ON_ENV}test_weights_of_progress_done_and_the_environments_own_reward"
_FRESH = f"{_ON_ENV}test_a_reset_starts_at_the_new_first_frame_and_leaves_other_rows_alone"
_INSIDE = f"{_ON_ENV}test_done_ends_an_episode_inside_a_chunk_and_the_row_idles"
_HOLD = f"{_ON_ENV}test_done_takes_as_many_frames_as_the_model_wants_and_is_reset_with_the_episode"
_LIMIT = f"{_ON_ENV}test_done_at_the_time_limit_is_a_success_and_the_environments_own_ends_stay"
_REPORTED = f"{_ON_ENV}test_executed_actions_and_interventions_are_reported_up_to_the_end"
_SAVED = f"{_ON_ENV}test_a_snapshot_continues_in_another_row_and_another_environment"
_UNFIT = f"{_ON_ENV}test_a_snapshot_that_does_not_fit_changes_nothing"
_PUSH = f"{_TOY}test_the_expected_gradient_towards_the_arm_that_is_cut_off"
_KEPT = f"{_TOY}test_cut_off_members_stay_in_their_groups_and_are_counted"

_PAID = (
    Fault(
        "progress is rewarded instead of its differences",
        _ENV,
        'self.weights.progress * (self._estimates["progress"] - before)',
        'self.weights.progress * self._estimates["progress"]',
        (_DIFFERENCES,),
    ),
    Fault(
        "lost progress costs nothing",
        _ENV,
        'self.weights.progress * (self._estimates["progress"] - before)',
        'self.weights.progress * np.maximum(self._estimates["progress"] - before, 0)',
        (_DIFFERENCES,),
    ),
    Fault(
        "all differences are taken from the chunk's first frame",
        _ENV,
        'before = self._estimates["progress"]',
        'before = self._estimates["progress"] if not i else before',
        (_DIFFERENCES,),
    ),
    Fault(
        "the environment's own reward is added unweighted",
        _ENV,
        "gained + self.weights.env * env_reward[:, i]",
        "gained + env_reward[:, i]",
        (_WEIGHTS, _DIFFERENCES),
    ),
    Fault(
        "done has the weight of progress",
        _ENV,
        "self.weights.done * done",
        "self.weights.progress * done",
        (_WEIGHTS,),
    ),
    Fault(
        "the first frame of an episode is not evaluated",
        _ENV,
        "self._evaluate(obs, is_reset)",
        "is_reset.any()",
        (_FRESH, _DIFFERENCES),
    ),
    Fault(
        "a reset evaluates every row",
        _ENV,
        "self._evaluate(obs, is_reset)",
        "self._evaluate(obs, np.ones_like(is_reset))",
        (_HOLD,),
    ),
    Fault(
        "every row gets the first instruction",
        _ENV,
        "self.spec.tasks[task] for task in",
        "self.spec.tasks[0] for task in",
        (f"{_ON_ENV}test_the_instruction_is_that_of_each_row",),
    ),
)

_ENDED = (
    Fault(
        "a failure of the environment becomes a success",
        _ENV,
        "& (failure != i)",
        "& (failure != -2)",
        (f"{_ON_ENV}test_a_failure_of_the_environment_at_the_same_action_stays_a_failure",),
    ),
    Fault(
        "every end of the environment is a failure",
        _ENV,
        "step.terminated & ~step.success & (self.env.spec.success is not None)",
        "step.done & ~step.success & (self.env.spec.success is not None)",
        (f"{_ON_ENV}test_a_failure_of_the_environment_at_the_same_action_stays_a_failure",),
    ),
    Fault(
        "a termination is a failure where no success exists",
        _ENV,
        "(self.env.spec.success is not None)",
        "True",
        (f"{_ON_ENV}test_without_a_notion_of_success_the_model_decides_how_a_termination_counts",),
    ),
    Fault(
        "actions do not reach the device",
        _ENV,
        "torch.from_numpy(action).to(self.env.spec.device)",
        "torch.from_numpy(action)",
        (f"{_ON_ENV}test_an_environment_on_a_device_is_converted_to_numpy",),
    ),
    Fault(
        "actions after done are valid",
        _ENV,
        'valid[:, i] &= ~self._estimates["done"]',
        "valid[:, i] &= True",
        (_INSIDE, _WEIGHTS),
    ),
    Fault(
        "a row that is done shows later frames",
        _ENV,
        "item[frozen] = self._displayed[name][frozen]",
        "item[frozen] = item[frozen]",
        (_INSIDE,),
    ),
    Fault(
        "done outlives the reset",
        _ENV,
        'self._estimates["done"] = self._estimates["done"] & ~is_reset',
        'self._estimates["done"] = self._estimates["done"].copy()',
        (_INSIDE,),
    ),
    Fault(
        "the model's state outlives the reset",
        _ENV,
        "self._reward_state = dict(self.reward.reset_state(self._reward_state, np.flatnonzero(is_reset)))",
        "self._reward_state = dict(self._reward_state)",
        (_HOLD,),
    ),
    Fault(
        "done at the time limit is terminated and truncated",
        _ENV,
        "truncated=step.truncated & ~done",
        "truncated=step.truncated",
        (_LIMIT,),
    ),
    Fault(
        "the environment's own ends are ignored",
        _ENV,
        "terminated=step.terminated | done",
        "terminated=done",
        (_LIMIT,),
    ),
    Fault(
        "repeated frames can be done",
        _ENV,
        "done: np.ndarray = found.done[:, 0] & new",
        "done: np.ndarray = found.done[:, 0]",
        (f"{_ON_ENV}test_the_output_for_repeated_frames_is_ignored",),
    ),
    Fault(
        "actions after the end are reported as executed",
        _ENV,
        "executed=np.where(valid[..., None], step.executed, np.float32(0))",
        "executed=step.executed",
        (_REPORTED,),
    ),
    Fault(
        "interventions after the end are reported",
        _ENV,
        "intervened=step.intervened & valid",
        "intervened=step.intervened",
        (_REPORTED,),
    ),
    Fault(
        "rows that are done get the policy's actions",
        _ENV,
        "action = np.where(done[:, None, None], zero, action)",
        "pass",
        (_REPORTED,),
    ),
    Fault(
        "the model's state is not restored",
        _ENV,
        "self._reward_state, self._estimates, self._displayed = (",
        "_, self._estimates, self._displayed = (",
        (_SAVED,),
    ),
    Fault(
        "the displayed observation is not saved",
        _ENV,
        "_DISPLAYED: self._displayed,",
        "_DISPLAYED: {},",
        (_SAVED,),
    ),
    Fault(
        "a snapshot that does not fit is half restored",
        _ENV,
        "arrays = {name: item.copy() for name, item in self._arrays().items()}",
        "arrays = self._arrays()",
        (_UNFIT,),
    ),
    Fault(
        "the environment for learning pays its own reward",
        _CLI,
        "return rewarded(self.trainer.build_env(context), model, self.weights)",
        "return self.trainer.build_env(context)",
        (f"{_WITHIN}test_only_the_environment_for_learning_is_rewarded",),
    ),
)

_CUT_OFF = (
    Fault(
        "cut-off members are left out of their groups",
        _MEMBERS,
        "for member in self.members])",
        "for member in self.members if member.final is None or member is self.members[0]])",
        (_KEPT, _PUSH),
    ),
    Fault(
        "the truncation value of cut-off members is left out",
        _RELATIVE,
        "group_advantages(returns + truncation_return(rollout), rollout.seeds[0], self.baseline)",
        "group_advantages(returns, rollout.seeds[0], self.baseline)",
        (_PUSH,),
    ),
    Fault(
        "the truncation value goes to the neighbour",
        _RELATIVE,
        "value[rollout.final_index[:, 1]] =",
        "value[rollout.final_index[:, 0]] =",
        (_PUSH,),
    ),
    Fault(
        "groups are mixed by their rewards without the truncation value",
        _MEMBERS,
        "return self.reward + self.truncation_return",
        "return self.reward",
        (f"{_TOY}test_truncation_values_decide_whether_a_group_is_mixed",),
    ),
    Fault(
        "a truncation by uncertainty is a failure",
        _COLUMNS,
        "truncated=end & truncated,",
        "truncated=end & False,",
        (_KEPT,),
    ),
    Fault(
        "the share that is cut off is that of decisions",
        _RELATIVE,
        "rollout.truncated.any(0)[mine].double().mean()",
        "rollout.truncated[:, mine].double().mean()",
        (
            "tests/recipes/imagine/test_grpo.py::test_members_of_a_group_have_one_initial_state_and_truncated_ones_are_kept",
        ),
    ),
    Fault(
        "truncations are counted among the delivered only",
        _GROUPS,
        "sum(member.final is not None for member in members)",
        "sum(part.truncated.sum() for part in parts[:wanted])",
        ("tests/experience/test_groups.py::test_counters_are_of_all_groups_played_replaced_and_carried",),
    ),
)

FAULTS = (*_PAID, *_ENDED, *_CUT_OFF)
