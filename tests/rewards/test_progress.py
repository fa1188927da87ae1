"""The progress critic orders frames, detects regression, stagnation and wrong instructions, and follows VLAC."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_rl.rewards.frames import FramePairs, LabelledFrames, PairSampler
from vla_rl.rewards.progress import ProgressConfig, ProgressCritic
from vla_rl.rewards.reward_model import Reward, load_reward
from vla_rl.training.fit import FitConfig, fit

COLOURS = {"red": (220, 30, 30), "blue": (30, 60, 230)}
SMALL = ProgressConfig(width=12, stem=8, keypoints=2, hold=2, stride=3)
TOP, BOTTOM = 0, 18


def film(heights: np.ndarray, named: int, rng: np.random.Generator) -> np.ndarray:
    """Noisy pictures [T,24,24,3] of two squares; the one that is ``named`` is ``heights`` [T] from the upper edge."""
    image = rng.integers(100, 140, (len(heights), 24, 24, 3)).astype(np.uint8)
    left, other = rng.integers(0, 7, 2) + 12 * np.array([named, 1 - named]), int(rng.integers(TOP, BOTTOM + 1))
    colours = list(COLOURS.values())
    for t, top in enumerate(heights):
        image[t, other : other + 5, left[1] : left[1] + 5] = colours[1 - named]
        image[t, top : top + 5, left[0] : left[0] + 5] = colours[named]
    return image


def rising(rng: np.random.Generator) -> np.ndarray:
    """From the bottom to the top in 10 to 16 frames, and two frames at the top."""
    return np.append(np.linspace(BOTTOM, TOP, rng.integers(10, 17)).round().astype(int), [TOP, TOP])


def dithering(rng: np.random.Generator) -> np.ndarray:
    """Somewhere, hardly moving, for 14 frames."""
    return np.clip(rng.integers(4, BOTTOM - 1) + rng.integers(-1, 2, 14), TOP, BOTTOM)


def instruction(named: int) -> str:
    return f"raise the {list(COLOURS)[named]} square"


def lessons(count: int, seed: int) -> LabelledFrames:
    """Per episode a success under the right instruction, the same under the wrong one, and a failure."""
    rng, parts = np.random.default_rng(seed), []
    for episode in range(count):
        named, heights = int(rng.integers(2)), rising(rng)
        good, idle = film(heights, named, rng), film(dithering(rng), named, rng)
        for pictures, text, label in (
            (good, instruction(named), heights <= 1),
            (good, instruction(1 - named), np.zeros(len(good), bool)),
            (idle, instruction(named), np.zeros(len(idle), bool)),
        ):
            texts, which = np.array([text] * len(label)), np.full(len(label), episode + count * (pictures is idle))
            parts.append(LabelledFrames({"up": pictures}, texts, label, which))
    return LabelledFrames.concatenate(parts)


def new(frames: LabelledFrames, config: ProgressConfig = SMALL) -> ProgressCritic:
    torch.manual_seed(0)
    return ProgressCritic.for_frames(frames, config)


@pytest.fixture(scope="module")
def taught() -> ProgressCritic:
    frames = lessons(60, 1)
    model, sampler = new(frames), PairSampler(frames, SMALL.stride, np.random.default_rng(2))
    fit(dict(model.named_parameters()), model.loss, sampler.batches(48), FitConfig(250, lr=8e-3, warmup=20))
    return model.eval()


def followed(model: ProgressCritic, pictures: np.ndarray, text: str):
    """Progress [T] and done [T] of one film."""
    valid = np.ones((1, len(pictures)), bool)
    output, _ = model.evaluate({"up": pictures[None]}, [text], valid, model.initial_state(1))
    return output.progress[0], output.done[0]


# -- the trained critic -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_progress_follows_the_order_of_time(taught):
    for seed in range(8):
        rng, named = np.random.default_rng([3, seed]), seed % 2
        progress, done = followed(taught, film(rising(rng), named, rng), instruction(named))
        times = np.arange(len(progress))
        assert np.corrcoef(progress, times)[0, 1] > 0.95 and progress[0] == 0 and progress[-1] > 0.8
        assert done[-1] and not done[:-4].any()
        wrong, done = followed(taught, film(rising(rng), named, rng), instruction(1 - named))
        assert wrong.max() < 0.25 and not done.any(), "under a wrong instruction it is no progress"


@pytest.mark.full
def test_regression_stagnation_and_a_second_attempt_are_noticed(taught):
    up, still = np.linspace(BOTTOM, TOP, 13).round().astype(int), np.full(8, 9)
    course = np.concatenate([up[:7], still, up[6::-1], up])  # half-way up, waiting, back down, all the way
    for seed in range(6):
        rng, named = np.random.default_rng([4, seed]), seed % 2
        progress, done = followed(taught, film(course, named, rng), instruction(named))
        high, waited, low, top = progress[6], progress[7:15], progress[21], progress[-1]
        assert high > 0.3 and np.abs(waited - high).max() < 0.15, "waiting is no progress"
        assert low < high - 0.25 and low < 0.2, "back at the bottom"
        assert top > 0.75 and not done[:-4].any()


def test_swapping_the_frames_changes_the_sign():
    """By construction, so in an untaught one as well."""
    frames = lessons(3, 6)
    critic, pairs = new(frames).eval(), PairSampler(frames, 3, np.random.default_rng(0)).draw(40)
    first, second, text = pairs.first.images, pairs.second.images, pairs.first.text
    forth, back = critic.difference(first, second, text), critic.difference(second, first, text)
    np.testing.assert_allclose(forth, -back, atol=1e-6)
    assert 0 < np.abs(forth).max() < 1
    assert not critic.difference(first, first, text).any(), "no progress lies between equal pictures"


# -- equations --------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    frames = lessons(2, 7)
    model = new(frames, replace(SMALL, floor=0.2)).double()
    model.comparison[-1].weight.data *= 100  # an untrained one gives them nearly equal values
    pairs = PairSampler(frames, 3, np.random.default_rng(2)).draw(24)
    assert (pairs.first.label & ~pairs.second.label).any() and (pairs.first.label < pairs.second.label).any()
    encoded = [model.encode(side.images, side.text) for side in (pairs.first, pairs.second)]
    u, score = (found.detach().numpy() for found in (model.compare(*encoded), model.score(encoded[1])))
    total = 0.0
    for i in range(24):
        # VLAC's share of what remained, for a step forward: c = (v' - v) / (1 - v), and u = -log(1 - c).
        low, high = sorted(0.8 * float(p[i]) for p in (pairs.before, pairs.after))
        wanted = -math.log(1 - (high - low) / (1 - low)) * (1 if pairs.after[i] >= pairs.before[i] else -1)
        total += (u[i] - wanted) ** 2 + math.log(1 + math.exp(-score[i] if pairs.second.label[i] else score[i]))
    loss, info = model.loss(pairs)
    assert loss.item() == pytest.approx(total / 24, rel=1e-6) and loss.requires_grad
    assert info["change"] + info["completion"] == pytest.approx(loss.item())


class ByBrightness(ProgressCritic):
    """``u`` is a fiftieth of how much brighter the first pixel is; its score is that pixel less 50."""

    def encode(self, images, text):
        return torch.as_tensor(images["up"])[:, 0, 0, :1].float()

    def compare(self, first, second):
        return (second - first)[..., 0] / 50

    def score(self, encoded):
        return encoded[..., 0] - 50


def bright(config: ProgressConfig = SMALL) -> ProgressCritic:
    return ByBrightness({"up": (2, 2, 3)}, ["it"], config)


def clip(brightness: np.ndarray) -> dict[str, np.ndarray]:
    picture = np.zeros((*brightness.shape, 2, 2, 3), np.uint8)
    picture[:, :, 0, 0, 0] = brightness
    return {"up": picture}


def by_vlac(brightness: np.ndarray, valid: np.ndarray, stride: int, floor: float) -> np.ndarray:
    """Progress [T] of one environment by VLAC's two lines, every ``stride``-th valid frame is the next reference."""
    progress, value, reference, age = np.zeros(len(valid)), 0.0, None, 0
    for t in range(len(valid)):
        if reference is None:
            reference = brightness[t] if valid[t] else None
            continue
        u = (brightness[t] - reference) / 50
        c = math.copysign(1 - math.exp(-abs(u)), u)
        updated = value + (1 - value) * c if c >= 0 else 1 - (1 - value) / (1 + c)
        updated = min(max(updated, 0.0), 1 - floor)
        progress[t], age = updated / (1 - floor), age + int(valid[t])
        if valid[t] and age == stride:
            reference, value, age = brightness[t], updated, 0
    return progress


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("cuts", [[], [1], [4, 5], [2, 3, 9]])
def test_progress_follows_vlac_in_any_chunks(stride, cuts):
    rng = np.random.default_rng(stride)
    brightness, valid = rng.integers(0, 200, (40, 12)), rng.random((40, 12)) < 0.8
    model = bright(replace(SMALL, stride=stride, floor=0.05))
    state, parts = model.initial_state(40), []
    for part in np.split(np.arange(12), cuts):
        output, state = model.evaluate(clip(brightness[:, part]), ["it"] * 40, valid[:, part], state)
        parts.append(output.progress)
    progress = np.concatenate(parts, 1)
    want = [by_vlac(b.astype(float), v, stride, 0.05) for b, v in zip(brightness, valid, strict=True)]
    np.testing.assert_allclose(progress, want, atol=2e-6)
    assert progress.dtype == np.float32 and progress.min() == 0 and progress.max() == pytest.approx(1)


def test_a_round_trip_is_no_progress_and_a_task_can_be_undone():
    forward = np.array([[0, 20, 45, 60, 80, 100]])
    path = np.concatenate([forward, forward[:, ::-1]], 1)
    model = bright(replace(SMALL, stride=1, floor=0.1))
    output, _ = model.evaluate(clip(path), ["it"], np.ones_like(path, bool), model.initial_state(1))
    np.testing.assert_allclose(output.progress, output.progress[:, ::-1], atol=1e-5)
    assert output.progress[0, 5] == pytest.approx((1 - math.exp(-2)) / 0.9, rel=1e-5)
    beyond = np.array([[0, 100, 130, 0]])  # a bound is reached in between
    output, _ = model.evaluate(clip(beyond), ["it"], np.ones_like(beyond, bool), model.initial_state(1))
    assert output.progress[0, 2:].tolist() == pytest.approx([1, 0])


def test_a_reset_affects_its_row_only():
    model = bright(replace(SMALL, stride=1, hold=3))
    first, later = np.array([[0, 50]] * 3), np.array([[75, 90]] * 3)
    yes = np.ones((3, 2), bool)
    _, state = model.evaluate(clip(first), ["it"] * 3, yes, model.initial_state(3))
    kept = {name: value.copy() for name, value in state.items()}
    output, _ = model.evaluate(clip(later), ["it"] * 3, yes, model.reset_state(state, np.array([1])))
    went_on = (1 - np.exp(-np.array([1.5, 1.8]))) / 0.9
    np.testing.assert_allclose(output.progress, [went_on, [0, (1 - math.exp(-0.3)) / 0.9], went_on], rtol=1e-5)
    assert output.done.tolist() == [[False, True], [False, False], [False, True]]
    assert all(np.array_equal(state[name], kept[name]) for name in kept), "the caller's state is not changed"


# -- the rest of a reward ---------------------------------------------------------------------------------------------


def test_a_folder_restores_the_same_critic_and_it_is_a_reward(tmp_path):
    critic = new(lessons(3, 6)).eval()
    rng = np.random.default_rng(8)
    pictures = film(rising(rng), 0, rng)
    critic.threshold = 0.25
    critic.save_pretrained(tmp_path / "progress")
    restored = load_reward(tmp_path / "progress")
    progress, _ = followed(critic, pictures, instruction(0))
    assert (
        type(restored) is ProgressCritic
        and isinstance(restored, Reward)
        and (restored.threshold, restored.config) == (0.25, SMALL)
    )
    assert np.array_equal(followed(restored, pictures, instruction(0))[0], progress)


def test_the_loss_takes_pairs():
    frames = lessons(1, 9)
    half = FramePairs(frames.select(np.array([0])), frames.select(np.array([0])), np.zeros(1), np.zeros(1))
    loss, info = new(frames).loss(half)
    assert info["change"] == 0.0 and info["ordered"] == 1.0 and loss.item() == pytest.approx(info["completion"])
