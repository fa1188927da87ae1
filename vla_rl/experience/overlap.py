"""Windows of experience for which half of the environments simulate while the policy computes for the other half.

    first half    decide 1 | simulate 1 | decide 2 | simulate 2 | ...
    second half            | decide 1   | simulate 1 | decide 2 | ...

Simulation in other processes and inference in this one then take as long as the slower of the two, not as both in turn
(EnvPool and IMPALA's actors do the like with several batches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import Halves, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Features, Policy
from vla_rl.experience.columns import side_by_side
from vla_rl.experience.rollout import RolloutSource, Window
from vla_rl.experience.seeds import SeedStream
from vla_rl.experience.spans import joined


class OverlappedSource:
    """An ``ExperienceSource`` like ``RolloutSource``, with the halves of ``env`` taking turns (see ``Halves``).

    Rows, seeds, episodes, resets and the policy's state are those of ``RolloutSource``: a policy that draws nothing
    gets the same rollouts.  One that samples draws for each half in turn, so its rollouts have the same distribution
    and other values, and a curriculum is told of the halves' outcomes in turn.  ``final_index`` lists the first half's
    truncations first.  Equal seeds give equal results bit for bit, however fast either half is.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        decisions: int,
        seeds: SeedStream,
        generator: torch.Generator,
        privileged: Sequence[str] = (),
        stream: str = "",
    ) -> None:
        """Arguments as for ``RolloutSource``; raises UserError for an environment that has no halves."""
        if not isinstance(env, Halves):
            raise UserError(
                f"{type(env).__name__} of {env.spec.name!r} has no halves that compute in other processes, so none "
                'could simulate while the policy computes; make it the env of "isolated", or set overlap to False.'
            )
        self.env, self.stream = env, stream
        self._columns = _Columns(env.num_envs)
        first, second = env.halves()
        rows = slice(0, first.num_envs), slice(first.num_envs, env.num_envs)
        self._halves = tuple(
            _Half(half, policy, decisions, seeds, generator, privileged, partial(self._columns.place, part))
            for half, part in zip((first, second), rows, strict=True)
        )

    @property
    def policy(self) -> Policy:
        """The policy that acts; it may be replaced between two windows."""
        return self._halves[0].policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        for half in self._halves:
            half.policy = policy

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def next(self) -> Rollout:
        """Collect one window; see :meth:`RolloutSource.next`.

        After a NonFiniteError the other half's decision, which had begun, is kept as well.
        """
        while not self.advance():
            pass
        return self.deliver()

    def advance(self) -> bool:
        """Make one decision of the half that has fewer, unless both are full; returns whether they are now."""
        for half in self._halves:
            half.start()
        if not all(half.full for half in self._halves):
            late = min(self._halves, key=lambda half: half.decided)
            for half in self._halves:
                half.begin()
            late.finish()
        return all(half.full for half in self._halves)

    def deliver(self) -> Rollout:
        """The window as a rollout; the next one begins."""
        parts = [half.deliver() for half in self._halves]
        info = {name: sum(part.info.get(name, 0.0) for part in parts) for part in parts for name in part.info}
        whole = side_by_side([replace(part, features={}) for part in parts], info)
        spans = joined([part.spans for part in parts])
        return replace(whole, features=self._columns.take(), stream=self.stream, spans=spans)

    def state_dict(self) -> dict[str, Any]:
        """The states of both halves; see :meth:`RolloutSource.state_dict`."""
        return {"halves": [half.state_dict() for half in self._halves]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for half, saved in zip(self._halves, state["halves"], strict=True):
            half.load_state_dict(saved)


class _Columns:
    """The features {name: [T+1,E,...]} of a window, of which each half has its columns: they exist once."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._whole: dict[str, Tensor] = {}

    def place(self, rows: slice, features: Features, length: int) -> dict[str, Tensor]:
        """Where the half ``rows`` writes features like ``features`` {name: [rows,...]}, ``length`` times."""
        if not self._whole:
            shape = (length, self._num_envs)
            self._whole = {name: item.new_empty((*shape, *item.shape[1:])) for name, item in features.items()}
        return {name: item[:, rows] for name, item in self._whole.items()}

    def take(self) -> dict[str, Tensor]:
        """What both halves have written; the next window gets a place of its own."""
        whole, self._whole = self._whole, {}
        return whole


class _Half(RolloutSource):
    """One half: its decisions are begun and finished apart."""

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        decisions: int,
        seeds: SeedStream,
        generator: torch.Generator,
        privileged: Sequence[str],
        place: partial[dict[str, Tensor]],
    ) -> None:
        self._place = place
        super().__init__(env, policy, decisions, seeds, generator, privileged)

    @property
    def decided(self) -> int:
        """Decisions of this window that have been executed."""
        return len(self._window.decisions)

    @property
    def full(self) -> bool:
        """Whether this half's part of the window is complete."""
        return self.decided == self.decisions

    def begin(self) -> None:
        """Begin the next decision, unless one has begun or none is missing."""
        if not (self.full or self.driver.begun):
            self.driver.begin()

    def finish(self) -> None:
        """Wait for the decision that has begun, keep it, and begin the next episodes where it ended some."""
        self._keep(self.driver.finish(), self._window)

    def _new_window(self) -> Window:
        return Window(self._place)
