"""Faults in imagined environments: steps, ends, uncertainty, and where imagined rollouts start."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _ROWS = "world_models/env.py", "vla_rl/contract/rows.py"
_UNCERTAIN, _KEYFRAMES, _INITIAL = (
    "world_models/uncertainty.py",
    "world_models/keyframes.py",
    "world_models/initial_states.py",
)
_ON_ENV = "tests/world_models/test_env.py::"
_ON_UNCERTAIN, _ON_KEYFRAMES = "tests/world_models/test_uncertainty.py::", "tests/world_models/test_keyframes.py::"
_CONTRACT = f"{_ON_ENV}test_an_imagined_rollout_keeps_the_contract_of_a_simulator"
_ALONE = f"{_ON_ENV}test_a_reset_of_one_row_touches_no_other"
_UNCERTAINS = f"{_ON_ENV}test_uncertainty_truncates_and_is_no_failure"

FAULTS = (
    Fault(
        "a reset restarts the call of every row",
        _ENV,
        "self._known[index], self._depth[index], self._start_time[index] = 0, 0, time",
        "self._known[:], self._depth[:], self._start_time[index] = 0, 0, time",
        (_ALONE,),
    ),
    Fault(
        "the same noise in every call",
        _ENV,
        "int(self._depth[env_id]), self.config.noise_seed",
        "0, self.config.noise_seed",
        (f"{_ON_ENV}test_noise_is_new_in_every_call",),
    ),
    Fault(
        "noise is a function of the environment instead of its seed",
        _ENV,
        "np.random.SeedSequence([int(self._book.seed[env_id])",
        "np.random.SeedSequence([env_id",
        (_CONTRACT,),
    ),
    Fault(
        "calls are not padded to one batch size",
        _ENV,
        "padded = np.concatenate([env_ids, np.full(self.config.batch_size - len(env_ids), env_ids[0])])",
        "padded = env_ids",
        (f"{_ON_ENV}test_an_environment_does_not_depend_on_their_number",),
    ),
    Fault(
        "a snapshot forgets the actions of the call",
        _ENV,
        '"depth", "actions", "known"',
        '"depth", "known"',
        (_CONTRACT,),
    ),
    Fault(
        "the first context frame moves along",
        _ENV,
        "self._context_frames[rows, 1:-1] = self._context_frames[rows, 2:]",
        "self._context_frames[rows, :-1] = self._context_frames[rows, 1:]",
        (f"{_ON_ENV}test_the_first_frame_is_always_in_the_context",),
    ),
    Fault(
        "success is evaluated inside a call",
        _ENV,
        "whole = self._known[env_ids] == self.model.config.frames",
        "whole = self._known[env_ids] > 0",
        (f"{_ON_ENV}test_uncertainty_comes_before_success",),
    ),
    Fault(
        "an uncertain success counts",
        _ENV,
        "np.where(uncertain, _UNCERTAIN, cause), success & ~uncertain",
        "np.where(uncertain & ~success, _UNCERTAIN, cause), success",
        (f"{_ON_ENV}test_uncertainty_comes_before_success",),
    ),
    Fault(
        "resampling has the same noise",
        _ENV,
        "noise_seed=other.noise_seed + i + 1)",
        "noise_seed=other.noise_seed)",
        (f"{_ON_ENV}test_a_success_that_flips_in_a_second_imagined_rollout_is_none",),
    ),
    Fault(
        "a success counts although resampling fails",
        _ENV,
        "self._book.end(env_ids, success & ~flipped, np.where(flipped, _UNCERTAIN, cause))",
        "self._book.end(env_ids, success, cause)",
        (f"{_ON_ENV}test_a_success_that_flips_in_a_second_imagined_rollout_is_none",),
    ),
    Fault("uncertainty is a failure", _ROWS, "| (cause >= self._first_cut)", "", (_UNCERTAINS,)),
    Fault(
        "uncertainty is compared with the limit of the depth before",
        _ENV,
        "self.limits.at(self._depth[env_ids])",
        "self.limits.at(np.maximum(self._depth[env_ids] - 1, 0))",
        (_UNCERTAINS,),
    ),
    Fault(
        "the deadline is forgotten",
        _ENV,
        "env_ids[whole | self._out_of_time(env_ids) | self._too_late(env_ids)]",
        "env_ids[whole | self._out_of_time(env_ids)]",
        (f"{_ON_ENV}test_time_is_up_in_the_middle_of_a_call",),
    ),
    Fault(
        "keyframes are the share that is left",
        _INITIAL,
        "chooser.random() < keyframe_share",
        "chooser.random() >= keyframe_share",
        (f"{_ON_ENV}test_seeds_choose_where_imagined_rollouts_begin",),
    ),
    Fault(
        "a limit without the correction for few uncertainties",
        _UNCERTAIN,
        "np.ceil((len(uncertainties) + 1) * quantile)",
        "np.ceil(len(uncertainties) * quantile)",
        (f"{_ON_UNCERTAIN}test_a_limit_is_the_conformal_quantile",),
    ),
    Fault(
        "all modes have the same weight in the uncertainty",
        _UNCERTAIN,
        "share = log_probs.exp()",
        "share = log_probs.exp().mean(1, keepdim=True).expand_as(log_probs)",
        (f"{_ON_UNCERTAIN}test_disagreement_is_the_weighed_spread_of_the_modes",),
    ),
    Fault(
        "an imagined rollout starts at the event itself",
        _KEYFRAMES,
        "np.maximum(offsets - config.lead, 0)",
        "np.maximum(offsets, 0)",
        (f"{_ON_KEYFRAMES}test_a_gripper_that_closes_is_an_event_and_the_imagined_rollout_begins_before_it",),
    ),
    Fault(
        "a failure diverges where it first fell behind",
        _KEYFRAMES,
        "hopeful[-1:] + 1",
        "hopeful[:1] + 1",
        (f"{_ON_KEYFRAMES}test_a_failure_diverges_after_its_last_moment_like_a_success",),
    ),
    Fault(
        "keyframes at the end of an episode",
        _KEYFRAMES,
        "moments[moments < end - config.tail]",
        "moments",
        (f"{_ON_KEYFRAMES}test_a_keyframe_is_never_at_the_end_of_an_episode",),
    ),
    Fault(
        "what is over inside a call goes on to its end",
        _ENV,
        "complete = np.union1d(complete, self._decided(self._due(env_ids)))",
        "complete = complete",
        ("tests/world_models/test_env.py::test_success_and_failure_inside_a_call_end_it_where_they_are_looked_at",),
    ),
    Fault(
        "whatever is shown may end a rollout",
        _ENV,
        "complete = np.union1d(complete, self._decided(self._due(env_ids)))",
        "complete = np.union1d(complete, self._decided(env_ids if self.config.outcome_every else env_ids[:0]))",
        ("tests/world_models/test_env.py::test_success_and_failure_inside_a_call_end_it_where_they_are_looked_at",),
    ),
    Fault(
        "a replay reports its last look alone",
        "world_models/replay.py",
        "success = np.maximum(inside, env.outcome[:, 0]) if looks[stop] else inside",
        "success = env.outcome[:, 0]",
        ("tests/world_models/test_replay.py::test_a_replay_reports_the_highest_success_at_which_a_rollout_would_look",),
    ),
    Fault(
        "a replay counts looks of the call before",
        "world_models/replay.py",
        "inside = success if first % frames else np.zeros_like(success)",
        "inside = success",
        ("tests/world_models/test_replay.py::test_a_replay_reports_the_highest_success_at_which_a_rollout_would_look",),
    ),
)
