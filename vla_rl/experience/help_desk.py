"""The help that several robots get: their situations, what their next episodes are, and what is left to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vla_rl.experience.help import Escalation, Help, HelpProtocol, Situation


@dataclass(frozen=True)
class Episode:
    """What a robot's next episode is.

    help   the degree of help
    shown  a person demonstrates it; with another ``help`` than ``NONE``, the scene of the situation is played
    """

    help: Help = Help.NONE
    shown: bool = False

    @property
    def same_scene(self) -> bool:
        """Whether it is played in the scene that the robot failed in."""
        return self.help > Help.NONE

    @property
    def from_hard_state(self) -> bool:
        """Whether it begins in the state in which the robot got stuck, and not where the scene begins."""
        return self.shown or self.help > Help.DEMONSTRATION_REPLAY


class HelpDesk:
    """Keeps to the budget of ``config`` over ``num_envs`` robots, whose situations do not touch each other.

    ``protocol`` says which help is due, None: ``config`` itself.  A demonstration that cannot be afforded is left out:
    the policy tries the scene again without.  When robots were put back as often as allowed, the situation is left for
    another scene instead.
    """

    def __init__(self, config: Escalation, num_envs: int, protocol: HelpProtocol | None = None) -> None:
        self.config, self._protocol = config, protocol or config
        self._situations = [Situation()] * num_envs
        self._episodes = [Episode()] * num_envs
        self._shown = [False] * num_envs  # a demonstration was given since the last failure
        self.demonstrations, self.returns = 0, 0  # so far
        self.given = dict.fromkeys(Help, 0)  # attempts with each degree of help, so far

    def episode(self, robot: int) -> Episode:
        """What the present episode of ``robot`` is."""
        return self._episodes[robot]

    def situation(self, robot: int) -> Situation:
        """Where ``robot`` is stuck; empty where it is not."""
        return self._situations[robot]

    def next(self, robots: Sequence[int], affordable: int) -> list[Episode]:
        """What the next episodes of ``robots`` are, of which at most ``affordable`` are demonstrated."""
        left, found = affordable, []
        for robot in robots:
            self._episodes[robot] = chosen = self._chosen(robot, left)
            left -= chosen.shown
            self.demonstrations += chosen.shown
            self.returns += chosen.from_hard_state
            self.given[chosen.help] += not chosen.shown
            if not chosen.same_scene:
                self.forget(robot)
            found.append(chosen)
        return found

    def ended(self, robot: int, success: bool, furthest: float) -> None:
        """The episode of ``robot`` has ended; its ``furthest`` progress was that.

        A success without a person's hand ends the situation, as does one under guidance.
        """
        if self._episodes[robot].shown:
            self._shown[robot] = True
            return
        if success:
            self.forget(robot)
            return
        self._shown[robot] = False
        self._situations[robot] = Situation((*self._situations[robot].reached, furthest))

    def forget(self, robot: int) -> None:
        """Leave the situation of ``robot``: it needs no help, or gets another scene."""
        self._situations[robot], self._shown[robot] = Situation(), False

    def _chosen(self, robot: int, demonstrations: int) -> Episode:
        due, returns = self._protocol.due(self._situations[robot]), self.config.returns - self.returns
        if due == Help.DEMONSTRATION_REPLAY:
            left = min(demonstrations, self.config.demonstrations - self.demonstrations, returns)
            return Episode(due, shown=left > 0 and not self._shown[robot])
        return Episode(due) if returns > 0 else Episode()
