"""A curriculum: which scenes are played next follows from how their last episodes ended.

A scene is what a seed determines.  Each has decayed counts of episodes n and successes s, and its chance of success is
estimated by the mean of a Beta posterior,

    p = (k m + s) / (k + n)            m = (1 + S) / (2 + N)

where S and N are the sums of s and n over the scenes of its family of tasks (over all scenes, until an episode of the
scene has told its family) and k = ``prior``: thousands of scenes that are each played a few times share what they know.
The policy changes, so all counts fade with every episode that ends anywhere, and what has not been played for long is
believed to be like its family.

A share ``explore`` of the draws goes to the scenes in order, evenly spaced, so that each comes back within
``scenes / explore`` draws (and one) whatever its score.  The others are drawn in proportion to the score, and not the
highest first: a score of few episodes is mostly noise, and the highest of many noisy ones is noise that was selected.

The choice changes what is learnt from.  **Success while training is then that of the scenes that were drawn** and no
estimate of success: they are those in doubt, so it hardly rises while the policy improves.  Validation and test have
seeds of their own and are as before.  Gradients are those of the drawn distribution; nothing is re-weighted.  What
compares success while training at two times, such as ``FallbackConfig``, compares different scenes.  Several sources
and processes have scenes and estimates of their own and tell each other nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.contract.config import Checked, above_zero, at_least
from vla_rl.contract.env import EnvSpec, on_host
from vla_rl.contract.errors import UserError

if TYPE_CHECKING:
    from vla_rl.experience.driver import Decision


class SeedStream(Iterator[int]):
    """Every ``step``-th seed from ``start`` to before ``stop``, in order, and then from the start again.

    A source says how its episodes end; a stream that chooses by that is a ``CurriculumStream``.
    """

    def __init__(self, start: int, stop: int, step: int = 1) -> None:
        self.seeds = range(start, stop, step)
        self.drawn = 0

    def __next__(self) -> int:
        seed = self.seeds[self.drawn % len(self.seeds)]
        self.drawn += 1
        return seed

    def draw(self, taken: Collection[int]) -> int:
        """The next seed; a stream that has a choice leaves out those that are ``taken``."""
        return next(self)

    def ended(self, decision: Decision, env_ids: Sequence[int] | np.ndarray) -> None:
        """The episodes of the environments ``env_ids`` [R] ended with ``decision``."""

    def counters(self) -> dict[str, float]:
        """What the stream has counted since the last call, for a rollout's ``info``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["drawn"]


_TIME_LIMIT = "time_limit"  # the one cause of a truncation that is an outcome: the policy was too slow


@dataclass(frozen=True)
class InOrder:
    """No curriculum: one seed after the other, each a new scene.  Base class of the others."""

    def stream(self, seeds: SeedStream, spec: EnvSpec, distinct: int = 1) -> SeedStream:
        """The stream of a source that has ``seeds`` and keeps ``distinct`` of them apart at a time."""
        return seeds

    def split(self, parts: int) -> InOrder:
        return self


@dataclass(frozen=True)
class ScoredScenes(InOrder, Checked):
    """What curricula share; a subclass says what a scene's score is."""

    scenes: int = at_least(512, 1)  # the first so many seeds are played, all sources together, again and again
    explore: float = above_zero(0.25, 1)  # share of the draws that goes to the scenes in order
    half_life: float = above_zero(16.0)  # an outcome counts half after so many episodes per scene
    prior: float = above_zero(1.0)  # episodes that the success of a scene's family is worth in its estimate

    @property
    def half_lives(self) -> tuple[float, ...]:
        """The half-lives [R] of the estimates that the score reads."""
        return (self.half_life,)

    def score(self, chance: np.ndarray) -> np.ndarray:
        """float64 [N], at least 0, from the estimates ``chance`` [R,N] of success."""
        raise NotImplementedError

    def stream(self, seeds: SeedStream, spec: EnvSpec, distinct: int = 1) -> SeedStream:
        """The stream over the first scenes of ``seeds``.

        Raises UserError where the environment counts no success, and for fewer scenes than ``distinct``.
        """
        if spec.success is None:
            raise UserError(
                f"{spec.name!r} counts no success, so {type(self).__name__} has no outcomes to choose by; set the "
                "curriculum to InOrder()."
            )
        stream = CurriculumStream(seeds, self, spec)
        if len(stream.seeds) < distinct:
            raise UserError(
                f"{len(stream.seeds)} scenes are fewer than the {distinct} different ones that a rollout may need, so "
                f"it could not be completed; set {type(self).__name__}.scenes to at least {distinct} per process."
            )
        return stream

    def split(self, parts: int) -> ScoredScenes:
        """So many scenes for each that all parts together have ``scenes``, rounded up."""
        return replace(self, scenes=-(-self.scenes // parts))


@dataclass(frozen=True)
class OutcomeVariance(ScoredScenes):
    """The score is p (1 - p), the variance of the next outcome: scenes that are neither mastered nor hopeless.

    After VCRL (arXiv 2509.19803), whose score is the variance k (G - k) / (G (G - 1)) within one group of G episodes;
    here all episodes of a scene count, so it works without groups, and there is no replay of old episodes.
    """

    def score(self, chance: np.ndarray) -> np.ndarray:
        p: np.ndarray = chance[0]
        return p * (1 - p)


@dataclass(frozen=True)
class LearningProgress(ScoredScenes):
    """The score is |p_fast - p_slow|: scenes whose success rises, and those that are being forgotten.

    After Matiisen et al. (arXiv 1707.00183) and Kanitscheider et al. (arXiv 2106.14876).  Of a scene that nothing
    changes about, the score is the noise of both estimates, which is largest near p = 1/2.
    """

    fast: float = above_zero(4.0)  # half-life of the fast estimate; ``half_life`` is that of the slow one

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fast >= self.half_life:
            raise UserError(
                f"LearningProgress.fast {self.fast} is not below half_life {self.half_life}, so no progress could be "
                "seen; choose a shorter one."
            )

    @property
    def half_lives(self) -> tuple[float, ...]:
        return (self.fast, self.half_life)

    def score(self, chance: np.ndarray) -> np.ndarray:
        return np.abs(chance[0] - chance[1])


class CurriculumStream(SeedStream):
    """A seed stream that draws by the outcomes that it is told.

    An episode counts when it succeeded, was ended by its task or ran into its time limit.  One that was truncated for
    another reason (a simulator that broke down or diverged, an uncertain world model) says nothing about its scene.

    The draw number d uses a generator made from the range of seeds and d, so equal outcomes give equal draws, a stream
    of another run or part draws differently, and no generator has to be saved.
    """

    def __init__(self, seeds: SeedStream, config: ScoredScenes, spec: EnvSpec) -> None:
        scenes = seeds.seeds[: config.scenes]
        super().__init__(scenes.start, scenes.stop, scenes.step)
        self.config, self.spec = config, spec
        names = sorted(set(spec.families)) or [spec.name]
        self._families = {name: number for number, name in enumerate(names)}
        half_lives = np.array(config.half_lives) * len(scenes)  # in episodes
        self._fading = (0.5 ** (1 / half_lives))[:, None, None]
        self._counts = np.zeros((len(half_lives), 2, len(scenes)))  # [R, successes and episodes, N]
        self._family = np.full(len(scenes), -1)  # -1 is the last entry of what is kept by family: all of them
        self._turn = 0  # draws in order so far, and scenes passed over in them
        self._score, self._draws = 0.0, 0

    def __next__(self) -> int:
        return self.draw(())

    def draw(self, taken: Collection[int]) -> int:
        """The next seed, none of ``taken`` unless all are."""
        free = np.ones(len(self.seeds), bool)
        free[[self.seeds.index(seed) for seed in taken]] = False
        free |= not free.any()
        scores = self.scores()
        weights = np.where(free, scores, 0.0)
        before, self.drawn = self.drawn, self.drawn + 1
        explore = self.config.explore
        if int(self.drawn * explore) > int(before * explore) or not weights.any():
            scene = self._in_order(free)
        else:
            generator = np.random.default_rng([self.seeds.start, self.seeds.step, before])
            scene = int(generator.choice(len(weights), p=weights / weights.sum()))
        self._score, self._draws = self._score + float(scores[scene]), self._draws + 1
        return self.seeds[scene]

    def _in_order(self, free: np.ndarray) -> int:
        """The next scene whose turn it is among those that are ``free``."""
        while not free[self._turn % len(free)]:
            self._turn += 1
        self._turn += 1
        return (self._turn - 1) % len(free)

    def ended(self, decision: Decision, env_ids: Sequence[int] | np.ndarray) -> None:
        host, cause = decision.host, decision.step.cause
        if not len(env_ids):
            return  # a device is waited for only where an episode ended
        tasks = on_host(decision.obs.task)
        for env_id in env_ids:
            success = bool(host.success[env_id])
            if success or host.terminated[env_id] or cause[env_id] == _TIME_LIMIT:
                self.note(int(decision.seeds[env_id]), success, self.spec.family(int(tasks[env_id])))

    def note(self, seed: int, success: bool, family: str) -> None:
        """An episode of ``seed``, of this family of tasks, ended."""
        scene = self.seeds.index(seed)
        self._family[scene] = self._families.get(family, -1)
        self._counts *= self._fading
        self._counts[:, :, scene] += [float(success), 1.0]

    def chances(self) -> np.ndarray:
        """The estimates of success, float64 [R,N] in the order of the seeds."""
        of_family = self._family[:, None] == np.arange(len(self._families) + 1)
        sums = self._counts @ of_family  # [R,2,F+1]
        sums[..., -1] = self._counts.sum(-1)
        means = (1 + sums[:, 0]) / (2 + sums[:, 1])
        prior, (successes, episodes) = self.config.prior, self._counts.swapaxes(0, 1)
        return (prior * means[:, self._family] + successes) / (prior + episodes)

    def scores(self) -> np.ndarray:
        """float64 [N] in the order of the seeds."""
        return self.config.score(self.chances())

    def counters(self) -> dict[str, float]:
        found = {"rollout/curriculum_draws": float(self._draws), "rollout/curriculum_score": self._score}
        self._score, self._draws = 0.0, 0
        return found

    def state_dict(self) -> dict[str, Any]:
        known = {"counts": self._counts.copy(), "family": self._family.copy()}
        return {"drawn": self.drawn, "turn": self._turn, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; raises UserError for a state that was saved without this curriculum."""
        if "counts" not in state or state["counts"].shape != self._counts.shape:
            raise UserError(
                "the saved state is that of another curriculum, so its scenes are unknown here; continue the run with "
                "the config that it was started with."
            )
        self.drawn, self._turn = state["drawn"], state["turn"]
        self._counts, self._family = np.array(on_host(state["counts"])), np.array(on_host(state["family"]))
