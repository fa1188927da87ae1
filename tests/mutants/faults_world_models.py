"""Faults in world models and in what they are trained on."""

from __future__ import annotations

from tests.mutants.fault import Fault

_MODEL, _UNET = "world_models/model.py", "world_models/backbones/unet.py"
_ROBOT, _ON_ROBOT = "world_models/robot.py", "tests/world_models/test_robot.py::"
_CLASSIFIER = "world_models/mode_classifier.py"
_ON_CLASSIFIER = "tests/world_models/test_mode_classifier.py::"
_REGISTRATION, _ON_REGISTRATION = (
    "world_models/image_registration.py",
    "tests/world_models/test_image_registration.py::",
)
_WINDOWS, _COLLECT = "vla_rl/experience/windows.py", "vla_rl/experience/collect.py"
_ON_MODEL, _ON_TRAJECTORIES = "tests/world_models/test_model.py::", "tests/experience/test_trajectories.py::"
_BETTER = f"{_ON_MODEL}test_it_predicts_better_than_that_nothing_changes"

FAULTS = (
    Fault(
        "a denoising step keeps the whole noise",
        _MODEL,
        "denoised.clean + next_level / level * (noisy - denoised.clean)",
        "denoised.clean + (noisy - denoised.clean)",
        (f"{_ON_MODEL}test_a_step_keeps_the_noise_of_its_level",),
    ),
    Fault(
        "signal and noise of a noisy frame are exchanged",
        _MODEL,
        "noisy = (1.0 - share) * clean + share * noise",
        "noisy = share * clean + (1.0 - share) * noise",
        (_BETTER,),
    ),
    Fault(
        "actions that are not known yet enter the action input",
        "world_models/types.py",
        "return torch.cat([actions * flag[..., None], flag[..., None]], -1)",
        "return torch.cat([actions, flag[..., None]], -1)",
        (f"{_ON_MODEL}test_actions_beyond_the_known_ones_change_nothing",),
    ),
    Fault(
        "the most likely mode, always",
        _ROBOT,
        "return (log_probs.exp().cumsum(1) < share).sum(1).clamp_max(log_probs.shape[1] - 1)",
        "return log_probs.argmax(1)",
        (f"{_ON_ROBOT}test_modes_are_sampled_by_the_cumulative_normal",),
    ),
    Fault(
        "pictures are predicted from the mean of all modes",
        _MODEL,
        "action_input, noisy, level = self._action_input(before, state, actions, known), noise, 1.0",
        "action_input, noisy, level = self._action_input(before, modes.mean(1), actions, known), noise, 1.0",
        (f"{_ON_MODEL}test_the_predicted_state_is_one_of_the_modes_with_their_probabilities",),
    ),
    Fault(
        "all entries of the state take the mode of the first",
        _MODEL,
        "selector(modes, log_probs, noise[:, 0].flatten(1)[:, : before.shape[1]])",
        "selector(modes, log_probs, noise[:, 0, 0, 0, :1].expand_as(before))",
        (f"{_ON_MODEL}test_every_entry_of_the_state_has_random_numbers_of_its_own",),
    ),
    Fault(
        "the modes of one entry explain all",
        _ROBOT,
        "return -(log_probs - 0.5 * off.sum(2)).logsumexp(1).sum(1)",
        "return -(log_probs - 0.5 * off.sum((2, 3))[..., None]).logsumexp(1).sum(1)",
        (f"{_ON_ROBOT}test_the_likelihood_is_the_mean_over_entries",),
    ),
    Fault(
        "sampling weights are those of the last action, recorded or not",
        _MODEL,
        "return disagreement(select_step(modes.transpose(1, 2), known - 1), log_probs)",
        "return disagreement(modes[:, :, -1], log_probs)",
        (f"{_ON_MODEL}test_mode_uncertainty_is_the_disagreement_of_the_state_dynamics",),
    ),
    Fault(
        "weighted batches ignore their weights",
        "vla_rl/training/fit.py",
        "yield torch.multinomial(weights, batch",
        "yield torch.multinomial(torch.ones_like(weights), batch",
        ("tests/training/test_fit.py::test_weighted_batches_take_each_as_often_as_its_share",),
    ),
    Fault(
        "the mode classifier is trained on all moments alike",
        "vla_rl/training/world_model.py",
        "recorded, others = weighted(weights, half, generator)",
        "recorded, others = weighted(torch.ones_like(weights), half, generator)",
        ("tests/training/test_world_model.py::test_crops_are_sampled_where_the_modes_are_uncertain",),
    ),
    Fault(
        "entries that were not recorded enter the likelihood",
        _ROBOT,
        ".square() * counts[:, None, :, None]",
        ".square()",
        (f"{_ON_ROBOT}test_the_likelihood_of_a_mixture_by_hand",),
    ),
    Fault(
        "a mode far from all data gets no gradient",
        _ROBOT,
        "return near + 0.1 * mixture_nll(modes, log_probs, target, counts, spread=1.0)",
        "return near",
        (f"{_ON_ROBOT}test_modes_are_the_two_recorded_outcomes_and_not_their_mean",),
    ),
    Fault(
        "the mode classifier forgets the state dynamics",
        _CLASSIFIER,
        "return (prediction.log_probs + evidence).log_softmax(1)",
        "return evidence.log_softmax(1)",
        (f"{_ON_CLASSIFIER}test_a_new_classifier_leaves_the_probabilities_of_the_modes",),
    ),
    Fault(
        "every camera is cropped at the first one's position",
        _CLASSIFIER,
        "grid = self.crop_grid + center.view(-1, 1, 1, 2)",
        "grid = self.crop_grid + center[:, :2].repeat(1, self.cameras).view(-1, 1, 1, 2)",
        (f"{_ON_CLASSIFIER}test_the_classifier_reads_every_camera_around_the_robot_only",),
    ),
    Fault(
        "the crop is at the first mode",
        _ROBOT,
        "(log_probs.exp() * ends).sum(1)",
        "ends[:, 0]",
        (f"{_ON_ROBOT}test_the_crop_is_at_the_mean_predicted_position",),
    ),
    Fault(
        "the crop is on the other side",
        _CLASSIFIER,
        "grid = self.crop_grid + center.view(-1, 1, 1, 2)",
        "grid = self.crop_grid - center.view(-1, 1, 1, 2)",
        (f"{_ON_CLASSIFIER}test_the_crop_moves_with_the_robot",),
    ),
    Fault(
        "shifts are taken the wrong way round",
        _REGISTRATION,
        "spectrum = torch.fft.rfft2(template, s=size).conj()",
        "spectrum = torch.fft.rfft2(template, s=size)",
        (f"{_ON_REGISTRATION}test_the_robot_is_found_within_a_pixel",),
    ),
    Fault(
        "height and width of a shift are swapped",
        _REGISTRATION,
        "[2.0 * x / width, 2.0 * y / height]",
        "[2.0 * x / height, 2.0 * y / width]",
        (f"{_ON_REGISTRATION}test_the_robot_is_found_within_a_pixel",),
    ),
    Fault(
        "pictures are moved away instead of back",
        _REGISTRATION,
        "grid + shift[:, None, None]",
        "grid - shift[:, None, None]",
        (f"{_ON_REGISTRATION}test_the_robot_is_found_within_a_pixel",),
    ),
    Fault(
        "what leaves a picture on one side returns on the other",
        _REGISTRATION,
        "size = (2 * height, 2 * width)",
        "size = (height, width)",
        (f"{_ON_REGISTRATION}test_the_robot_is_found_within_a_pixel",),
    ),
    Fault(
        "a few wrong shifts move the registered position",
        _REGISTRATION,
        "weight = 1.0 / (1.0 + (off / scale).square())",
        "weight = torch.ones_like(off)",
        (f"{_ON_REGISTRATION}test_pictures_without_the_robot_do_not_move_its_position",),
    ),
    Fault(
        "of two inputs that report the same position one is used",
        _REGISTRATION,
        "light = ridge * torch.eye(",
        "light = 1e-6 * torch.eye(",
        (f"{_ON_REGISTRATION}test_two_inputs_with_the_same_position_get_half_the_weight_each",),
    ),
    Fault(
        "the registration is fitted again under a trained classifier",
        _CLASSIFIER,
        "if self.registration_weight.any():",
        "if False:",
        (f"{_ON_MODEL}test_the_registration_is_fitted_once",),
    ),
    Fault(
        "an imagined episode starts again in every call",
        "vla_rl/training/world_model.py",
        "batch = context_at(imagined, part, frames, context)",
        "batch = context_at(trajectories, part, frames, context)",
        ("tests/training/test_world_model.py::test_imagined_episodes_are_as_long_as_the_recorded_ones",),
    ),
    Fault(
        "all imagined episodes start at the first step",
        "vla_rl/training/world_model.py",
        "np.minimum(begins + offset, ends - 1)",
        "begins",
        ("tests/training/test_world_model.py::test_imagined_episodes_are_as_long_as_the_recorded_ones",),
    ),
    Fault(
        "cameras of an imagined episode are mixed up",
        "vla_rl/training/world_model.py",
        "sorted(imagined.images), np.split(",
        "imagined.images, np.split(",
        ("tests/training/test_world_model.py::test_imagined_episodes_are_as_long_as_the_recorded_ones",),
    ),
    Fault(
        "the mode classifier is trained on recorded pictures alone",
        "vla_rl/training/world_model.py",
        "call_batch(imagined.trajectories, table, other.numpy())",
        "call_batch(trajectories, table, other.numpy())",
        ("tests/training/test_world_model.py::test_half_of_the_training_crops_are_imagined",),
    ),
    Fault(
        "the outcome ignores the instruction",
        "world_models/heads.py",
        "found = attended(self.norm(features), self.queries(task)",
        "task = torch.zeros_like(task)\n        found = attended(self.norm(features), self.queries(task)",
        (f"{_ON_MODEL}test_success_is_reported_under_the_instruction_that_was_given",),
    ),
    Fault(
        "pictures that are only looked at are denoised as often as those that calls go on from",
        "world_models/env.py",
        "parts += [self._call(part, self.config.mid_call_steps) for part",
        "parts += [self._call(part, 0) for part",
        ("tests/world_models/test_env.py::test_pictures_that_are_only_looked_at_are_denoised_in_one_step",),
    ),
    Fault(
        "an outcome is read from a picture that was denoised in one step",
        "world_models/env.py",
        "parts = [self._call(part, 0) for part",
        "parts = [self._call(part, 1) for part",
        ("tests/world_models/test_env.py::test_pictures_that_are_only_looked_at_are_denoised_in_one_step",),
    ),
    Fault(
        "the outcome is that of the moment before",
        _WINDOWS,
        "np.stack([trajectories.success[future], trajectories.failed[future], succeeds], -1)",
        "np.stack([trajectories.success[future - 1], trajectories.failed[future - 1], succeeds], -1)",
        (f"{_ON_TRAJECTORIES}test_a_window_holds_context_actions_and_outcomes",),
    ),
    Fault(
        "an action belongs to the moment after it",
        _WINDOWS,
        "trajectories.action[np.concatenate([present, future[:, :-1]], 1)]",
        "trajectories.action[future]",
        (f"{_ON_TRAJECTORIES}test_a_window_holds_context_actions_and_outcomes",),
    ),
    Fault(
        "a window looks into the episode before",
        _WINDOWS,
        "np.maximum(present[:, None] - back, begin)",
        "np.maximum(present[:, None] - back, 0)",
        (f"{_ON_TRAJECTORIES}test_windows_stay_inside_their_episode",),
    ),
    Fault(
        "running out of time is a failure",
        _COLLECT,
        "failed=last & terminated & (not success)",
        "failed=last & (not success)",
        (f"{_ON_TRAJECTORIES}test_an_episode_has_every_time_step_and_the_actions_between",),
    ),
)
