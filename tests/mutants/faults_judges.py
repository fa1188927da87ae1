"""Faults in the progress critic, in the pairs that it learns from, and in the judge that asks a model."""

from __future__ import annotations

import importlib.util

from tests.mutants.fault import Fault

_PROGRESS, _PAIRS, _CALIBRATION = (f"vla_rl/rewards/{name}.py" for name in ("progress", "pairs", "calibration"))
_JUDGE, _VLM, _RECIPE = "vla_rl/rewards/judge.py", "vla_rl/rewards/vlm.py", "vla_rl/recipes/train_rewards.py"
_ON_PROGRESS, _ON_PAIRS = "tests/rewards/test_progress.py::", "tests/rewards/test_pairs.py::"
_ON_JUDGE = "tests/rewards/test_judge.py::"
_VLAC = f"{_ON_PROGRESS}test_judging_follows_vlac_however_the_frames_arrive"
_BY_HAND = f"{_ON_PROGRESS}test_the_loss_by_hand"
_EPISODE = f"{_ON_PAIRS}test_progress_of_an_episode_by_hand"
_PAIR = f"{_ON_PAIRS}test_a_pair_is_of_one_episode_in_either_order_and_knows_its_progress"
_HALVES = f"{_ON_PAIRS}test_half_are_of_successes_and_half_are_near"
_ASKED = f"{_ON_JUDGE}test_every_few_frames_of_each_row_are_asked_about_however_they_arrive"
_QUESTION = f"{_ON_JUDGE}test_the_question_holds_the_instruction_and_the_cameras_their_order"

_FOLLOWING = (
    Fault(
        "what remains grows with progress",
        _PROGRESS,
        "rest = np.clip(remaining * np.exp(-u), self.config.floor, 1.0)",
        "rest = np.clip(remaining * np.exp(u), self.config.floor, 1.0)",
        (_VLAC,),
    ),
    Fault(
        "differences are added instead of compounded",
        _PROGRESS,
        "rest = np.clip(remaining * np.exp(-u), self.config.floor, 1.0)",
        "rest = np.clip(remaining - u, self.config.floor, 1.0)",
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
        "the reference never moves on",
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
        'kept = {f"reference/{name}": clip[each, at] for name, clip in clips.items()}',
        'kept = {f"reference/{name}": clip[each, 0 * at] for name, clip in clips.items()}',
        (_VLAC,),
    ),
    Fault(
        "a first frame is compared with blackness",
        _PROGRESS,
        "rest = np.where(age == _NEVER, 1.0, rest).astype(np.float32)",
        "rest = rest.astype(np.float32)",
        (_VLAC,),
    ),
    Fault(
        "a finished task falls short of 1",
        _PROGRESS,
        "progress[:, t] = (1 - rest) / (1 - self.config.floor)",
        "progress[:, t] = 1 - rest",
        (_VLAC,),
    ),
)

_LEARNING = (
    Fault(
        "comparing forgets the other order",
        _PROGRESS,
        "u: Tensor = (there - back)[..., 0]",
        "u: Tensor = (there - 0 * back)[..., 0]",
        (f"{_ON_PROGRESS}test_pairs_are_what_the_loss_takes",),
    ),
    Fault(
        "pairs are learnt back to front",
        _PROGRESS,
        "wanted, label = (left[0] / left[1]).log(), self.encoder.tensor(pairs.second.label)",
        "wanted, label = (left[1] / left[0]).log(), self.encoder.tensor(pairs.second.label)",
        (_BY_HAND,),
    ),
    Fault(
        "done is learnt of the first picture",
        _PROGRESS,
        "(left[0] / left[1]).log(), self.encoder.tensor(pairs.second.label)",
        "(left[0] / left[1]).log(), self.encoder.tensor(pairs.first.label)",
        (_BY_HAND,),
    ),
    Fault(
        "what is learnt knows no floor",
        _PROGRESS,
        "left = [1 - (1 - self.config.floor) * self.encoder.tensor(p)",
        "left = [1 - 0.9 * self.encoder.tensor(p)",
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
        "success in passing ends the work",
        _PAIRS,
        "began = int(misses[-1]) + 1 if misses.size else 0",
        "began = int(label.argmax())",
        (_EPISODE,),
    ),
    Fault(
        "pairs cross from one episode to another",
        _PAIRS,
        "return int(track[i]), int(track[self._random.integers(low, high + 1)])",
        "return int(track[i]), int(track[0] + self._random.integers(low, high + 1))",
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
        "self._near if self._random.random() < 0.5 else len(track)",
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
        ("tests/cli/test_rewards.py::test_the_report_on_progress_by_hand",),
    ),
)

_ASKING = (
    Fault(
        "frames are counted from chunk to chunk anew",
        _JUDGE,
        'before = state["seen"][:, None] + valid.cumsum(1) - valid',
        'before = 0 * state["seen"][:, None] + valid.cumsum(1) - valid',
        (_ASKED,),
    ),
    Fault(
        "repeated frames are asked about",
        _JUDGE,
        "np.nonzero(valid & (before % self.config.stride == 0))",
        "np.nonzero(before % self.config.stride == 0)",
        (_ASKED,),
    ),
    Fault(
        "an answer is forgotten with its chunk",
        _JUDGE,
        'np.zeros(valid.shape, np.float32), state["answer"]',
        'np.zeros(valid.shape, np.float32), 0 * state["answer"]',
        (_ASKED,),
    ),
    Fault(
        "a row is asked about another row's task",
        _JUDGE,
        "str(text[i])) for i in row.tolist()]",
        "str(text[0])) for i in row.tolist()]",
        (_QUESTION,),
    ),
    Fault(
        "cameras are shown in the order of the frames",
        _JUDGE,
        "return {name: frames[name] for name in names}",
        "return {name: frames[name] for name in frames if name in names}",
        (_QUESTION,),
    ),
    Fault(
        "done before anything was seen",
        _JUDGE,
        "done = (progress >= self.config.threshold) & (before + valid > 0)",
        "done = progress >= self.config.threshold",
        (f"{_ON_JUDGE}test_the_threshold_counts_from_where_it_is_and_nothing_is_done_before_the_first_frame",),
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
        "everybody gets the first one's picture",
        _VLM,
        "for i in images.values()] for row in part]",
        "for i in images.values()] for row in 0 * part]",
        (f"{_ON_JUDGE}test_answers_depend_on_the_picture_and_on_the_question_but_not_on_who_else_is_asked",),
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
FAULTS: tuple[Fault, ...] = (*_FOLLOWING, *_LEARNING, *_ASKING, *(_ANSWERING if _HAS_TRANSFORMERS else ()))
