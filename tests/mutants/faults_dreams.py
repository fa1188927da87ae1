"""Faults in imagined environments, world models and what they learn from."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _MODEL, _UNET = "world_models/env.py", "world_models/model.py", "world_models/backbones/unet.py"
_ROBOT, _ON_ROBOT = "world_models/robot.py", "tests/world_models/test_robot.py::"
_PLACES, _ON_PLACES = "world_models/places.py", "tests/world_models/test_places.py::"
_DOUBT, _KEYFRAMES, _STARTS = "world_models/uncertainty.py", "world_models/keyframes.py", "world_models/starts.py"
_TRACES, _ROWS = "vla_rl/experience/traces.py", "vla_rl/contract/rows.py"
_ON_ENV, _ON_MODEL = "tests/world_models/test_env.py::", "tests/world_models/test_model.py::"
_ON_DOUBT, _ON_KEYFRAMES = "tests/world_models/test_uncertainty.py::", "tests/world_models/test_keyframes.py::"
_ON_TRACES = "tests/experience/test_traces.py::"
_CONTRACT = f"{_ON_ENV}test_a_dream_keeps_the_contract_of_a_simulator"
_ALONE = f"{_ON_ENV}test_a_reset_of_one_row_touches_no_other"
_BETTER = f"{_ON_MODEL}test_it_predicts_better_than_that_nothing_changes"
_DOUBTS = f"{_ON_ENV}test_doubt_truncates_and_is_no_failure"

FAULTS = (
    Fault(
        "a reset restarts the call of every row",
        _ENV,
        "self._known[index] = self._depth[index] = 0",
        "self._known[:] = self._depth[:] = 0",
        (_ALONE,),
    ),
    Fault(
        "the same noise in every call",
        _ENV,
        "int(self._depth[row]), self.config.noise",
        "0, self.config.noise",
        (f"{_ON_ENV}test_noise_is_new_in_every_call",),
    ),
    Fault(
        "noise belongs to the row instead of its seed",
        _ENV,
        "np.random.SeedSequence([int(self._book.seed[row])",
        "np.random.SeedSequence([row",
        (_CONTRACT,),
    ),
    Fault(
        "calls are as large as there are rows",
        _ENV,
        "padded = np.concatenate([rows, np.full(self.config.part - len(rows), rows[0])])",
        "padded = rows",
        (f"{_ON_ENV}test_rows_do_not_depend_on_how_many_there_are",),
    ),
    Fault(
        "a snapshot forgets the actions of the call",
        _ENV,
        '"depth", "actions", "known"',
        '"depth", "known"',
        (_CONTRACT,),
    ),
    Fault(
        "the reference frame moves along",
        _ENV,
        "self._seen[whole, 1:-1] = self._seen[whole, 2:]",
        "self._seen[whole, :-1] = self._seen[whole, 1:]",
        (f"{_ON_ENV}test_the_first_frame_is_always_seen",),
    ),
    Fault(
        "success is asked for inside a call",
        _ENV,
        "whole = self._known[rows] == self.model.config.frames",
        "whole = self._known[rows] > 0",
        (f"{_ON_ENV}test_doubt_comes_before_success",),
    ),
    Fault(
        "a doubtful success counts",
        _ENV,
        "np.where(unsure, _DOUBT, cause), success & ~unsure",
        "np.where(unsure & ~success, _DOUBT, cause), success",
        (f"{_ON_ENV}test_doubt_comes_before_success",),
    ),
    Fault(
        "a second dream has the first one's noise",
        _ENV,
        "noise=other.noise + i + 1)",
        "noise=other.noise)",
        (f"{_ON_ENV}test_a_success_that_flips_in_a_second_dream_is_none",),
    ),
    Fault(
        "a success that flips counts",
        _ENV,
        "self._book.end(rows, success & ~flipped, np.where(flipped, _DOUBT, cause))",
        "self._book.end(rows, success, cause)",
        (f"{_ON_ENV}test_a_success_that_flips_in_a_second_dream_is_none",),
    ),
    Fault("doubt is a failure", _ROWS, "| (cause >= self._first_cut)", "", (_DOUBTS,)),
    Fault(
        "doubt is compared with the limit of the depth before",
        _ENV,
        "self.limits.at(self._depth[rows])",
        "self.limits.at(np.maximum(self._depth[rows] - 1, 0))",
        (_DOUBTS,),
    ),
    Fault(
        "the deadline is forgotten",
        _ENV,
        "for limit in (self.config.horizon, self.config.deadline) if limit is not None",
        "for limit in (self.config.horizon,)",
        (f"{_ON_ENV}test_time_is_up_in_the_middle_of_a_call",),
    ),
    Fault(
        "keyframes are the share that is left",
        _STARTS,
        "chooser.random() < share",
        "chooser.random() >= share",
        (f"{_ON_ENV}test_seeds_choose_where_dreams_begin",),
    ),
    Fault(
        "a limit without the correction for few doubts",
        _DOUBT,
        "np.ceil((len(doubts) + 1) * quantile)",
        "np.ceil(len(doubts) * quantile)",
        (f"{_ON_DOUBT}test_a_limit_is_the_conformal_quantile",),
    ),
    Fault(
        "every candidate is as likely for doubt",
        _DOUBT,
        "share = odds.exp()[..., None]",
        "share = odds.exp().mean(1, keepdim=True).expand_as(odds)[..., None]",
        (f"{_ON_DOUBT}test_disagreement_is_the_weighed_spread_of_the_candidates",),
    ),
    Fault(
        "the noise that is kept is added twice",
        _MODEL,
        "guess.clean + following / level * (noisy - guess.clean)",
        "guess.clean + (noisy - guess.clean)",
        (f"{_ON_MODEL}test_a_step_keeps_the_noise_of_its_level",),
    ),
    Fault(
        "frames are noised the wrong way round",
        _MODEL,
        "noisy = (1.0 - share) * clean + share * noise",
        "noisy = share * clean + (1.0 - share) * noise",
        (_BETTER,),
    ),
    Fault(
        "actions beyond the known ones are told",
        "world_models/calls.py",
        "return torch.cat([actions * flag[..., None], flag[..., None]], -1)",
        "return torch.cat([actions, flag[..., None]], -1)",
        (f"{_ON_MODEL}test_actions_beyond_the_known_ones_change_nothing",),
    ),
    Fault(
        "the most likely candidate, always",
        _ROBOT,
        "return (odds.exp().cumsum(1) < share).sum(1).clamp_max(odds.shape[1] - 1)",
        "return odds.argmax(1)",
        (f"{_ON_ROBOT}test_odds_choose_by_the_share_of_a_normal",),
    ),
    Fault(
        "pictures are painted of all candidates at once",
        _MODEL,
        "moves, noisy, level = self._moves(before, state, told, known), noise, 1.0",
        "moves, noisy, level = self._moves(before, candidates.mean(1), told, known), noise, 1.0",
        (f"{_ON_MODEL}test_the_robot_is_where_it_was_decided_to_be",),
    ),
    Fault(
        "what did not happen surprises",
        _ROBOT,
        "(off * counts[:, None]).sum(2)",
        "off.sum(2)",
        (f"{_ON_ROBOT}test_surprise_is_the_likelihood_of_a_mixture_by_hand",),
    ),
    Fault(
        "a candidate far from everything learns nothing",
        _ROBOT,
        " + 0.1 * surprise(candidates, odds, wanted, counts, spread=1.0)",
        "",
        (f"{_ON_ROBOT}test_candidates_are_the_two_things_that_happen_and_not_their_mean",),
    ),
    Fault(
        "a look forgets what was known without it",
        _ROBOT,
        "return (guess.odds + seen).log_softmax(1)",
        "return seen.log_softmax(1)",
        (f"{_ON_ROBOT}test_before_it_is_learnt_a_look_changes_no_odds",),
    ),
    Fault(
        "every camera is looked at in the first one's place",
        _ROBOT,
        "grid = self.near + place.view(-1, 1, 1, 2)",
        "grid = self.near + place[:, :2].repeat(1, self.cameras).view(-1, 1, 1, 2)",
        (f"{_ON_ROBOT}test_every_camera_is_looked_at_where_the_robot_is_in_it_and_nowhere_else",),
    ),
    Fault(
        "a look goes to the first candidate",
        _ROBOT,
        "(odds.exp()[..., None] * ends).sum(1)",
        "ends[:, 0]",
        (f"{_ON_ROBOT}test_a_look_is_where_the_robot_will_be_on_average",),
    ),
    Fault(
        "a look goes the other way",
        _ROBOT,
        "grid = self.near + place.view(-1, 1, 1, 2)",
        "grid = self.near - place.view(-1, 1, 1, 2)",
        (f"{_ON_ROBOT}test_a_look_moves_with_the_robot",),
    ),
    Fault(
        "shifts are taken the wrong way round",
        _PLACES,
        "there = torch.fft.rfft2(template, s=size).conj()",
        "there = torch.fft.rfft2(template, s=size)",
        (f"{_ON_PLACES}test_it_is_found_within_a_pixel",),
    ),
    Fault(
        "height and width of a shift are swapped",
        _PLACES,
        "torch.tensor(sides[::-1])",
        "torch.tensor(sides)",
        (f"{_ON_PLACES}test_it_is_found_within_a_pixel",),
    ),
    Fault(
        "pictures are moved away instead of back",
        _PLACES,
        "grid + shift[:, None, None]",
        "grid - shift[:, None, None]",
        (f"{_ON_PLACES}test_it_is_found_within_a_pixel",),
    ),
    Fault(
        "what leaves a picture on one side returns on the other",
        _PLACES,
        "size = (2 * height, 2 * width)",
        "size = (height, width)",
        (f"{_ON_PLACES}test_it_is_found_within_a_pixel",),
    ),
    Fault(
        "the instruction is not heard",
        "world_models/heads.py",
        "seen = attended(self.norm(features), self.queries(task)",
        "task = torch.zeros_like(task)\n        seen = attended(self.norm(features), self.queries(task)",
        (f"{_ON_MODEL}test_success_is_told_under_the_instruction_that_was_given",),
    ),
    Fault(
        "the outcome is that of the moment before",
        _TRACES,
        "np.stack([traces.success[ahead], traces.failed[ahead], won], -1)",
        "np.stack([traces.success[ahead - 1], traces.failed[ahead - 1], won], -1)",
        (f"{_ON_TRACES}test_a_window_holds_what_was_seen_done_and_came_of_it",),
    ),
    Fault(
        "an action belongs to the moment after it",
        _TRACES,
        "traces.action[np.concatenate([now, ahead[:, :-1]], 1)]",
        "traces.action[ahead]",
        (f"{_ON_TRACES}test_a_window_holds_what_was_seen_done_and_came_of_it",),
    ),
    Fault(
        "a window looks into the episode before",
        _TRACES,
        "np.maximum(now[:, None] - back, begin)",
        "np.maximum(now[:, None] - back, 0)",
        (f"{_ON_TRACES}test_windows_stay_inside_their_episode",),
    ),
    Fault(
        "running out of time is a failure",
        _TRACES,
        "failed=last & terminated & (not success)",
        "failed=last & (not success)",
        (f"{_ON_TRACES}test_an_episode_has_every_moment_and_the_actions_between",),
    ),
    Fault(
        "a dream begins at the event itself",
        _KEYFRAMES,
        "np.maximum(offsets - config.lead, 0)",
        "np.maximum(offsets, 0)",
        (f"{_ON_KEYFRAMES}test_a_gripper_that_closes_is_an_event_and_the_dream_begins_before_it",),
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
        (f"{_ON_KEYFRAMES}test_something_is_left_to_happen_after_a_keyframe",),
    ),
    Fault(
        "the std of a squashed policy is not kept within bounds",
        "vla_rl/policies/squashed.py",
        "self.config.head, self.config.std, bounds)",
        "self.config.head, self.config.std)",
        ("tests/policies/test_squashed.py::test_the_std_stays_within_its_bounds",),
    ),
    Fault(
        "a metric passes for an entry of the line",
        "vla_rl/training/tracking.py",
        "if taken := sorted(line.keys() & metrics):",
        "if taken := []:",
        ("tests/training/test_trackers.py::test_a_metric_cannot_pass_for_an_entry_of_the_line",),
    ),
    Fault(
        "what is worse than imitation is not shown",
        "vla_rl/cli/compare_page.py",
        "if min(item.gains(before)) < 0]",
        "if max(item.gains(before)) < 0]",
        ("tests/cli/test_compare.py::test_what_is_worse_than_imitation_is_shown_as_such_with_the_reason",),
    ),
)
