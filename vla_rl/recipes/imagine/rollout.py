"""``vla-rl imagine rollout RUN``: recorded actions replayed in the dream, dream beside truth, as a page of clips.

A replay ends where its recording does: neither success nor doubt stops it, a success is not dreamt again, and it is
asked for at the end of every call and of the recording, as in ``world_models/replay.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.evaluation.agreement import ReplayAgreement
from vla_rl.evaluation.report import Cell, Report, Tile
from vla_rl.evaluation.stats import Rate
from vla_rl.evaluation.video import Clip, encode
from vla_rl.experience.driver import Driver
from vla_rl.experience.expert import ExpertPolicy
from vla_rl.experience.trajectories import Trajectories
from vla_rl.recipes.imagine.imagined_env import replayed
from vla_rl.recipes.imagine.saved_run import DreamRun, beginnings
from vla_rl.recipes.progress import bar, console

# In the order in which they are shown: first what a learner would be misled by.
KINDS = ("hallucinated success", "missed success", "success in both", "failure in both")
_SCALE, _GAP, _LINE, _BAR = 4, 8, 4, 8  # pixels of a clip for one of the camera; and between, above and below pictures
_SPEED, _LINGER = 6.0, 6  # control steps a second, slow enough to compare; frames for which the end stays
_DARK, _TRACK, _LIMIT = (24, 27, 32), (62, 67, 76), (233, 234, 238)
_GREEN, _RED = (63, 195, 128), (242, 114, 108)


@dataclass(frozen=True)
class Rollout:
    """Replay recorded actions of held-out episodes in the dream of a run, and show dream and truth side by side."""

    episodes: int = 6
    out: str = ""  # the page; RUN/rollout.html when empty
    video: str = ""  # an mp4 of the same clips in a grid; none when empty


def write_rollout(run: DreamRun, config: Rollout) -> None:
    """Replay all held-out episodes, choose some of every kind, write the page and, if wanted, the video."""
    trained = run.trained
    _require_some(config.episodes)
    if config.video:
        _mp4([Clip(np.zeros((1, 2, 2, 3), np.uint8), "try")])  # what cannot be written is known before the replays
    found = replayed(trained.model, run.held_out, trained.dream)
    kinds = _kinds(run.held_out, found, trained.dream)
    chosen = _mixture(kinds, config.episodes)
    shown = _clips(trained.model, trained.limits, run.held_out, trained.dream, found, chosen)
    out = Path(config.out) if config.out else run.folder / "rollout.html"
    try:
        _page(run, kinds, chosen, shown).write(out)
        if config.video:
            video = Path(config.video)
            video.parent.mkdir(parents=True, exist_ok=True)
            video.write_bytes(_mp4(shown))
    except OSError as error:
        raise UserError(
            f"{error.filename!r} could not be written ({error.strerror}), so the clips are not all there; choose "
            "another place with --out and --video."
        ) from error
    console.print(f"{len(shown)} of {len(kinds)} replays: {', '.join(filter(None, (str(out), config.video)))}")


def clips(model: Any, limits: Any, trajectories: Trajectories, dream: Any, count: int) -> list[Clip]:
    """Up to ``count`` episodes of ``trajectories`` as clips: the truth on the left, ``model``'s dream on the right.

    ``limits`` is a ``Limits``, ``dream`` a ``DreamConfig``.  The kinds of ``KINDS`` take turns, each with its first
    episodes, so errors are shown more often than they are made.  A clip counts as a success where dream and truth
    agree.  A green line lies over each picture once the task is done there; the bar below is doubt, from nothing
    to twice its limit, which the mark in the middle is; cameras are above each other.

    Raises UserError for a ``count`` below 1.
    """
    _require_some(count)
    found = replayed(model, trajectories, dream)
    return _clips(model, limits, trajectories, dream, found, _mixture(_kinds(trajectories, found, dream), count))


# -- choosing --------------------------------------------------------------------------------------------------------


def _require_some(count: int) -> None:
    if count < 1:
        raise UserError(f"{count} episodes show nothing; give --episodes at least 1.")


def _kinds(trajectories: Trajectories, found: Any, dream: Any) -> np.ndarray:
    """int [N]: which of ``KINDS`` every episode is; ``found`` is its ``Replayed``."""
    dreamt, true = np.isfinite(found.done_by(dream.done)), trajectories.outcomes
    return np.select([dreamt & ~true, true & ~dreamt, dreamt & true], [0, 1, 2], 3)


def _mixture(kinds: np.ndarray, count: int) -> np.ndarray:
    """Up to ``count`` indices of ``kinds`` [N], by kind: kinds take turns as long as they have any left."""
    waiting = [np.flatnonzero(kinds == kind).tolist() for kind in range(len(KINDS))]
    turns = [column[i] for i in range(len(kinds)) for column in waiting if i < len(column)]
    taken = np.array(turns[:count], np.int64)
    return taken[np.lexsort((taken, kinds[taken]))]


# -- filming ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """The dreams of ``N`` episodes after every control step, the beginning included.

    pictures  uint8 [N,1+T,h,w,3]   cameras above each other
    doubt     float [N,1+T]         in units of the limit at its depth; 0 at the beginning and where there is no limit
    """

    pictures: np.ndarray
    doubt: np.ndarray


def _clips(
    model: Any, limits: Any, trajectories: Trajectories, dream: Any, found: Any, chosen: np.ndarray
) -> list[Clip]:
    spans, kinds = [trajectories.spans()[i] for i in chosen], _kinds(trajectories, found, dream)
    done, seen = found.done_by(dream.done), _dreamt(model, limits, trajectories, dream, chosen)
    made = []
    for row, (episode, (begin, end)) in enumerate(zip(chosen, spans, strict=True)):
        won, length = bool(trajectories.outcomes[episode]), end - begin - 1
        true_at = length if won else np.inf
        truth = _stacked({name: image[begin:end] for name, image in trajectories.images.items()})
        frames = np.stack(
            [
                _frame(truth[t], seen.pictures[row, t], t >= true_at, t >= done[episode], seen.doubt[row, t])
                for t in [*range(length + 1), *[length] * _LINGER]
            ]
        )
        told = _told(won, length, float(done[episode])), _doubted(found, limits, int(episode))
        label = f"{KINDS[kinds[episode]]}: {model.spec.tasks[int(trajectories.task[begin])]}; {'; '.join(told)}"
        made.append(Clip(frames, label, won == bool(np.isfinite(done[episode])), _SPEED))
    return made


def _dreamt(model: Any, limits: Any, trajectories: Trajectories, dream: Any, chosen: np.ndarray) -> _Seen:
    """Dream the actions of the ``chosen`` episodes, as the replay did (a dream follows from its seed)."""
    spans = [trajectories.spans()[i] for i in chosen]
    longest = max(end - begin - 1 for begin, end in spans)
    actions = np.zeros((len(spans), longest, model.spec.action_dim), np.float32)
    for row, (begin, end) in enumerate(spans):
        actions[row, : end - begin - 1] = trajectories.action[begin : end - 1]
    endless = replace(dream, horizon=longest, deadline=None, done=2.0, failed=2.0, again=0)
    env = load("world_models.env:ImaginedEnv")(model, beginnings(model, trajectories), len(spans), None, endless)
    single = (actions[:, t : t + 1] for t in range(longest))
    driver = Driver(env, ExpertPolicy(lambda obs: next(single)), None, observe="all")
    pictures, doubts = [_stacked(driver.start(chosen).images)], [np.zeros(len(spans))]
    with bar("film", longest) as update:
        for t in range(longest):
            pictures.append(_stacked(driver.step().step.obs.images))
            limit = float(limits.at(np.array([t // model.config.frames]))[0])
            doubts.append(env.doubt / limit if limit > 0 else np.where(env.doubt > 0, np.inf, 0.0))
            update(t + 1, "control steps")
    return _Seen(np.stack(pictures, 1), np.stack(doubts, 1))


def _stacked(images: Any) -> np.ndarray:
    """uint8 [n,h,w,3]: the cameras in the order of their names, above each other."""
    return np.concatenate([images[name] for name in sorted(images)], 1)


def _frame(truth: np.ndarray, dream: np.ndarray, won: bool, dreamt: bool, doubt: float) -> np.ndarray:
    """uint8 [h,w,3]: both pictures, enlarged by whole pixels, with their lines above and the bar below."""
    height, width = _SCALE * truth.shape[0], _SCALE * truth.shape[1]
    shape = (_LINE + height + _GAP + _BAR, 2 * width + _GAP, 3)
    frame = np.full(shape, _DARK, np.uint8)
    for picture, done, left in ((truth, won, 0), (dream, dreamt, width + _GAP)):
        frame[:_LINE, left : left + width] = _GREEN if done else _DARK
        frame[_LINE : _LINE + height, left : left + width] = picture.repeat(_SCALE, 0).repeat(_SCALE, 1)
    strip, middle = frame[-_BAR:], shape[1] // 2
    strip[:] = _TRACK
    strip[:, : round(min(doubt / 2.0, 1.0) * shape[1])] = _RED if doubt > 1.0 else _GREEN
    strip[:, middle - 1 : middle + 1] = _LIMIT
    return frame


def _told(won: bool, length: int, done: float) -> str:
    """Both outcomes in words."""
    truth = f"success at step {length}" if won else f"no success in {length} steps"
    return f"truth: {truth}, dream: {f'success at step {done:.0f}' if np.isfinite(done) else 'no success'}"


def _doubted(found: Any, limits: Any, episode: int) -> str:
    """When a dream would have ended in doubt, or how near it came to that."""
    calls = found.step[episode] > 0
    step, doubt = found.step[episode, calls], found.doubt[episode, calls]
    limit = limits.at(np.arange(len(step)))
    if (doubt > limit).any():
        return f"doubt beyond its limit at step {step[np.argmax(doubt > limit)]}"
    return f"doubt at most {(doubt[limit > 0] / limit[limit > 0]).max(initial=0.0):.0%} of its limit"


# -- showing ---------------------------------------------------------------------------------------------------------


def _page(run: DreamRun, kinds: np.ndarray, chosen: np.ndarray, shown: Sequence[Clip]) -> Report:
    made, picked = Counter(kinds.tolist()), Counter(kinds[chosen].tolist())
    fp, fn, tp, tn = (made[kind] for kind in range(len(KINDS)))
    table = ReplayAgreement.of(int(np.diff(run.held_out.spans()).max()) - 1, tp, fp, fn, tn)
    report = Report("Dream beside truth", f"Recorded actions replayed in the world model of `{run.folder}`")
    tiles = [_tile("Dream and truth agree", table.accuracy, "replays")]
    if table.hallucinated:
        tiles.append(_tile("Failures dreamt as successes", table.hallucinated, "failures"))
    if table.missed:
        tiles.append(_tile("Successes not dreamt", table.missed, "successes"))
    report.tiles(tiles)
    report.text(
        f"Every one of {len(kinds)} episodes that the model has not learnt from was dreamt again from its first "
        "picture to its last action. **Left is the truth, right the dream**, every control step, slowed down. A green "
        "line lies over a picture once the task is done there. The bar below is the dream's doubt: its middle is the "
        "limit beyond which a dream is not believed, and it is red beyond that; a replay goes on all the same. "
        f"A dream counts as a success once it is {run.trained.dream.done:.0%} sure; policies learn in dreams of up to "
        f"{run.trained.dream.horizon} control steps. Intervals are 95 %."
    )
    rows: list[list[Cell]] = [[name, made[kind], picked[kind]] for kind, name in enumerate(KINDS)]
    report.table(
        ["replays", "of all", "shown"],
        rows,
        "The clips are a balanced choice, the first of each kind in turn, so errors are shown more often than they "
        "are made. Green frames: dream and truth agree; red: they do not.",
    )
    report.videos("Truth on the left, dream on the right", shown)
    report.command(f"vla-rl imagine rollout {run.folder}")
    return report


def _tile(name: str, rate: Rate, of: str) -> Tile:
    return Tile(name, rate.success, rate.low, rate.high, note=f"of {rate.episodes} {of}")


def _mp4(shown: Sequence[Clip]) -> bytes:
    """All clips at once in a grid, those that are over showing their end; raises UserError where H.264 is missing."""
    longest, columns = max(len(clip.frames) for clip in shown), ceil(sqrt(len(shown)))
    cells = [np.concatenate([c.frames, c.frames[-1:].repeat(longest - len(c.frames), 0)]) for c in shown]
    blank = np.full_like(cells[0], _DARK)
    cells += [blank] * (-len(cells) % columns)
    padded = [np.pad(cell, ((0, 0), (_GAP, _GAP), (_GAP, _GAP), (0, 0))) for cell in cells]
    lines = [np.concatenate(padded[i : i + columns], 2) for i in range(0, len(padded), columns)]
    media = encode(Clip(np.concatenate(lines, 1), "grid", fps=_SPEED))
    if media.mime != "video/mp4":
        raise UserError(
            "PyAV with H.264 is not installed, so no mp4 can be written; pip install 'vla-rl[report]', or leave "
            "--video out."
        )
    return media.data
