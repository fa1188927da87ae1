"""A scripted person at a simulated arm: sees it fail, takes over late and with an unsteady hand, and hands back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from robot_drivers.driver import Measurement
from robot_drivers.human import HumanInput
from vla_rl.contract.env import Observation
from vla_rl.experience.person import InterventionRule, PersonConfig
from vla_rl.recipes.env_config import EnvConfig

# Of an arm at 25 Hz: half a second without progress, then a quarter until the hand is there.
PERSON = PersonConfig(patience=12, delay=6, hold=12)


class ScriptedPerson:
    """What somebody who watches an arm steers it by, control step after control step.

    ``expert(obs) -> [1,>=1,D]`` are the joint positions that the person wants, ``progress(obs) -> [1]`` is what the
    person sees; both may read ``privileged/*``.  The arm is steered by velocities, as by a keyboard; each joint's is
    off by ``config.noise`` of itself.  The noise of an episode follows from its seed.
    """

    def __init__(
        self,
        expert: Callable[[Observation], np.ndarray],
        progress: Callable[[Observation], np.ndarray],
        config: PersonConfig = PERSON,
    ) -> None:
        self._expert, self._progress, self.config = expert, progress, config
        self._rule = InterventionRule(config, 1)
        self._generator = np.random.default_rng(0)
        self._begins = True

    @classmethod
    def of_task(cls, env: EnvConfig) -> ScriptedPerson:
        """Somebody who can do the task of ``env``; raises UserError where it declares no expert or no progress."""
        return cls(env.make_expert().act, env.progress())

    @property
    def share(self) -> float:
        """The share of control steps in which the person acted, of all so far."""
        return self._rule.share

    def begin(self, seed: int) -> None:
        """The next look is at the first control step of the episode of ``seed``."""
        self._generator, self._begins = np.random.default_rng([seed, 1]), True

    def look(self, obs: Observation, measured: Measurement, dt: float) -> HumanInput:
        """What the person does in a control step of ``dt`` seconds, before which ``obs`` [1,...] was seen."""
        progress = np.asarray(self._progress(obs), float)
        if self._begins:
            self._rule.begin(np.zeros(1, np.intp), progress)
            self._begins = False
        else:
            self._rule.watch(progress, np.ones(1, bool))
            self._rule.hand_back()
        if not self._rule.acting[0]:
            return HumanInput(measured.captured)
        return HumanInput(measured.captured, engaged=True, velocity=self._velocity(obs, measured, dt))

    def _velocity(self, obs: Observation, measured: Measurement, dt: float) -> np.ndarray:
        """Of each joint [D], per second."""
        wanted = np.asarray(self._expert(obs), np.float64)[0, 0]
        unsteady = 1.0 + self.config.noise * self._generator.standard_normal(len(wanted))
        found: np.ndarray = (wanted - measured.position) / dt * unsteady
        return found
