"""Recorded actions replayed in the world model: imagined beside recorded pictures, as a page of clips.

A replay ends where its recording does: neither success nor uncertainty ends it, a success is not resampled, and it is
evaluated at the end of every call and of the recording, as in ``world_models/replay.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.agreement import ReplayAgreement
from vla_rl.evaluation.report import Cell, Report, Tile
from vla_rl.evaluation.video import Clip, mosaic
from vla_rl.experience.collect import ExpertPolicy
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.experience.driver import Driver
from vla_rl.recipes import world_models
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel, recorded_initial_states, replay_trajectories
from vla_rl.recipes.imagine.recipe import SavedRun
from vla_rl.recipes.terminal import bar, console

# In the order in which they are shown: first what a learner would exploit.
KINDS = ("hallucinated success", "missed success", "success in both", "failure in both")
_SCALE, _GAP, _LINE, _BAR = 4, 8, 4, 8  # pixels of a clip for one of the camera; and between, above and below pictures
_SPEED, _LINGER = 6.0, 6  # control steps a second, slow enough to compare; frames for which the end stays
_DARK, _TRACK, _LIMIT = (24, 27, 32), (62, 67, 76), (233, 234, 238)
_GREEN, _RED = (63, 195, 128), (242, 114, 108)


@dataclass(frozen=True)
class Rollout:
    """Replay held-out episodes in the world model of a run, and show imagined beside recorded pictures."""

    episodes: int = 6
    out: str = ""  # the page; RUN/rollout.html when empty
    video: str = ""  # an mp4 of the same clips in a grid; none when empty


def write_rollout(run: SavedRun, config: Rollout) -> None:
    """Replay all held-out episodes, choose some of every kind, write the page and, if wanted, the video."""
    _require_some(config.episodes)
    if config.video:
        _mp4([Clip(np.zeros((1, 2, 2, 3), np.uint8), "try")])  # what cannot be written is known before the replays
    replays = _Replays.of(run.calibrated, run.held_out)
    chosen = _mixture(replays.kinds, config.episodes)
    shown = _clips(replays, chosen)
    out = Path(config.out) if config.out else run.folder / "rollout.html"
    try:
        _page(run, replays.kinds, chosen, shown).write(out)
        if config.video:
            video = Path(config.video)
            video.parent.mkdir(parents=True, exist_ok=True)
            video.write_bytes(_mp4(shown))
    except OSError as error:
        raise UserError(
            f"{error.filename!r} could not be written ({error.strerror}), so the clips are not all there; choose "
            "another place with --out and --video."
        ) from error
    console.print(f"{len(shown)} of {len(replays.kinds)} replays: {', '.join(filter(None, (str(out), config.video)))}")


def clips(calibrated: CalibratedModel, trajectories: Trajectories, count: int) -> list[Clip]:
    """Up to ``count`` of ``trajectories`` as clips: recorded on the left, imagined on the right.

    The kinds of ``KINDS`` take turns, each with its first episodes, so errors are shown more often than they are made.
    A clip counts as a success where both outcomes agree.  A green line lies over each picture once the task is done
    there; the bar below is the uncertainty, from 0 to twice its limit, which the mark in the middle is; cameras are
    above each other.

    Raises UserError for a ``count`` below 1.
    """
    _require_some(count)
    replays = _Replays.of(calibrated, trajectories)
    return _clips(replays, _mixture(replays.kinds, count))


# -- choosing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Replays:
    """The replays of ``N`` trajectories.

    result    from the world model
    imagined  float [N]  control step of the first imagined success; inf for none
    kinds     int [N]    which of ``KINDS`` each episode is
    """

    calibrated: CalibratedModel
    trajectories: Trajectories
    result: world_models.ReplayResult
    imagined: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of(cls, calibrated: CalibratedModel, trajectories: Trajectories) -> _Replays:
        result = replay_trajectories(calibrated.model, trajectories, calibrated.imagination)
        imagined = result.success_step(calibrated.imagination.success_threshold)
        one, other = np.isfinite(imagined), trajectories.outcomes
        kinds = np.select([one & ~other, other & ~one, one & other], [0, 1, 2], 3)
        return cls(calibrated, trajectories, result, imagined, kinds)


def _require_some(count: int) -> None:
    if count < 1:
        raise UserError(f"{count} episodes show nothing; give --episodes at least 1.")


def _mixture(kinds: np.ndarray, count: int) -> np.ndarray:
    """Up to ``count`` indices of ``kinds`` [N], by kind: kinds take turns as long as they have any left."""
    waiting = [np.flatnonzero(kinds == kind).tolist() for kind in range(len(KINDS))]
    turns = [column[i] for i in range(len(kinds)) for column in waiting if i < len(column)]
    taken = np.array(turns[:count], np.int64)
    return taken[np.lexsort((taken, kinds[taken]))]


# -- filming ---------------------------------------------------------------------------------------------------------


def _clips(replays: _Replays, chosen: np.ndarray) -> list[Clip]:
    trajectories, spec = replays.trajectories, replays.calibrated.model.spec
    spans, made = trajectories.spans(), list[Clip]()
    imagined_pictures, uncertainty = _film(replays, chosen)
    for i, episode in enumerate(chosen):
        begin, end = spans[episode]
        won, length, imagined = bool(trajectories.outcomes[episode]), end - begin - 1, replays.imagined[episode]
        true_step = length if won else np.inf
        recorded = mosaic({name: image[begin:end] for name, image in trajectories.images.items()}, 1)
        frames = np.stack(
            [
                _frame(recorded[t], imagined_pictures[i, t], t >= true_step, t >= imagined, uncertainty[i, t])
                for t in [*range(length + 1), *[length] * _LINGER]
            ]
        )
        remarks = _outcomes(won, length, float(imagined)), _highest_uncertainty(replays, int(episode))
        label = f"{KINDS[replays.kinds[episode]]}: {spec.tasks[int(trajectories.task[begin])]}; {'; '.join(remarks)}"
        made.append(Clip(frames, label, won == bool(np.isfinite(imagined)), _SPEED))
    return made


def _film(replays: _Replays, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Imagine the ``chosen`` ``N`` episodes step by step, as the replay did (a rollout is a function of its seed).

    Returns pictures uint8 [N,1+T,h,w,3], cameras above each other in the order of their names, at the beginning and
    after every control step; and uncertainties [N,1+T] in units of the limit at their depth, 0 where there is none.
    """
    calibrated, trajectories = replays.calibrated, replays.trajectories
    model, limits = calibrated.model, calibrated.limits
    spans = [trajectories.spans()[i] for i in chosen]
    longest = max(end - begin - 1 for begin, end in spans)
    actions = np.zeros((len(spans), longest, model.spec.action_dim), np.float32)
    for i, (begin, end) in enumerate(spans):
        actions[i, : end - begin - 1] = trajectories.action[begin : end - 1]
    endless = world_models.endless_rollouts(calibrated.imagination, longest)
    env = world_models.ImaginedEnv(model, recorded_initial_states(model, trajectories), len(spans), None, endless)
    single = (actions[:, t : t + 1] for t in range(longest))
    driver = Driver(env, ExpertPolicy(lambda obs: next(single)), None, observe="all")
    pictures = [mosaic(driver.start(chosen).images, 1)]
    uncertainty = [np.zeros(len(spans))]
    with bar("film", longest) as update:
        for t in range(longest):
            pictures.append(mosaic(driver.step().step.obs.images, 1))
            limit, present = float(limits.at(np.array([t // model.config.frames]))[0]), env.uncertainty
            uncertainty.append(present / limit if limit > 0 else np.where(present > 0, np.inf, 0.0))
            update(t + 1, "control steps")
    return np.stack(pictures, 1), np.stack(uncertainty, 1)


def _frame(recorded: np.ndarray, imagined: np.ndarray, won: bool, imagined_won: bool, uncertainty: float) -> np.ndarray:
    """uint8 [h,w,3]: both pictures, enlarged by whole pixels, with their lines above and the bar below."""
    height, width = _SCALE * recorded.shape[0], _SCALE * recorded.shape[1]
    shape = (_LINE + height + _GAP + _BAR, 2 * width + _GAP, 3)
    frame = np.full(shape, _DARK, np.uint8)
    for picture, done, left in ((recorded, won, 0), (imagined, imagined_won, width + _GAP)):
        frame[:_LINE, left : left + width] = _GREEN if done else _DARK
        frame[_LINE : _LINE + height, left : left + width] = picture.repeat(_SCALE, 0).repeat(_SCALE, 1)
    strip, middle = frame[-_BAR:], shape[1] // 2
    strip[:] = _TRACK
    strip[:, : round(min(uncertainty / 2.0, 1.0) * shape[1])] = _RED if uncertainty > 1.0 else _GREEN
    strip[:, middle - 1 : middle + 1] = _LIMIT
    return frame


def _outcomes(won: bool, length: int, imagined: float) -> str:
    """Both outcomes in words."""
    recorded = f"success at step {length}" if won else f"no success in {length} steps"
    return f"recorded: {recorded}, imagined: {f'success at step {imagined:.0f}' if np.isfinite(imagined) else 'none'}"


def _highest_uncertainty(replays: _Replays, episode: int) -> str:
    """When a rollout would have been truncated, or how near it came to that."""
    result = replays.result
    calls = result.step[episode] > 0
    step, uncertainty = result.step[episode, calls], result.uncertainty[episode, calls]
    limit = replays.calibrated.limits.at(np.arange(len(step)))
    if (uncertainty > limit).any():
        return f"uncertainty beyond its limit at step {step[np.argmax(uncertainty > limit)]}"
    highest = (uncertainty[limit > 0] / limit[limit > 0]).max(initial=0.0)
    return f"uncertainty at most {highest:.0%} of its limit"


# -- showing ---------------------------------------------------------------------------------------------------------


def _page(run: SavedRun, kinds: np.ndarray, chosen: np.ndarray, shown: Sequence[Clip]) -> Report:
    made, picked = Counter(kinds.tolist()), Counter(kinds[chosen].tolist())
    fp, fn, tp, tn = (made[kind] for kind in range(len(KINDS)))
    table = ReplayAgreement.of(int(np.diff(run.held_out.spans()).max()) - 1, tp, fp, fn, tn)
    report = Report("Imagined beside recorded", f"Recorded actions replayed in the world model of `{run.folder}`")
    rates = {
        ("Outcomes agree", "replays"): table.accuracy,
        ("Failures imagined as successes", "failures"): table.hallucinated,
        ("Successes not imagined", "successes"): table.missed,
    }
    report.tiles([Tile.of(name, rate, f"of {rate.episodes} {of}") for (name, of), rate in rates.items() if rate])
    report.text(
        f"Each of {len(kinds)} episodes that the model was not trained on was replayed from its first picture to its "
        "last action. **Recorded pictures are on the left, imagined ones on the right**, every control step, slowed "
        "down. A green line lies over a picture once the task is done there. The bar below is the uncertainty of the "
        "prediction: its middle is the limit beyond which an imagined rollout is truncated, and it is red beyond that; "
        f"a replay goes on all the same. A success counts from a probability of "
        f"{run.calibrated.imagination.success_threshold:.0%} on; policies are trained in rollouts of up to "
        f"{run.calibrated.imagination.horizon} control steps. Intervals are 95 %."
    )
    rows: list[list[Cell]] = [[name, made[kind], picked[kind]] for kind, name in enumerate(KINDS)]
    report.table(
        ["replays", "of all", "shown"],
        rows,
        "The clips are a balanced choice, the first of each kind in turn, so errors are shown more often than they "
        "are made. Green frames: the outcomes agree; red: they do not.",
    )
    report.videos("Recorded on the left, imagined on the right", shown)
    report.command(f"vla-rl imagine rollout {run.folder}")
    return report


def _mp4(shown: Sequence[Clip]) -> bytes:
    """All clips at once in a grid, those that are over showing their end; raises UserError where H.264 is missing."""
    longest, columns = max(len(clip.frames) for clip in shown), ceil(sqrt(len(shown)))
    cells = [np.concatenate([c.frames, c.frames[-1:].repeat(longest - len(c.frames), 0)]) for c in shown]
    blank = np.full_like(cells[0], _DARK)
    cells += [blank] * (-len(cells) % columns)
    padded = [np.pad(cell, ((0, 0), (_GAP, _GAP), (_GAP, _GAP), (0, 0))) for cell in cells]
    lines = [np.concatenate(padded[i : i + columns], 2) for i in range(0, len(padded), columns)]
    media = Clip(np.concatenate(lines, 1), "grid", fps=_SPEED).media()
    if media.mime != "video/mp4":
        raise UserError(
            "PyAV with H.264 is not installed, so no mp4 can be written; pip install 'vla-rl[report]', or leave "
            "--video out."
        )
    return media.data
