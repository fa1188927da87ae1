"""Faults in what learns from a reward model's eyes, and in what becomes of episodes that were cut off."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _CLI = "vla_rl/rewards/env.py", "vla_rl/recipes/rewarded.py"
_MEMBERS, _GROUPS = "vla_rl/experience/members.py", "vla_rl/experience/groups.py"
_RELATIVE, _COLUMNS = "vla_rl/algorithms/group_relative.py", "vla_rl/experience/columns.py"
_SEEN, _WITHIN = "tests/rewards/test_env.py::", "tests/cli/test_rewarded.py::"
_TOY = "tests/recipes/imagine/test_truncated.py::"
_DIFFERENCES = f"{_SEEN}test_progress_is_paid_by_its_differences_with_steps_back_and_waiting"
_WEIGHTS = f"{_SEEN}test_weights_of_progress_of_done_and_of_what_the_environment_pays_itself"
_FRESH = f"{_SEEN}test_a_new_episode_begins_at_its_own_first_frame_and_the_others_go_on"
_INSIDE = f"{_SEEN}test_done_ends_an_episode_inside_a_chunk_and_the_row_idles"
_HOLD = f"{_SEEN}test_done_takes_as_many_frames_as_the_model_wants_and_is_forgotten_with_the_episode"
_LIMIT = f"{_SEEN}test_done_at_the_time_limit_is_a_success_and_ends_of_the_environment_stay"
_TOLD = f"{_SEEN}test_what_was_executed_and_who_intervened_are_told_up_to_the_end"
_SAVED = f"{_SEEN}test_a_snapshot_goes_on_in_another_row_and_another_environment"
_UNFIT = f"{_SEEN}test_a_snapshot_that_does_not_fit_changes_nothing"
_PUSH = f"{_TOY}test_the_expected_gradient_towards_the_arm_that_is_cut_off"
_KEPT = f"{_TOY}test_cut_off_members_stay_in_their_groups_and_are_counted"

_PAID = (
    Fault(
        "progress is paid and not its differences",
        _ENV,
        'self.weights.progress * (self._judged["progress"] - before)',
        'self.weights.progress * self._judged["progress"]',
        (_DIFFERENCES,),
    ),
    Fault(
        "steps back cost nothing",
        _ENV,
        'self.weights.progress * (self._judged["progress"] - before)',
        'self.weights.progress * np.maximum(self._judged["progress"] - before, 0)',
        (_DIFFERENCES,),
    ),
    Fault(
        "all differences are from the chunk's first frame",
        _ENV,
        'before = self._judged["progress"]',
        'before = self._judged["progress"] if not i else before',
        (_DIFFERENCES,),
    ),
    Fault(
        "the environment's own reward is added in full",
        _ENV,
        "gained + self.weights.own * own[:, i]",
        "gained + own[:, i]",
        (_WEIGHTS, _DIFFERENCES),
    ),
    Fault(
        "done is paid as progress is",
        _ENV,
        "self.weights.done * done",
        "self.weights.progress * done",
        (_WEIGHTS,),
    ),
    Fault(
        "the first frame of an episode is not seen",
        _ENV,
        "self._judge(obs, fresh)",
        "fresh.any()",
        (_FRESH, _DIFFERENCES),
    ),
    Fault(
        "a reset makes every row begin anew",
        _ENV,
        "self._judge(obs, fresh)",
        "self._judge(obs, np.ones_like(fresh))",
        (_HOLD,),
    ),
    Fault(
        "everybody is told the first task",
        _ENV,
        "self.spec.tasks[task] for task in",
        "self.spec.tasks[0] for task in",
        (f"{_SEEN}test_the_instruction_is_that_of_each_row",),
    ),
)

_ENDED = (
    Fault(
        "what follows done in a chunk is valid",
        _ENV,
        'valid[:, i] &= ~self._judged["done"]',
        "valid[:, i] &= True",
        (_INSIDE, _WEIGHTS),
    ),
    Fault(
        "a row that is done shows what goes on",
        _ENV,
        "item[held] = self._shown[name][held]",
        "item[held] = item[held]",
        (_INSIDE,),
    ),
    Fault(
        "done lasts until the next episode is over",
        _ENV,
        'self._judged["done"] = self._judged["done"] & ~fresh',
        'self._judged["done"] = self._judged["done"].copy()',
        (_INSIDE,),
    ),
    Fault(
        "the model's memory outlives the episode",
        _ENV,
        "self._memory = dict(self.reward.reset_state(self._memory, np.flatnonzero(fresh)))",
        "self._memory = dict(self._memory)",
        (_HOLD,),
    ),
    Fault(
        "done and out of time at once is both",
        _ENV,
        "truncated=step.truncated & ~done",
        "truncated=step.truncated",
        (_LIMIT,),
    ),
    Fault(
        "the environment's own ends are not heeded",
        _ENV,
        "terminated=step.terminated | done",
        "terminated=done",
        (_LIMIT,),
    ),
    Fault(
        "frames that only repeat are judged",
        _ENV,
        "done: np.ndarray = found.done[:, 0] & new",
        "done: np.ndarray = found.done[:, 0]",
        (f"{_SEEN}test_what_a_model_says_of_frames_that_only_repeat_is_not_heard",),
    ),
    Fault(
        "what a chunk had left is told as executed",
        _ENV,
        "executed=np.where(valid[..., None], step.executed, np.float32(0))",
        "executed=step.executed",
        (_TOLD,),
    ),
    Fault(
        "interventions after the end are told",
        _ENV,
        "intervened=step.intervened & valid",
        "intervened=step.intervened",
        (_TOLD,),
    ),
    Fault(
        "rows that are done get the policy's actions",
        _ENV,
        "return np.where(done[:, None, None], rest, action)",
        "return action",
        (_TOLD,),
    ),
    Fault(
        "the model's memory is not restored",
        _ENV,
        "self._memory, self._judged, self._shown = (",
        "_, self._judged, self._shown = (",
        (_SAVED,),
    ),
    Fault(
        "what a row shows is not saved",
        _ENV,
        "_JUDGED: self._judged, _SHOWN: self._shown}",
        "_JUDGED: self._judged, _SHOWN: {}}",
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
        "what lies beyond the end of cut-off members is forgotten",
        _RELATIVE,
        "group_advantages(returns + truncation_return(rollout), rollout.seeds[0], self.baseline)",
        "group_advantages(returns, rollout.seeds[0], self.baseline)",
        (_PUSH,),
    ),
    Fault(
        "what lies beyond the end counts for the neighbour",
        _RELATIVE,
        "value[rollout.final_index[:, 1]] =",
        "value[rollout.final_index[:, 0]] =",
        (_PUSH,),
    ),
    Fault(
        "groups are mixed by what was earned alone",
        _MEMBERS,
        "return self.reward + self.truncation_return",
        "return self.reward",
        (f"{_TOY}test_groups_are_mixed_by_what_their_members_are_worth",),
    ),
    Fault(
        "an end by doubt is a failure",
        _COLUMNS,
        "truncated=end & truncated,",
        "truncated=end & False,",
        (_KEPT,),
    ),
    Fault(
        "the share that is cut off is that of decisions",
        _RELATIVE,
        "rollout.truncated.any(0).double().mean()",
        "rollout.truncated.double().mean()",
        ("tests/recipes/imagine/test_grpo.py::test_members_of_a_group_begin_alike_and_those_in_doubt_are_kept",),
    ),
    Fault(
        "truncations are counted among the delivered only",
        _GROUPS,
        "sum(member.final is not None for member in members)",
        "sum(part.truncated.sum() for part in parts[:wanted])",
        ("tests/experience/test_groups.py::test_counters_tell_what_was_played_thrown_away_and_carried",),
    ),
)

FAULTS = (*_PAID, *_ENDED, *_CUT_OFF)
