"""Faults in the progress critic and its training pairs, and in the VLM judge."""

from __future__ import annotations

import importlib.util

from tests.mutants.fault import Fault

_PROGRESS, _PAIRS, _CALIBRATION = (f"vla_rl/rewards/{name}.py" for name in ("progress", "pairs", "calibration"))
_JUDGE, _VLM, _RECIPE = "vla_rl/rewards/judge.py", "vla_rl/rewards/vlm.py", "vla_rl/recipes/train_rewards.py"
_ON_PROGRESS, _ON_PAIRS = "tests/rewards/test_progress.py::", "tests/rewards/test_pairs.py::"
_ON_JUDGE = "tests/rewards/test_judge.py::"
_VLAC = f"{_ON_PROGRESS}test_progress_follows_vlac_however_the_frames_are_cut_into_chunks"
_BY_HAND = f"{_ON_PROGRESS}test_the_loss_by_hand"
_EPISODE = f"{_ON_PAIRS}test_progress_of_an_episode_by_hand"
_PAIR = f"{_ON_PAIRS}test_a_pair_is_of_one_episode_in_either_order_with_its_progress"
_HALVES = f"{_ON_PAIRS}test_half_of_the_pairs_are_of_successes_and_half_are_near"
_ASKED = f"{_ON_JUDGE}test_every_few_frames_are_evaluated_however_they_are_cut_into_chunks"
_QUESTION = f"{_ON_JUDGE}test_the_question_contains_the_instruction_and_cameras_keep_their_order"

_PROGRESS_FAULTS = (
    Fault(
        "the remainder grows with progress",
        _PROGRESS,
        "left = np.clip(remaining * np.exp(-u), self.config.floor, 1.0)",
        "left = np.clip(remaining * np.exp(u), self.config.floor, 1.0)",
        (_VLAC,),
    ),
    Fault(
        "differences are added instead of compounded",
        _PROGRESS,
        "left = np.clip(remaining * np.exp(-u), self.config.floor, 1.0)",
        "left = np.clip(remaining - u, self.config.floor, 1.0)",
        (_VLAC,),
    ),
    Fault(
        "every frame becomes the reference",
        _PROGRESS,
        "moves = valid[:, t] & ((age == 0) | (age == self.config.stride))",
        "moves = valid[:, t]",
        (_VLAC,),
    ),
    Fault(
        "the reference is never renewed",
        _PROGRESS,
        "moves = valid[:, t] & ((age == 0) | (age == self.config.stride))",
        "moves = valid[:, t] & (age == 0)",
        (_VLAC,),
    ),
    Fault(
        "repeated frames make the reference older",
        _PROGRESS,
        "age = np.where(valid[:, t], age + 1, age)",
        "age = age + 1",
        (_VLAC,),
    ),
    Fault(
        "the old reference is kept with the new progress",
        _PROGRESS,
        'images = {f"reference/{name}": clip[env_ids, reference] for name, clip in clips.items()}',
        'images = {f"reference/{name}": clip[env_ids, 0 * reference] for name, clip in clips.items()}',
        (_VLAC,),
    ),
    Fault(
        "the first frame is compared with a black image",
        _PROGRESS,
        "left = np.where(age == _NO_REFERENCE, 1.0, left).astype(np.float32)",
        "rest = left.astype(np.float32)",
        (_VLAC,),
    ),
    Fault(
        "a finished task falls short of 1",
        _PROGRESS,
        "progress[:, t] = (1 - left) / (1 - self.config.floor)",
        "progress[:, t] = 1 - left",
        (_VLAC,),
    ),
)

_LEARNING = (
    Fault(
        "the comparison ignores the other order",
        _PROGRESS,
        "u: Tensor = (forward - backward)[..., 0]",
        "u: Tensor = (forward - 0 * backward)[..., 0]",
        (f"{_ON_PROGRESS}test_the_loss_takes_pairs",),
    ),
    Fault(
        "pairs are trained in the wrong order",
        _PROGRESS,
        "target, label = (remaining[0] / remaining[1]).log(), self.encoder.to_tensor(pairs.second.label)",
        "target, label = (remaining[1] / remaining[0]).log(), self.encoder.to_tensor(pairs.second.label)",
        (_BY_HAND,),
    ),
    Fault(
        "done is trained on the first frame",
        _PROGRESS,
        "(remaining[0] / remaining[1]).log(), self.encoder.to_tensor(pairs.second.label)",
        "(remaining[0] / remaining[1]).log(), self.encoder.to_tensor(pairs.first.label)",
        (_BY_HAND,),
    ),
    Fault(
        "the training target has another floor",
        _PROGRESS,
        "1 - (1 - self.config.floor) * self.encoder.to_tensor(p)",
        "1 - 0.9 * self.encoder.to_tensor(p)",
        (_BY_HAND,),
    ),
    Fault(
        "failures count as progress",
        _PAIRS,
        "if not label[-1]:",
        "if not label.any():",
        (_EPISODE,),
    ),
    Fault(
        "a temporary success ends the task",
        _PAIRS,
        "success_start = int(not_done[-1]) + 1 if not_done.size else 0",
        "success_start = int(label.argmax())",
        (_EPISODE,),
    ),
    Fault(
        "pairs cross from one episode to another",
        _PAIRS,
        "return int(track[i]), int(track[self._rng.integers(low, high + 1)])",
        "return int(track[i]), int(track[0] + self._rng.integers(low, high + 1))",
        (_PAIR,),
    ),
    Fault(
        "pairs are drawn forwards only",
        _PAIRS,
        "low, high = max(0, i - reach), min(len(track) - 1, i + reach)",
        "low, high = i, min(len(track) - 1, i + reach)",
        (_PAIR,),
    ),
    Fault(
        "no pair is near",
        _PAIRS,
        "self._near if self._rng.random() < 0.5 else len(track)",
        "len(track)",
        (_HALVES,),
    ),
    Fault(
        "equal values are ranked by time",
        _CALIBRATION,
        "below = (value[:, None] > value).sum(1) + 0.5 * (value[:, None] == value).sum(1)",
        "below = value.argsort(kind='stable').argsort()",
        ("tests/rewards/test_calibration.py::test_value_order_correlation_by_hand",),
    ),
    Fault(
        "wrong instructions are reported as successes",
        _RECIPE,
        "for so, progress in tracks if so == wanted] for wanted in (True, False))",
        "for so, progress in tracks if so == wanted] for wanted in (False, True))",
        ("tests/recipes/test_train_rewards.py::test_the_report_on_progress_by_hand",),
    ),
)

_ASKING = (
    Fault(
        "the number of frames is lost between chunks",
        _JUDGE,
        'before = state["frames"][:, None] + valid.cumsum(1) - valid',
        'before = 0 * state["frames"][:, None] + valid.cumsum(1) - valid',
        (_ASKED,),
    ),
    Fault(
        "repeated frames are evaluated",
        _JUDGE,
        "np.nonzero(valid & (before % self.config.stride == 0))",
        "np.nonzero(before % self.config.stride == 0)",
        (_ASKED,),
    ),
    Fault(
        "the last answer is lost between chunks",
        _JUDGE,
        'np.zeros(valid.shape, np.float32), state["answer"]',
        'np.zeros(valid.shape, np.float32), 0 * state["answer"]',
        (_ASKED,),
    ),
    Fault(
        "a row is evaluated for another row's instruction",
        _JUDGE,
        "str(text[i])) for i in env_id.tolist()]",
        "str(text[0])) for i in env_id.tolist()]",
        (_QUESTION,),
    ),
    Fault(
        "cameras are passed in the order of the frames",
        _JUDGE,
        "return {name: frames[name] for name in names}",
        "return {name: frames[name] for name in frames if name in names}",
        (_QUESTION,),
    ),
    Fault(
        "done before the first frame",
        _JUDGE,
        "done = (progress >= self.config.threshold) & (before + valid > 0)",
        "done = progress >= self.config.threshold",
        (f"{_ON_JUDGE}test_the_threshold_is_inclusive_and_nothing_is_done_before_the_first_frame",),
    ),
)

_ANSWERING = (
    Fault(
        "only one spelling of yes counts",
        _VLM,
        '_YES, _NO = ("yes", "Yes", "YES"), ("no", "No", "NO")',
        '_YES, _NO = ("yes",), ("no", "No", "NO")',
        (f"{_ON_JUDGE}test_the_answer_is_that_of_the_next_token_by_hand",),
    ),
    Fault(
        "no is taken for yes",
        _VLM,
        "return (yes - no).sigmoid()",
        "return (no - yes).sigmoid()",
        (f"{_ON_JUDGE}test_the_answer_is_that_of_the_next_token_by_hand",),
    ),
    Fault(
        "the model is not asked to answer",
        _VLM,
        "add_generation_prompt=True)",
        "add_generation_prompt=False)",
        (f"{_ON_JUDGE}test_the_answer_is_that_of_the_next_token_by_hand",),
    ),
    Fault(
        "all questions get the first image",
        _VLM,
        "for i in images.values()] for k in part]",
        "for i in images.values()] for k in 0 * part]",
        (f"{_ON_JUDGE}test_answers_depend_on_image_and_question_but_not_on_the_batch",),
    ),
    Fault(
        "a model's own code is trusted",
        _VLM,
        '"trust_remote_code": False}',
        '"trust_remote_code": True}',
        (f"{_ON_JUDGE}test_code_that_comes_with_a_model_is_not_run",),
    ),
    Fault(
        "weights are taken from pickle",
        _VLM,
        "config.model, use_safetensors=True, dtype",
        "config.model, use_safetensors=None, dtype",
        (f"{_ON_JUDGE}test_weights_of_pickle_are_not_read",),
    ),
)

# A fault in asking a real model is only noticed where transformers is installed.
_HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
FAULTS: tuple[Fault, ...] = (*_PROGRESS_FAULTS, *_LEARNING, *_ASKING, *(_ANSWERING if _HAS_TRANSFORMERS else ()))
