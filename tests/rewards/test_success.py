"""The success classifier uses picture and instruction, needs several frames for done, and is restored from files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.policies.pretrained import load_policy
from vla_rl.pretrained import CONFIG, WEIGHTS
from vla_rl.rewards.frames import LabelledFrames
from vla_rl.rewards.progress import SuccessClassifier, SuccessConfig
from vla_rl.rewards.reward_model import Counts, Reward, choose_threshold, load_reward, value_order_correlation
from vla_rl.training.fit import FitConfig, fit, shuffled

COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 230)}
SMALL = SuccessConfig(width=12, stem=8, keypoints=2, hold=3)


def squares(count: int, seed: int, cameras: tuple[str, ...] = ("front",)) -> LabelledFrames:
    """A red and a blue square, each high or low in the picture; "the X square is up" is true of the high ones."""
    rng = np.random.default_rng(seed)
    up, named = rng.random((count, 2)) < 0.5, rng.integers(2, size=count)
    images = {name: np.full((count, 24, 24, 3), 120, np.uint8) for name in cameras}
    for i in range(count):
        for k, colour in enumerate(COLOURS.values()):
            top, left = (rng.integers(0, 7) if up[i, k] else rng.integers(12, 19)), rng.integers(0, 7) + 12 * k
            for image in images.values():
                image[i, top : top + 5, left : left + 5] = colour
    text = np.array([f"the {name} square is up" for name in COLOURS])[named]
    return LabelledFrames(images, text, up[np.arange(count), named], np.arange(count))


def new(frames: LabelledFrames, config: SuccessConfig = SMALL, seed: int = 0) -> SuccessClassifier:
    torch.manual_seed(seed)
    return SuccessClassifier.for_frames(frames, config)


def trained(frames: LabelledFrames, steps: int = 150) -> SuccessClassifier:
    model, generator = new(frames), torch.Generator().manual_seed(1)
    batches = (frames.select(index.numpy()) for index in shuffled(len(frames), 48, generator))
    fit(dict(model.named_parameters()), model.loss, batches, FitConfig(steps, lr=1e-2, warmup=20))
    return model.eval()


@pytest.fixture(scope="module")
def taught() -> SuccessClassifier:
    return trained(squares(400, 1))


# -- pictures and instructions -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_it_learns_from_images_and_words(taught):
    held_out = squares(300, 2)
    right = (taught.scores(held_out) > 0) == held_out.label
    assert right.mean() > 0.95
    blue = held_out.text == "the blue square is up"
    other = replace(held_out, text=np.where(blue, "the red square is up", "the blue square is up"))
    up = held_out.label
    # The same pictures under the other instruction: half of the answers are others.
    assert 0.35 < ((taught.scores(other) > 0) != up).mean() < 0.65
    blank = replace(held_out, images={"front": np.zeros_like(held_out.images["front"])})
    assert len(set((taught.scores(blank) > 0)[blue])) == 1, "without a picture it has nothing to go by"


def test_the_loss_by_hand():
    frames = squares(5, 3)
    model = new(frames)
    score = model.scores(frames)
    each = [math.log(1 + math.exp(-s if so else s)) for s, so in zip(score, frames.label, strict=True)]
    loss, info = model.loss(frames)
    assert loss.item() == pytest.approx(sum(each) / 5, rel=1e-5)
    assert info["accuracy"] == pytest.approx(((score > 0) == frames.label).mean()) and loss.requires_grad


def test_it_encodes_words_in_order_whatever_else_is_in_the_batch():
    frames = squares(4, 3)
    model = SuccessClassifier({"front": (24, 24, 3)}, ["blue", "on", "red"], SMALL).eval()
    texts = ["red on blue", "blue on red", "blue", "Red on BLUE!"]
    with torch.no_grad():
        together = model.encoder.encode_text(texts)
        alone = torch.cat([model.encoder.encode_text([text]) for text in texts])
    torch.testing.assert_close(together, alone)
    assert torch.equal(together[0], together[3]) and (together[0] - together[1]).abs().max() > 1e-3
    assert (together[0] - together[2]).abs().max() > 1e-3
    with pytest.raises(ContractError, match=r"'green' is not in its vocabulary; use the words blue, on, red"):
        model(frames.images, ["red", "red", "red", "green"])
    with pytest.raises(ContractError, match="it has no words"):
        model.encoder.encode_text(["!"])


def test_every_camera_counts_and_unknown_ones_are_ignored():
    frames = squares(6, 4, ("front", "side"))
    model = new(frames)
    before = model.scores(frames)
    for name in ("front", "side"):
        dark = replace(frames, images={**frames.images, name: np.zeros_like(frames.images[name])})
        assert np.abs(model.scores(dark) - before).max() > 1e-4
    more = {"zenith": np.zeros((6, 9, 9, 3), np.uint8), **dict(reversed(frames.images.items()))}
    assert np.array_equal(model.scores(replace(frames, images=more)), before)
    with pytest.raises(ContractError, match=r"made for images .*'side'.* but got \{'front': \(24, 24, 3\)\}"):
        model({"front": frames.images["front"]}, frames.text)
    with pytest.raises(ContractError, match=r"but got .*\(9, 9, 3\)"):
        model({"front": more["zenith"], "side": frames.images["side"]}, frames.text)


def test_scores_do_not_depend_on_the_batch_size(taught, monkeypatch):
    frames = squares(23, 5)
    whole = taught.scores(frames)
    monkeypatch.setattr("vla_rl.rewards.reward_model.BATCH", 5)
    np.testing.assert_allclose(taught.scores(frames), whole, rtol=1e-4, atol=1e-5)


# -- the threshold -----------------------------------------------------------------------------------------------------


def test_calibration_reaches_its_precision_on_its_frames(taught):
    frames = squares(300, 6)
    noisy = replace(frames, label=frames.label ^ (np.random.default_rng(0).random(300) < 0.1))
    counts = taught.calibrate(noisy, 0.9)
    said = taught.scores(noisy) >= taught.threshold
    assert counts.true_positives / counts.predicted >= 0.9 and counts.total == 300
    assert (counts.true_positives, counts.predicted, counts.actual) == (
        (said & noisy.label).sum(),
        said.sum(),
        noisy.label.sum(),
    )


# -- judging -----------------------------------------------------------------------------------------------------------


class ByBrightness(SuccessClassifier):
    """Its score is the picture's first pixel less 100."""

    def encode(self, images, text):
        return torch.as_tensor(images["front"])[:, 0, 0, :1].float() - 100

    def score(self, features):
        return features[..., 0]


def clips(high: np.ndarray) -> dict[str, np.ndarray]:
    """Frames [E,T] of which ``high`` bool [E,T] are above the threshold."""
    picture = np.zeros((*high.shape, 2, 2, 3), np.uint8)
    picture[:, :, 0, 0, 0] = np.where(high, 101, 99)
    return {"front": picture}


def by_hand(high: np.ndarray, valid: np.ndarray, hold: int) -> np.ndarray:
    """``done`` [E,T]: the last ``hold`` valid frames up to here were all high."""
    done = np.zeros_like(high)
    for row, t in np.ndindex(high.shape):
        latest = [high[row, u] for u in range(t + 1) if valid[row, u]]
        done[row, t] = len(latest) >= hold and all(latest[-hold:])
    return done


@pytest.mark.parametrize("hold", [1, 3])
@pytest.mark.parametrize("cuts", [[], [1], [4, 5], [2, 3, 9]])
def test_done_takes_consecutive_frames_in_any_chunks(hold, cuts):
    rng = np.random.default_rng(hold)
    high, valid = rng.random((40, 12)) < 0.7, rng.random((40, 12)) < 0.8
    model = ByBrightness({"front": (2, 2, 3)}, ["it"], replace(SMALL, hold=hold))
    state, parts = model.initial_state(40), []
    for part in np.split(np.arange(12), cuts):
        output, state = model.evaluate(clips(high[:, part]), ["it"] * 40, valid[:, part], state)
        assert output.progress.shape == output.done.shape == (40, len(part))
        parts.append(output.done)
    assert np.array_equal(np.concatenate(parts, 1), by_hand(high, valid, hold))


def test_a_reset_affects_its_row_only():
    model = ByBrightness({"front": (2, 2, 3)}, ["it"], replace(SMALL, hold=3))
    yes = np.ones((3, 2), bool)
    _, state = model.evaluate(clips(yes), ["it"] * 3, yes, model.initial_state(3))
    kept = {name: value.copy() for name, value in state.items()}
    output, _ = model.evaluate(clips(yes), ["it"] * 3, yes, model.reset_state(state, np.array([1])))
    assert output.done.tolist() == [[True, True], [False, False], [True, True]]
    assert all(np.array_equal(state[name], kept[name]) for name in kept), "the caller's state is not changed"


def test_progress_is_the_probability_and_done_uses_the_threshold(taught):
    frames = squares(6, 7)
    clip = {"front": frames.images["front"].reshape(2, 3, 24, 24, 3)}
    text = ["the red square is up", "the blue square is up"]
    model = SuccessClassifier(taught.encoder.cameras, taught.encoder.words, replace(SMALL, hold=1)).eval()
    model.load_state_dict(taught.state_dict())
    score = model.scores(replace(frames, text=np.repeat(text, 3)))
    model.threshold = float(np.sort(score)[2])  # the score that is reached exactly counts
    output, _ = model.evaluate(clip, text, np.ones((2, 3), bool), model.initial_state(2))
    np.testing.assert_allclose(output.progress.ravel(), 1 / (1 + np.exp(-score)), rtol=1e-4)
    assert output.progress.dtype == np.float32 and output.done.sum() == 4
    assert np.array_equal(output.done.ravel(), score >= model.threshold)
    assert isinstance(model, Reward)


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_restores_the_same_classifier(taught, tmp_path):
    taught.threshold = 1.25
    taught.save_pretrained(tmp_path / "success")
    frames = squares(9, 8)
    for restored in (SuccessClassifier.from_pretrained(tmp_path / "success"), load_reward(tmp_path / "success")):
        assert np.array_equal(restored.scores(frames), taught.scores(frames)) and not restored.training
        assert (restored.threshold, restored.config, restored.encoder.words) == (
            1.25,
            taught.config,
            taught.encoder.words,
        )
        assert restored.encoder.cameras == taught.encoder.cameras
    assert {item.name for item in Path(tmp_path / "success").iterdir()} == {CONFIG, WEIGHTS}


def test_a_reward_is_no_policy_and_a_missing_entry_is_named(taught, tmp_path):
    taught.save_pretrained(tmp_path / "it")
    with pytest.raises(UserError, match="not written by vla-rl for a policy"):
        load_policy(tmp_path / "it")
    saved = json.loads((tmp_path / "it" / CONFIG).read_text())
    del saved["threshold"]
    (tmp_path / "it" / CONFIG).write_text(json.dumps(saved))
    with pytest.raises(UserError, match="has no 'threshold', so the reward cannot be rebuilt"):
        load_reward(tmp_path / "it")
    saved |= {"threshold": 0.0, "words": ["the"]}
    (tmp_path / "it" / CONFIG).write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"tensor 'encoder\.embedding\.weight' .* does not fit"):
        load_reward(tmp_path / "it")


def test_by_hand():
    score = np.array([3.0, 2.0, 1.0, 0.0, -1.0])
    label = np.array([True, True, False, True, False])
    assert choose_threshold(score, label, 1.0) == 1.5  # 2 of 2
    assert choose_threshold(score, label, 0.75) == -0.5  # 3 of 4, though 2 of 3 at a higher threshold is too few
    assert choose_threshold(score, label, 0.6) == -1.5  # all 5: half a unit below the last
    assert Counts.from_decisions(score >= 1.5, label) == Counts(true_positives=2, predicted=2, actual=3, total=5)


def test_equal_scores_are_never_separated():
    score, label = np.array([2.0, 1.0, 1.0, 1.0, 0.0]), np.array([True, True, False, False, False])
    assert choose_threshold(score, label, 0.9) == 1.5
    assert choose_threshold(score, label, 0.5) == 0.5
    with pytest.raises(UserError, match="no threshold"):
        choose_threshold(np.zeros(4), np.array([True, False, False, False]), 0.5)


def test_it_is_the_lowest_one_with_the_precision_on_500_cases():
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        count = int(rng.integers(1, 25))
        score = rng.integers(-4, 5, count) / 2
        label = rng.random(count) < 1 / (1 + np.exp(-2 * score))
        wanted = float(rng.choice([0.5, 0.8, 0.95, 1.0]))
        # Every decision that a threshold can make, from the strictest to the laxest.
        decisions = [score >= value for value in sorted(set(score.tolist()), reverse=True)]
        keep = [said for said in decisions if label[said].any() and label[said].mean() >= wanted]
        if not keep:
            refused += 1
            with pytest.raises(UserError, match="no threshold"):
                choose_threshold(score, label, wanted)
        else:
            assert (score >= choose_threshold(score, label, wanted)).tolist() == keep[-1].tolist()
    assert 20 < refused < 400


@pytest.mark.parametrize(
    ("value", "correlation"),
    [
        ([0.1, 0.2, 0.7, 0.9], 1.0),
        ([5, 3, 2, 1], -1.0),
        ([0.3, 0.3, 0.3], 0.0),
        ([1, 3, 2, 4], 0.8),  # 1 - 6 * (0 + 1 + 1 + 0) / (4 * 15)
        ([0, 0, 1], 3**0.5 / 2),  # ranks 1.5, 1.5, 3
        ([2], 0.0),
    ],
)
def test_value_order_correlation_by_hand(value, correlation):
    assert value_order_correlation(np.array(value, np.float32)) == pytest.approx(correlation)
