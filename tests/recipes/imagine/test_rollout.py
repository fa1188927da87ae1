"""Clips of the chosen episodes: recorded frames beside predicted ones."""

from __future__ import annotations

import io
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.recipes.imagine.runs import CALM, one_env, run_folder
from tests.world_models import pushing
from tests.world_models.small_models import SIDE
from vla_rl.cli.imagine import rollout
from vla_rl.contract.errors import UserError
from vla_rl.recipes.imagine import rollout as filming
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel, replay_trajectories
from vla_rl.recipes.imagine.recipe import SavedRun
from vla_rl.recipes.imagine.rollout import clips
from world_models.config import Limits

# Episodes are longer, and still replayed to the end.
SHORT = replace(CALM, horizon=5, deadline=4, resamples=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SavedRun:
    """Six of ten imagined rollouts succeed, and every other uncertainty is beyond its limit."""
    path = run_folder(tmp_path_factory.mktemp("runs") / "run", SHORT)
    pushing.played(10, seed=36).save(path / "episodes" / "held_out.npz")  # they show every kind
    made = SavedRun.load(path)
    found = replay_trajectories(made.calibrated.model, made.held_out, SHORT)
    # Between two values, since a batch of another size may round the last bit differently.
    done = 0.999 * float(np.sort(np.nanmax(found.success, 1))[4])
    limits = Limits(tuple(0.999 * limit for limit in Limits.calibrate(found.by_depth(), 0.5).values))
    CalibratedModel(made.calibrated.model, limits, replace(SHORT, success_threshold=done)).save(
        made.folder / "checkpoints" / "world"
    )
    return SavedRun.load(made.folder)


@pytest.fixture(scope="module")
def by_hand(run):
    """Every episode imagined alone, step by step: pictures, probability of "done" and uncertainty after each step."""
    env = one_env(run, batch_size=CALM.batch_size)  # as clips are made: a batch of one rounds differently
    found = []
    for episode, (begin, end) in enumerate(run.held_out.spans()):
        pictures = [env.reset(np.zeros(1, int), [episode]).images["front"][0]]
        done, uncertainty = [0.0], [0.0]
        for action in run.held_out.action[begin : end - 1]:
            pictures.append(env.step(action[None, None]).obs.images["front"][0])
            done.append(float(env.outcome[0, 0]))
            uncertainty.append(float(env.uncertainty[0]))
        found.append((np.stack(pictures), np.array(done), np.array(uncertainty)))
    return found


def first_done(run: SavedRun, done: np.ndarray) -> float:
    """The first control step with a predicted success: predictions are made at every third step and at the last."""
    asked = [t for t in range(1, len(done)) if t % 3 == 0 or t == len(done) - 1]
    return min((t for t in asked if done[t] >= run.calibrated.imagination.success_threshold), default=np.inf)


def kinds_by_hand(run, by_hand) -> list[int]:
    said = [np.isfinite(first_done(run, done)) for _, done, _ in by_hand]
    table = {(True, False): 0, (False, True): 1, (True, True): 2, (False, False): 3}
    return [table[bool(yes), bool(won)] for yes, won in zip(said, run.held_out.outcomes, strict=True)]


def test_a_clip_shows_what_was_recorded_beside_what_is_imagined_of_it(run, by_hand):
    """Every control step, the initial one included; green lines show success, the bar shows uncertainty."""
    made = clips(run.calibrated, run.held_out, 10)
    kinds = kinds_by_hand(run, by_hand)
    assert set(kinds) == {0, 1, 2, 3}, "these episodes no longer show every kind; take others"
    order = sorted(range(10), key=lambda i: (kinds[i], i))
    side, width = 4 * SIDE, 8 * SIDE + 8
    for clip, episode in zip(made, order, strict=True):
        (begin, end), (pictures, done, uncertainty) = run.held_out.spans()[episode], by_hand[episode]
        length = end - begin - 1
        assert clip.frames.shape == (length + 1 + 6, 4 + side + 8 + 8, width, 3)
        for t, frame in enumerate(clip.frames):
            t = min(t, length)  # the end stays for a while
            np.testing.assert_array_equal(frame[4 : 4 + side : 4, :side:4], run.held_out.images["front"][begin + t])
            np.testing.assert_array_equal(frame[4 : 4 + side : 4, side + 8 :: 4], pictures[t])
            won = run.held_out.outcomes[episode] and t == length
            assert (frame[0, 0].tolist() == [63, 195, 128]) == won
            assert (frame[0, -1].tolist() == [63, 195, 128]) == (t >= first_done(run, done))
            share = uncertainty[t] / run.calibrated.limits.values[max(t - 1, 0) // 3]
            filled = round(min(share / 2, 1) * width)
            colours = {tuple(pixel) for pixel in frame[-1, :filled].tolist()} - {(233, 234, 238)}
            assert colours == (set() if not filled else {(242, 114, 108)} if share > 1 else {(63, 195, 128)})
            rest = {tuple(pixel) for pixel in frame[-1, filled:].tolist()} - {(233, 234, 238)}
            assert rest <= {(62, 67, 76)}


@pytest.mark.parametrize(
    ("kinds", "count", "taken"),
    [
        ([3, 3, 2, 0, 3, 2, 1, 2], 4, [3, 6, 2, 0]),  # one of each, though failures come first
        ([3, 3, 2, 0, 3, 2, 1, 2], 6, [3, 6, 2, 5, 0, 1]),  # the errors are used up
        ([3, 3, 2, 0, 3, 2, 1, 2], 2, [3, 6]),
        ([3, 3, 3], 2, [0, 1]),
        ([2, 2], 9, [0, 1]),
    ],
)
def test_kinds_take_turns_as_long_as_there_are_any(kinds, count, taken):
    assert filming._mixture(np.array(kinds), count).tolist() == taken


def test_the_command_writes_a_page_of_its_own_and_a_video(run, tmp_path, by_hand):
    av = pytest.importorskip("av")
    video = tmp_path / "deep" / "clips.mp4"
    rollout([str(run.folder), "--episodes", "3", "--video", str(video)])
    html = (run.folder / "rollout.html").read_text()
    assert html.count('src="data:video/mp4;base64,') == 3 and not re.search(r'(src|href)="(?!data:)', html)
    kinds = kinds_by_hand(run, by_hand)
    table = re.search(r"<tbody>(.*?)</tbody>", html, re.S).group(1)
    rows = re.findall(r'<td class="n">(\d+)</td><td class="n">(\d+)</td>', table)
    assert [int(made) for made, _ in rows] == [kinds.count(i) for i in range(4)]
    assert sum(int(shown) for _, shown in rows) == 3
    with av.open(io.BytesIO(video.read_bytes())) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    longest = max(len(clip.frames) for clip in clips(run.calibrated, run.held_out, 3))
    assert len(frames) == longest and frames[0].shape[0] >= 2 * (4 * SIDE + 20)  # two lines of two


def test_a_folder_is_refused_by_what_it_lacks(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((run.folder / "config.json").read_text())
    with pytest.raises(UserError, match=r"has no world model \(checkpoints/world is missing\)"):
        SavedRun.load(other)
    shutil.copytree(run.folder / "checkpoints" / "world", other / "checkpoints" / "world")
    with pytest.raises(UserError, match=r"has no held-out episodes \(episodes/held_out.npz is missing\)"):
        SavedRun.load(other)
    with pytest.raises(UserError, match="rollout needs RUN"):
        rollout([])
