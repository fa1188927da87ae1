"""Which policy version which robot runs, as a pure function of what was done: staged, canary, active, retired."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vla_rl.contract.errors import UserError

EVERY_ROBOT = "*"  # in a pin
STAGED, CANARY, ACTIVE, RETIRED, REMOVED = "staged", "canary", "active", "retired", "removed"


@dataclass(frozen=True)
class Releases:
    """The state after ``head`` changes; a rollback is one more of them, so no number is ever used again.

    stages         of every version that was published
    canary_robots  that try the canary
    before         versions that were active before this one and were not rolled back, oldest first
    pins           version by robot, or by ``EVERY_ROBOT``
    """

    head: int = 0
    stages: Mapping[int, str] = field(default_factory=dict)
    active: int | None = None
    canary: int | None = None
    canary_robots: frozenset[str] = frozenset()
    before: tuple[int, ...] = ()
    pins: Mapping[str, int] = field(default_factory=dict)

    def version_for(self, robot: str) -> int | None:
        """What ``robot`` runs from its next episode on: its pin, else everybody's pin, else canary or active."""
        for pinned in (robot, EVERY_ROBOT):
            if pinned in self.pins:
                return self.pins[pinned]
        return self.canary if robot in self.canary_robots else self.active

    def in_use(self) -> frozenset[int]:
        """Versions that a robot runs, or that a rollback leads to."""
        used = {self.active, self.canary, *self.before[-1:], *self.pins.values()}
        return frozenset(version for version in used if version is not None)

    def check(self, version: int) -> None:
        """Raise UserError unless robots can run ``version``."""
        if self.stages.get(version, REMOVED) == REMOVED:
            known = ", ".join(str(one) for one, stage in self.stages.items() if stage != REMOVED)
            raise UserError(
                f"there is no policy version {version}, so robots keep what they run; choose of: {known or 'none'}."
            )

    def after(self, change: Mapping[str, Any]) -> Releases:
        """The state after ``change``, an entry of the registry's history, which was possible."""
        return replace(_CHANGES[change["do"]](self, change), head=self.head + 1)

    # -- the changes ------------------------------------------------------------------------------------------------

    def _published(self, change: Mapping[str, Any]) -> Releases:
        return self._staged({change["version"]: STAGED})

    def _trying(self, change: Mapping[str, Any]) -> Releases:
        stages = {self.canary: RETIRED} if self.canary is not None else {}
        tried = self._staged({**stages, change["version"]: CANARY})
        return replace(tried, canary=change["version"], canary_robots=frozenset(change["robots"]))

    def _promoted(self, change: Mapping[str, Any]) -> Releases:
        version, ended = change["version"], self._without_canary()
        if self.active is not None:
            ended = replace(ended._staged({self.active: RETIRED}), before=(*self.before, self.active))
        return replace(ended._staged({version: ACTIVE}), active=version)

    def _rolled_back(self, change: Mapping[str, Any]) -> Releases:
        """The canary is withdrawn, or else the active version gives way to the one before it."""
        if self.canary is not None:
            return self._without_canary()
        *before, last = self.before
        stages = {last: ACTIVE} if self.active is None else {self.active: RETIRED, last: ACTIVE}
        return replace(self._staged(stages), active=last, before=tuple(before))

    def _pinned(self, change: Mapping[str, Any]) -> Releases:
        return replace(self, pins={**self.pins, change["robot"]: change["version"]})

    def _unpinned(self, change: Mapping[str, Any]) -> Releases:
        return replace(self, pins={robot: at for robot, at in self.pins.items() if robot != change["robot"]})

    def _removed(self, change: Mapping[str, Any]) -> Releases:
        left = tuple(version for version in self.before if version not in change["versions"])
        return replace(self._staged(dict.fromkeys(change["versions"], REMOVED)), before=left)

    def _without_canary(self) -> Releases:
        stages = {self.canary: RETIRED} if self.canary is not None else {}
        return replace(self._staged(stages), canary=None, canary_robots=frozenset())

    def _staged(self, stages: Mapping[int, str]) -> Releases:
        return replace(self, stages={**self.stages, **stages})


_CHANGES: dict[str, Callable[[Releases, Mapping[str, Any]], Releases]] = {
    "publish": Releases._published,
    "canary": Releases._trying,
    "promote": Releases._promoted,
    "roll back": Releases._rolled_back,
    "pin": Releases._pinned,
    "unpin": Releases._unpinned,
    "remove": Releases._removed,
}
