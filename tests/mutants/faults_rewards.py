"""Faults in reward models, their labels, thresholds and reports."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENCODER, _TRAINED = "vla_rl/rewards/encoder.py", "vla_rl/rewards/reward_model.py"
_SUCCESS, _CALIBRATION = "vla_rl/rewards/success.py", "vla_rl/rewards/calibration.py"
_FRAMES, _LABELS, _RECIPE = (
    "vla_rl/rewards/frames.py",
    "vla_rl/recipes/label_frames.py",
    "vla_rl/recipes/train_rewards.py",
)
_TRACKERS, _TRACKING = "vla_rl/training/trackers.py", "vla_rl/training/tracking.py"
_ON_SUCCESS, _ON_CALIBRATION = "tests/rewards/test_success.py::", "tests/rewards/test_calibration.py::"
_ON_FRAMES, _ON_RECIPE = "tests/rewards/test_frames.py::", "tests/recipes/test_train_rewards.py::"
_ON_TRACKERS = "tests/training/test_trackers.py::"
_IN_A_ROW = f"{_ON_SUCCESS}test_done_takes_consecutive_frames_however_they_are_cut_into_chunks"
_READS = f"{_ON_SUCCESS}test_it_encodes_words_in_order_whatever_else_is_in_the_batch"
_LOWEST = f"{_ON_CALIBRATION}test_it_is_the_lowest_one_with_the_precision_on_500_cases"
_LABELLED = f"{_ON_RECIPE}test_claims_about_lift_by_hand"

_JUDGING = (
    Fault(
        "one frame is enough for done",
        _TRAINED,
        "done[:, t] = streak >= self.config.hold",
        "done[:, t] = high[:, t]",
        (_IN_A_ROW,),
    ),
    Fault(
        "the streak is lost between chunks",
        _TRAINED,
        "high, done = (score >= self.threshold).cpu().numpy(), np.zeros(valid.shape, bool)",
        "high, done, streak = (score >= self.threshold).cpu().numpy(), np.zeros(valid.shape, bool), 0 * streak",
        (_IN_A_ROW,),
    ),
    Fault(
        "frames after an episode's end count",
        _TRAINED,
        "np.where(valid[:, t], np.where(high[:, t], streak + 1, 0), streak)",
        "np.where(high[:, t], streak + 1, 0)",
        (_IN_A_ROW,),
    ),
    Fault(
        "a low score does not end the streak",
        _TRAINED,
        "np.where(high[:, t], streak + 1, 0)",
        "np.where(high[:, t], streak + 1, streak)",
        (_IN_A_ROW,),
    ),
    Fault(
        "a reset resets every row",
        _TRAINED,
        "value[env_ids] = initial[name][env_ids]",
        "value[:] = initial[name]",
        (f"{_ON_SUCCESS}test_a_reset_affects_its_row_only",),
    ),
    Fault(
        "rows and times of evaluated frames are mixed up",
        _TRAINED,
        "words = np.repeat(np.asarray(text, dtype=str), time)",
        "words = np.tile(np.asarray(text, dtype=str), time)",
        (f"{_ON_SUCCESS}test_progress_is_the_probability_and_done_uses_the_threshold",),
    ),
    Fault(
        "a checkpoint forgets its threshold",
        _TRAINED,
        'model.threshold = float(saved["threshold"])',
        'model.threshold = 0.0 * float(saved["threshold"])',
        (f"{_ON_SUCCESS}test_a_folder_restores_the_same_classifier",),
    ),
)

_ENCODING = (
    Fault(
        "padding is encoded",
        _ENCODER,
        "last = (tokens > 0).sum(1) - 1",
        "last = torch.full((len(tokenized),), tokens.shape[1] - 1)",
        (_READS,),
    ),
    Fault(
        "only the last word is encoded",
        _ENCODER,
        "states, _ = self.reader(self.embedding(tokens))",
        "states = self.embedding(tokens)",
        (_READS,),
    ),
    Fault(
        "the instruction does not modulate",
        _ENCODER,
        "self.first(pixels) * (1 + scale) + shift)",
        "self.first(pixels) + 0 * shift)",
        (f"{_ON_SUCCESS}test_it_learns_from_images_and_words",),
    ),
    Fault(
        "only one camera is encoded",
        _ENCODER,
        "[self._encode_image(self.to_tensor(images[name]), scale, shift) for name in self.cameras]",
        "[self._encode_image(self.to_tensor(images[min(images)]), scale, shift) for name in self.cameras]",
        (f"{_ON_SUCCESS}test_every_camera_counts_and_unknown_ones_are_ignored",),
    ),
    Fault(
        "the highest threshold with the precision is taken",
        _CALIBRATION,
        "k = int(good[-1])",
        "k = int(good[0])",
        (_LOWEST,),
    ),
    Fault(
        "equal scores are separated",
        _CALIBRATION,
        "good = np.flatnonzero(last_of_ties & (achieved >= precision) & (positives > 0))",
        "good = np.flatnonzero((achieved >= precision) & (positives > 0))",
        (_LOWEST,),
    ),
    Fault(
        "the threshold has the recall instead of the precision",
        _CALIBRATION,
        "achieved = positives / np.arange(1, len(score) + 1)",
        "achieved = positives / max(1, positives[-1])",
        (_LOWEST,),
    ),
)

_DATA = (
    Fault(
        "parts share episodes",
        _FRAMES,
        "np.isin(self.episode, part)) for part in",
        "np.isin(np.arange(len(self)), part)) for part in",
        (f"{_ON_FRAMES}test_parts_consist_of_whole_episodes_and_lose_none",),
    ),
    Fault(
        "tracks mix instructions",
        _FRAMES,
        "found.setdefault(key, []).append(i)",
        'found.setdefault((key[0], ""), []).append(i)',
        (f"{_ON_FRAMES}test_a_track_is_one_episode_under_one_text_in_order",),
    ),
    Fault(
        "unknown labels are used",
        "sims/mujoco/tasks/lift.py",
        "known = (up.sum(1) == named) & (other != obs.task)",
        "known = other != obs.task",
        (_LABELLED,),
    ),
    Fault(
        "any lifted cube is a success",
        "sims/mujoco/tasks/lift.py",
        'named, other = obs.extras["privileged/target"][:, 2] >= LIFT_HEIGHT, obs',
        "named, other = up.any(1), obs",
        (_LABELLED,),
    ),
    Fault(
        "the task labels although a function was named",
        _RECIPE,
        "load(self.claims) if self.claims else self.env.claims()",
        "self.env.claims()",
        ("tests/recipes/test_env_config.py::test_frames_are_labelled_by_the_task_unless_a_function_is_named",),
    ),
    Fault(
        "frames after the end are labelled",
        _LABELS,
        "chosen = decision.step.valid[:, h] & known & kept",
        "chosen = known & kept",
        (f"{_ON_RECIPE}test_frames_of_the_expert_show_what_the_environment_calls_success",),
    ),
    Fault(
        "minibatches are as unbalanced as the data",
        _RECIPE,
        "yes, no = np.flatnonzero(label), np.flatnonzero(~label)",
        "yes = no = np.arange(len(label))",
        (f"{_ON_RECIPE}test_a_third_of_every_minibatch_shows_success",),
    ),
    Fault(
        "early ends are missing in the report",
        _RECIPE,
        "done.argmax() < track.label.argmax())",
        "done.argmax() < 0)",
        (f"{_ON_RECIPE}test_the_report_by_hand",),
    ),
)

_TRACKED = (
    Fault(
        "trackers get no metrics",
        _TRACKING,
        "tracker.log(stage, step, metrics)",
        "tracker.log(stage, step, {})",
        (f"{_ON_TRACKERS}test_trackers_get_every_line_of_the_metrics",),
    ),
    Fault(
        "an unknown tracker costs the earlier run its place",
        _TRACKING,
        "check_trackers(names)  # before an earlier run is moved",
        "pass",
        (f"{_ON_TRACKERS}test_a_mistake_is_answered_before_the_earlier_run_is_moved",),
    ),
    Fault(
        "stages overwrite each other in TensorBoard",
        _TRACKERS,
        'self._writer.add_scalar(f"{stage}/{name}", value, step)',
        "self._writer.add_scalar(name, value, step)",
        (f"{_ON_TRACKERS}test_tensorboard_reads_back_every_number",),
    ),
    Fault(
        "Weights & Biases asks its server before it begins",
        _TRACKERS,
        "wandb.login(prompt=False, verify=False)",
        "wandb.login(prompt=False)",
        (f"{_ON_TRACKERS}test_where_wandb_sends_is_decided_once_and_asks_nobody",),
    ),
)

FAULTS: tuple[Fault, ...] = (*_JUDGING, *_ENCODING, *_DATA, *_TRACKED)
