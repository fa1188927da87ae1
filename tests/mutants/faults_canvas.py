"""Faults in what makes a world model general: sizes, clocks, no robot, Gymnasium; and in self-imitation."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CANVAS, _ENV, _MODEL = "world_models/canvas.py", "world_models/env.py", "world_models/model.py"
_CLASSIFIER, _EPSILON, _GYM = (
    "world_models/mode_classifier.py",
    "vla_rl/policies/epsilon_random.py",
    "sims/gym.py",
)
_ON_CANVAS, _ON_ENV = "tests/world_models/test_canvas.py::", "tests/world_models/test_env.py::"
_KEYFRAME = f"{_ON_ENV}test_a_rollout_from_a_keyframe_goes_on_with_its_episodes_clock"
_CALLS = f"{_ON_ENV}test_every_whole_and_certain_call_is_told_of_however_long_chunks_are"
_PIXELS = "tests/recipes/imagine/test_general.py::"
_SUCCESS = "tests/sims/test_gym.py::test_an_episode_whose_rewards_add_up_to_enough_has_succeeded"

FAULTS = (
    Fault(
        "pictures are given back at the model's size",
        _CANVAS,
        "whole = resized(part.movedim(1, -1), (height, width))",
        "whole = part.movedim(1, -1)",
        (f"{_ON_CANVAS}test_several_sizes_are_predicted_at_the_largest_and_given_back_at_their_own",),
    ),
    Fault(
        "a picture is made smaller by picking pixels",
        _CANVAS,
        'mode="bilinear", antialias=True',
        'mode="bilinear", antialias=False',
        (f"{_ON_CANVAS}test_making_a_picture_smaller_averages_it",),
    ),
    Fault(
        "cameras are stacked in the order that they are declared in",
        _CANVAS,
        "for name in sorted(spec.images)}",
        "for name in spec.images}",
        (f"{_ON_CANVAS}test_pictures_of_one_size_are_stacked_by_name_and_no_pixel_changes",),
    ),
    Fault(
        "the first camera's size is that of all",
        _CANVAS,
        "max(cameras.values(), key=lambda shape: shape[0] * shape[1])",
        "next(iter(cameras.values()))",
        (f"{_ON_CANVAS}test_several_sizes_are_predicted_at_the_largest_and_given_back_at_their_own",),
    ),
    Fault(
        "a rollout from a keyframe begins at time 0",
        _ENV,
        "self._book.time[index] = time",
        "self._book.time[index] = 0",
        (_KEYFRAME,),
    ),
    Fault(
        "the horizon is the episode's",
        _ENV,
        "self._age(env_ids) >= self.config.horizon",
        "self._book.time[env_ids] >= self.config.horizon",
        (_KEYFRAME,),
    ),
    Fault(
        "the deadline is the rollout's",
        _ENV,
        "self._book.time[env_ids] >= (np.inf if deadline is None else deadline)",
        "self._age(env_ids) >= (np.inf if deadline is None else deadline)",
        (_KEYFRAME,),
    ),
    Fault(
        "a success from a keyframe is resampled as if from the beginning",
        _ENV,
        'initial["start_time"][index])',
        '0 * initial["start_time"][index])',
        (f"{_ON_ENV}test_a_success_from_a_keyframe_is_resampled_from_there",),
    ),
    Fault(
        "the alarm listens to uncertain calls",
        _ENV,
        "self._to_device(np.setdiff1d(whole, uncertain))",
        "self._to_device(whole)",
        (_CALLS,),
    ),
    Fault(
        "the alarm compares a picture with itself",
        _ENV,
        "self.on_call(self._context_frames[certain, -1], self._picture[certain]",
        "self.on_call(self._picture[certain], self._picture[certain]",
        (_CALLS,),
    ),
    Fault(
        "policies see the entry that stands for no proprioception",
        _ENV,
        "rest = self._state[:, : self._entries]",
        "rest = self._state[:, :1]",
        (f"{_ON_ENV}test_without_proprioception_and_with_cameras_of_two_sizes_it_keeps_the_contract",),
    ),
    Fault(
        "the revision of another picture is the uncertainty",
        _MODEL,
        "estimates.append(select_step(denoised.clean, self.call.slot(known)))",
        "estimates.append(denoised.clean[:, 0])",
        ("tests/world_models/test_model.py::test_uncertainty_of_pictures_is_what_the_last_denoising_step_revises",),
    ),
    Fault(
        "a revision is the largest one",
        "world_models/uncertainty.py",
        "(last - first).float().square().mean((1, 2, 3)).sqrt()",
        "(last - first).float().abs().amax((1, 2, 3))",
        ("tests/world_models/test_uncertainty.py::test_revision_is_the_root_mean_square_change_of_an_estimate",),
    ),
    Fault(
        "whole pictures are shifted by more than a pixel",
        _CLASSIFIER,
        "steps = (3.0 * uniform(",
        "steps = (0.0 + 2.0 * uniform(",
        (
            "tests/world_models/test_mode_classifier.py::"
            "test_whole_pictures_are_shifted_by_a_pixel_at_most_while_learning",
        ),
    ),
    Fault(
        "success at the end of a short episode is no horizon",
        "vla_rl/recipes/imagine/calibrated_model.py",
        "return [*range(frames, last, frames), last]",
        "return list(range(frames, last + 1, frames))",
        (f"{_PIXELS}test_the_last_horizon_may_end_in_the_middle_of_a_call",),
    ),
    Fault(
        "what can be seen counts as foresight",
        "vla_rl/recipes/imagine/calibrated_model.py",
        "return auroc(attempts, frames)",
        "return auroc(attempts, 0)",
        ("tests/recipes/imagine/test_comparison.py::test_foresight_is_the_auroc_of_what_is_not_decided_yet",),
    ),
    Fault(
        "of several actions the last is never drawn",
        _EPSILON,
        "(drawn * (high - low + 1.0)).floor()",
        "(drawn * (high - low)).floor()",
        ("tests/policies/test_epsilon_random.py::test_random_decisions_among_indices_are_whole_and_equally_likely",),
    ),
    Fault(
        "rewards of the episode before count",
        _GYM,
        "self._return[env_ids] = 0.0",
        "self._return[env_ids] += 0.0",
        (_SUCCESS,),
    ),
    Fault(
        "an episode has succeeded before it ends",
        _GYM,
        "ended = np.zeros(env_ids.size, bool), (cause > 0) & (cause != DIVERGED)",
        "ended = np.zeros(env_ids.size, bool), (cause != DIVERGED)",
        (_SUCCESS,),
    ),
    Fault(
        "a latent model learns as often as the critics, however often it should",
        "vla_rl/recipes/few/selection.py",
        "due, self._counted = divmod(self._counted + steps, self.every)",
        "due, self._counted = steps, 0",
        ("tests/recipes/test_few_uses.py::test_a_latent_model_takes_a_step_in_so_many_of_the_critics",),
    ),
    Fault(
        "steps that a rollout leaves are forgotten",
        "vla_rl/recipes/few/selection.py",
        "due, self._counted = divmod(self._counted + steps, self.every)",
        "due = steps // self.every",
        ("tests/recipes/test_few_uses.py::test_a_latent_model_takes_a_step_in_so_many_of_the_critics",),
    ),
    Fault(
        "what is uncertain counts as a failure where policies are ranked",
        "vla_rl/recipes/imagine/rank.py",
        "ImaginedEnvFactory(model, pool, None, imagination)",
        "ImaginedEnvFactory(model, pool, run.calibrated.limits, imagination)",
        ("tests/recipes/imagine/test_rank.py::test_it_is_the_ranking_of_what_they_do_in_the_world_model",),
    ),
    Fault(
        "policies are ranked by what they do within training's deadline",
        "vla_rl/recipes/imagine/rank.py",
        "horizon=_length(run, config), deadline=None, resamples=0)",
        "horizon=_length(run, config), resamples=0)",
        ("tests/recipes/imagine/test_rank.py::test_it_is_the_ranking_of_what_they_do_in_the_world_model",),
    ),
    Fault(
        "of an episode that has not ended the outcome is guessed",
        "vla_rl/algorithms/self_imitation.py",
        "found, won = torch.zeros_like(ends), torch.zeros_like(ends[0])",
        "found, won = torch.zeros_like(ends), torch.ones_like(ends[0])",
        ("tests/algorithms/test_self_imitation.py::test_whole_successes_are_kept_and_nothing_else",),
    ),
    Fault(
        "what a breakdown ended has succeeded",
        "vla_rl/algorithms/self_imitation.py",
        "won = torch.where(ends[t], rollout.success[t] & active[t], won)",
        "won = torch.where(ends[t], rollout.success[t], won)",
        ("tests/algorithms/test_self_imitation.py::test_whole_successes_are_kept_and_nothing_else",),
    ),
    Fault(
        "an improvement goes on from the last weights",
        "vla_rl/algorithms/self_imitation.py",
        "parameter.copy_(self._first[name])",
        "parameter.copy_(parameter.clone())",
        (
            "tests/algorithms/test_self_imitation.py::"
            "test_it_improves_after_so_many_rollouts_from_the_first_weights_on_all_successes",
        ),
    ),
    Fault(
        "the learning rate does not fall",
        "vla_rl/algorithms/self_imitation.py",
        "self.lr = 0.5 * highest * (1.0 + math.cos(math.pi * step / steps))",
        "self.lr = highest",
        ("tests/algorithms/test_self_imitation.py::test_the_learning_rate_falls_to_nothing_along_a_cosine",),
    ),
    Fault(
        "a resumed run improves from other first weights",
        "vla_rl/algorithms/self_imitation.py",
        'self._first, self.rollouts = dict(state["first"]), state["rollouts"]',
        'self.rollouts = state["rollouts"]',
        ("tests/algorithms/test_self_imitation.py::test_a_resumed_learner_is_the_same_bit_for_bit",),
    ),
    Fault(
        "a critic is blind where its policy sees",
        "vla_rl/recipes/trainers.py",
        "vision = policy.new_vision() if isinstance(policy, ReadsPixels) else None",
        "vision = None",
        (f"{_PIXELS}test_the_critic_of_a_policy_of_pixels_reads_pixels",),
    ),
    Fault(
        "a camera without a size gets the smallest",
        "sims/mujoco/env.py",
        "missing = [name for name in cameras if name not in given]",
        "missing = [name for name in cameras if name not in given and given.setdefault(name, 1) > 1]",
        ("tests/sims/test_camera_sizes.py::test_a_camera_without_a_size_is_refused",),
    ),
    Fault(
        "policies are ranked from half of the starts",
        "vla_rl/recipes/imagine/saved_run.py",
        "return Trajectories.joined([self.held_out, calibration])",
        "return self.held_out",
        ("tests/recipes/imagine/test_rank.py::test_less_can_be_asked_for_and_nonsense_is_refused",),
    ),
)
