"""Plays seeds of one task of a suite, in this process or in a worker."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.contract.env import Observation, Observe, VecEnv, on_host
from vla_rl.evaluation.one_by_one import OneByOne
from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.run import Episode, play
from vla_rl.evaluation.video import SUFFIX_OF, Clip
from vla_rl.experience.driver import Decision
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.policies import deployed
from vla_rl.recipes.suite import SuiteTask

VIDEOS = "videos"


@dataclass(frozen=True)
class Block:
    """Seeds of one task that are played in one environment object; those in ``filmed`` are recorded as videos."""

    task: SuiteTask
    policy: str
    filmed: tuple[int, ...]
    seeds: tuple[int, ...]
    num_envs: int
    noise_seed: int
    out: str  # the results' folder
    device: str = "cpu"  # where the policy computes
    vla: VLAOptions = VLAOptions()  # how a public folder is opened

    def play(self, report: Callable[[EpisodeResult], None]) -> None:
        """Play all of them; ``report`` gets each episode when it has ended and its video is on the disk.

        Raises UserError when policy, environment and task do not fit together.
        """
        count = min(self.num_envs, max(len(self.filmed), len(self.seeds)))
        with (
            deployed(self.policy, self.task.env, self.device, options=self.vla) as policy,
            closing(self.task.env.make(count)) as env,
        ):
            self.task.check(env.spec)
            decider = OneByOne(policy, count)
            parts: tuple[tuple[Sequence[int], Observe], ...] = ((self.filmed, "all"), (self.seeds, "last"))
            for seeds, observe in parts:
                for result in self._play(env, decider, seeds, observe) if seeds else ():
                    report(result)

    def _play(self, env: VecEnv, policy: OneByOne, seeds: Sequence[int], observe: Observe) -> Iterator[EpisodeResult]:
        camera = next(iter(env.spec.images), "") if observe == "all" else ""
        film = _Film(env.num_envs, camera)
        played = play(
            env,
            policy,
            seeds,
            self.noise_seed,
            observe=observe,
            watch=film.watch if camera else lambda decision: None,
            announce=policy.announce,
        )
        for episode in played:
            video = self._save(film, episode, env.spec.control_dt) if camera else ""
            yield _result(self.task.name, episode, policy.seconds(episode.env_id), video)

    def _save(self, film: _Film, episode: Episode, control_dt: float) -> str:
        """The file of the episode's video in the results' folder, which appears whole."""
        media = Clip(film.take(episode.env_id), self.task.name, fps=1.0 / control_dt).media()
        label = re.sub(r"[^A-Za-z0-9_.-]", "-", self.task.name)
        name = f"{VIDEOS}/{label}-{episode.seed}{SUFFIX_OF[media.mime]}"
        path = Path(self.out, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        writing = path.with_name(path.name + ".writing")
        writing.write_bytes(media.data)
        os.replace(writing, path)
        return name


class _Film:
    """The frames of the running episodes, of one camera."""

    def __init__(self, num_envs: int, camera: str) -> None:
        self.camera = camera
        self._frames: list[list[np.ndarray]] = [[] for _ in range(num_envs)]

    def watch(self, decision: Decision) -> None:
        """Keep what the camera sees: at the first decision of an episode before it, and after every action."""
        step, valid = decision.step, on_host(decision.step.valid)
        start, after = self._of(decision.obs), [self._of(frame) for frame in step.frames]
        time = on_host(decision.obs.time)
        for env_id, frames in enumerate(self._frames):
            if not time[env_id]:
                frames[:] = [start[env_id]]
            frames += [after[i][env_id] for i in np.flatnonzero(valid[env_id])]

    def take(self, env_id: int) -> np.ndarray:
        """uint8 [n,h,w,3] of the episode that has ended in ``env_id``."""
        return np.stack(self._frames[env_id])

    def _of(self, obs: Observation) -> np.ndarray:
        return on_host(obs.images[self.camera])


def _result(task: str, episode: Episode, seconds: Sequence[float], video: str) -> EpisodeResult:
    return EpisodeResult(
        task=task,
        seed=episode.seed,
        success=episode.success,
        cause=episode.cause,
        length=episode.length,
        returns=episode.returns,
        video=video,
        decisions=len(seconds),
        mean_ms=1e3 * float(np.mean(seconds)),
        max_ms=1e3 * max(seconds),
    )
