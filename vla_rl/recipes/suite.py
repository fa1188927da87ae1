"""An evaluation suite: which tasks are played from which seeds, for how long, and what counts as success."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np

from vla_rl.contract.config import JsonObject, check_limits, to_json
from vla_rl.contract.env import EnvSpec, Observe, VecEnv, on_host
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.trust import write_whole
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import Bar, Report
from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.run import Episode, OneByOne, play
from vla_rl.evaluation.video import SUFFIX_OF, Clip
from vla_rl.experience.driver import Decision
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.config_files import config_files, load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.policies import deployed

FOLDER = "suites"  # of the config folder


@dataclass(frozen=True)
class SuiteTask:
    """One task: ``horizon`` control steps in ``env``, and success as the environment's spec has to declare it."""

    name: str
    env: EnvConfig
    horizon: int
    success: Literal["once", "at_end"] | None = "once"

    def check(self, spec: EnvSpec) -> None:
        """Raise UserError unless the environment with ``spec`` plays by the rules of this task."""
        for what, wanted, found in (
            ("horizon", self.horizon, spec.time_limit),
            ("success", self.success, spec.success),
        ):
            if wanted != found:
                raise UserError(
                    f"task {self.name!r} of the suite has the {what} {wanted!r} but environment {spec.name!r} has "
                    f"{found!r}, so the numbers would be those of another protocol; set the environment's options, or "
                    "give the suite another version."
                )


@dataclass(frozen=True)
class Suite:
    """Every task is played once from each of ``episodes`` seeds; whoever runs it plays the same episodes.

    ``version`` is raised whenever a change makes its numbers incomparable with earlier ones.  The seeds are the first
    test seeds, from ``first_seed`` on; ``noise_seed`` starts the policy's noise.
    """

    name: str
    version: int
    tasks: tuple[SuiteTask, ...]
    episodes: int = 50
    first_seed: int = seed_ranges.TEST.start
    noise_seed: int = 1

    def __post_init__(self) -> None:
        """Raises UserError for a suite without tasks or episodes, or with two tasks of one name."""
        check_limits(self, episodes=(1, 1_000_000))
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise UserError(
                f"suite {self.name!r} has the tasks {names}, so results could not be told apart; give each a name of "
                "its own, and at least one."
            )

    @property
    def protocol(self) -> str:
        """Name, version, and a digest of everything that decides what is played: equal ids, comparable numbers."""
        text = json.dumps(to_json(self), sort_keys=True)
        return f"{self.name}-{self.version}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    @property
    def seeds(self) -> list[int]:
        return list(range(self.first_seed, self.first_seed + self.episodes))

    @property
    def keys(self) -> list[tuple[str, int]]:
        """(task, seed) of all episodes, in the order of the results."""
        return [(task.name, seed) for task in self.tasks for seed in self.seeds]

    def analyze(self, episodes: Sequence[EpisodeResult]) -> JsonObject:
        """What ``results.json`` says about ``episodes`` beyond the score of every task: nothing here."""
        return {}

    def draw(self, report: Report, results: JsonObject) -> None:
        """Add the figures of ``results`` to the page: success by task."""
        rated = {name: task for name, task in results["tasks"].items() if "success" in task}
        if rated:
            bars = [Bar(name, task["success"], task["low"], task["high"]) for name, task in rated.items()]
            report.bars("Success by task", bars)

    def shown(self, results: JsonObject) -> Sequence[str]:
        """The tasks whose videos are on the page of ``results``: all."""
        return [task.name for task in self.tasks]

    def of(self, names: Sequence[str], episodes: int, seeds: str) -> Suite:
        """A part of it: the tasks ``names`` (all without), ``episodes`` each (0: as it is), on "validation" or "test".

        The part is another protocol unless it is the whole.
        """
        tasks = {task.name: task for task in self.tasks}
        for name in names:
            if name not in tasks:
                raise UserError(f"suite {self.name!r} has no task {name!r}; {did_you_mean(name, tasks)}")
        ranges = {"validation": seed_ranges.VALIDATION.start, "test": self.first_seed}
        if seeds not in ranges:
            raise UserError(f"there are no {seeds!r} seeds; {did_you_mean(seeds, ranges)}")
        kept = tuple(tasks[name] for name in names) or self.tasks
        return replace(self, tasks=kept, episodes=episodes or self.episodes, first_seed=ranges[seeds])


def find_suite(name: str) -> Suite:
    """The suite that ``name`` means: FILE.py:function, or a function in the files of ``suites``, with "-" for "_".

    "metaworld-mt10" is the function ``metaworld_mt10`` of ``configs/suites/simulators.py``.  Raises UserError for an
    unknown one and for a function that returns no suite.
    """
    found = load_config(name if ":" in name else _target(name), FOLDER)
    if not isinstance(found, Suite):
        raise UserError(
            f"{name!r} returns a {type(found).__name__} and no suite, so there is nothing to evaluate on; return a "
            "vla_rl.recipes.suite.Suite."
        )
    return found


def _target(name: str) -> str:
    """FILE.py:function of a suite's short name; files are read here, not run: some need what is not installed."""
    known: dict[str, str] = {}
    for path in config_files(FOLDER):
        for function in re.findall(r"^def ([a-z]\w*)\(\)", path.read_text(encoding="utf-8"), re.M):
            known.setdefault(function.replace("_", "-"), f"{path}:{function}")
    if name not in known:
        raise UserError(
            f"there is no suite {name!r}, so nothing can be evaluated; {did_you_mean(name, known)}  A suite of your "
            "own is named FILE.py:function."
        )
    return known[name]


def differing(one: JsonObject, other: JsonObject, prefix: str = "") -> str:
    """The first entry in which the JSON of two suites differs, as ``tasks.0.horizon: 60 or 80``; "" when equal."""
    for name in sorted(dict.fromkeys([*one, *other]), key=lambda name: name == "class"):  # the one that says least
        a, b = (_entries(side.get(name)) for side in (one, other))
        if a != b:
            where = f"{prefix}{name}"
            nested = isinstance(a, dict) and isinstance(b, dict)
            inner = differing(cast(JsonObject, a), cast(JsonObject, b), f"{where}.") if nested else ""
            return inner or f"{where}: {a!r} or {b!r}"
    return ""


def _entries(value: object) -> object:
    """Lists as objects of their numbered items."""
    return {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else value


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
        write_whole(path, media.data, 0o644)
        return name


class _Film:
    """The frames of the running episodes, of one camera."""

    def __init__(self, num_envs: int, camera: str) -> None:
        self.camera = camera
        self._frames: list[list[np.ndarray]] = [[] for _ in range(num_envs)]

    def watch(self, decision: Decision) -> None:
        """Keep what the camera sees: at the first decision of an episode before it, and after every action."""
        step, valid = decision.step, on_host(decision.step.valid)
        start, *after = (on_host(obs.images[self.camera]) for obs in (decision.obs, *step.frames))
        time = on_host(decision.obs.time)
        for env_id, frames in enumerate(self._frames):
            if not time[env_id]:
                frames[:] = [start[env_id]]
            frames += [after[i][env_id] for i in np.flatnonzero(valid[env_id])]

    def take(self, env_id: int) -> np.ndarray:
        """uint8 [n,h,w,3] of the episode that has ended in ``env_id``."""
        return np.stack(self._frames[env_id])


def _result(task: str, episode: Episode, seconds: Sequence[float], video: str) -> EpisodeResult:
    ended = episode.success, episode.cause, episode.length, episode.returns, video
    return EpisodeResult(task, episode.seed, *ended, len(seconds), 1e3 * float(np.mean(seconds)), 1e3 * max(seconds))
