"""What a learner has learnt goes to robots: published, tried by a few of them, promoted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.signing import SigningKey
from vla_rl.recipes.fleet.publishing import publish

WHO = "learner"  # in the registry's history
KEPT = 10  # versions, besides those in use


class Releasing:
    """Versions of one learner, one on trial at a time; ``patience`` is how many seconds a trial may take.

    What a person tries, pins or promotes is left alone.
    """

    def __init__(
        self, registry: Registry, key: SigningKey, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry, self._key, self._patience, self._clock = registry, key, patience, clock
        self._began = clock()  # the trial, as far as this process knows

    @property
    def newest(self) -> int:
        """The highest version that was published, by whomever; 0 for none."""
        return max([0, *self.registry.releases.stages])

    def free(self) -> bool:
        """Whether another version can be tried: none is on trial, or one of the learner's for too long."""
        canary = self.registry.releases.canary
        return canary is None or (self._own(canary) and self._clock() - self._began > self._patience)

    def promote(self) -> int | None:
        """Promote the learner's version on trial if its episodes are enough and not worse; returns it."""
        version, verdict = self.registry.releases.canary, self.registry.verdict()
        if version is None or verdict is None or not verdict.compared or verdict.rollback or not self._own(version):
            return None
        try:
            self.registry.promote(version, WHO, verdict.why)
        except UserError:  # a person was quicker
            return None
        return version

    def release(self, checkpoint: Path, robots: Iterable[str], why: str) -> int:
        """Publish ``checkpoint`` and have some of ``robots`` try it; returns its version.

        Where all are pinned, it stays staged.
        """
        version = publish(self.registry, self._key, checkpoint, why, WHO)
        try:
            self.registry.try_on(version, robots, WHO, why)
            self._began = self._clock()
        except UserError:
            pass
        self.registry.remove_old(KEPT, WHO, "newer ones are there")
        return version

    def _own(self, version: int) -> bool:
        return any(
            change["do"] == "publish" and change["version"] == version and change["who"] == WHO
            for change in self.registry.history()
        )
