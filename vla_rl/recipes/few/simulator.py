"""The simulator in the place of a learned model: a decision is tried in a copy of the situation and taken back.

It is the best model that there can be.  What a use of a model does not gain with it, it gains with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.env import Array, Observation, Snapshot, Snapshots, VecEnv, to_env
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State, encode_observation


@dataclass(frozen=True)
class Moments:
    """``B`` situations in which a decision is due.

    features  {name: [B,...]}  what the policy decides on
    state     {name: [B,...]}  the policy's own
    snapshot  {name: [B,...]}  the simulator's
    """

    features: Features
    state: State
    snapshot: Snapshot

    def __len__(self) -> int:
        return len(next(iter(self.snapshot.values())))

    def select(self, index: np.ndarray) -> Moments:
        """Those of ``index`` int [R]."""
        rows = torch.from_numpy(index)
        features, state = ({name: item[rows] for name, item in part.items()} for part in (self.features, self.state))
        return Moments(features, state, {name: item[index] for name, item in self.snapshot.items()})

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """All of ``parts``, one after the other."""
        features, state = (
            {name: torch.cat([getattr(part, kind)[name] for part in parts]) for name in getattr(parts[0], kind)}
            for kind in ("features", "state")
        )
        snapshot = {name: np.concatenate([part.snapshot[name] for part in parts]) for name in parts[0].snapshot}
        return cls(features, state, snapshot)


@dataclass(frozen=True)
class Consequence:
    """What came of one decision in each of ``B`` moments: ``Step``'s arrays as tensors, and the moments after it."""

    reward: Tensor  # [B,H]
    valid: Tensor  # bool [B,H]
    executed: Tensor  # [B,H,D]; the chosen actions where ``valid`` is False
    terminated: Tensor  # bool [B]
    truncated: Tensor
    success: Tensor
    after: Moments

    def discounted(self, gamma: float) -> tuple[Tensor, Tensor]:
        """The reward [B] and the factor [B] of the value after it, by low-level action; 0 after an end by the task."""
        powers = gamma ** torch.arange(self.reward.shape[1])
        factor = torch.where(self.terminated, 0.0, gamma ** self.valid.sum(1))
        return (self.reward * self.valid * powers).sum(1), factor


class Simulator:
    """Continues moments in environments of its own, ``env``, which must be of the kind that the moments are from.

    Raises UserError for environments without snapshots.
    """

    def __init__(self, env: VecEnv, policy: Policy, generator: torch.Generator) -> None:
        if not isinstance(env, Snapshots):
            raise UserError(
                f"{env.spec.name!r} has no snapshots, so no decision can be tried and taken back; choose an "
                "environment with them (vla-rl inspect NAME says which have)."
            )
        self.env, self.policy, self.generator = env, policy, generator
        self._started = False

    def moments(self, env: VecEnv, features: Features, state: State) -> Moments:
        """Those of all environments of ``env``, about which the policy knows ``features`` and its ``state``."""
        assert isinstance(env, Snapshots)
        return Moments(dict(features), dict(state), env.snapshot(np.arange(env.num_envs)))

    @torch.no_grad()
    def step(self, moments: Moments, action: Tensor) -> Consequence:
        """What ``action`` [B,H,D] does in ``moments``."""
        size = self.env.num_envs
        index = np.arange(len(moments))
        parts = [self._step(moments, action, index[first : first + size]) for first in range(0, len(index), size)]
        fields = {name: torch.cat([part[0][name] for part in parts]) for name in parts[0][0]}
        return Consequence(**fields, after=Moments.joined([part[1] for part in parts]))

    def _step(self, moments: Moments, action: Tensor, index: np.ndarray) -> tuple[dict[str, Tensor], Moments]:
        """Rows ``index`` of ``moments``; environments beyond them repeat the last one."""
        size, rows = self.env.num_envs, len(index)
        filled = moments.select(np.pad(index, (0, size - rows), mode="edge"))
        chunk = action[torch.from_numpy(np.pad(index, (0, size - rows), mode="edge"))]
        self._restore(filled.snapshot)
        step = self.env.step(to_env(chunk, self.env))
        features, state = self._encode(step.obs, filled.state)
        after = Moments(features, state, self.env.snapshot(np.arange(size)))
        names = ("reward", "valid", "terminated", "truncated", "success")
        found = {name: torch.as_tensor(getattr(step, name))[:rows] for name in names}
        executed = torch.as_tensor(step.executed)[:rows]
        found["executed"] = torch.where(found["valid"].unsqueeze(-1), executed, chunk[:rows].to(executed))
        return found, after.select(np.arange(rows))

    def _restore(self, snapshot: Snapshot) -> None:
        every = np.arange(self.env.num_envs)
        if not self._started:
            self.env.reset(every, np.zeros(len(every), np.int64))
            self._started = True
        self.env.restore(every, snapshot)

    def _encode(self, obs: Observation, state: State) -> tuple[Features, State]:
        return encode_observation(self.policy, obs, state, self.generator)


class Wrapped:
    """Is ``policy`` in everything; a subclass does something else or more when it acts."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def version(self) -> int:
        """The policy's."""
        return self.policy.version

    @version.setter
    def version(self, version: int) -> None:
        self.policy.version = version

    def encode(self, obs: Observation) -> Features:
        return self.policy.encode(obs)

    def context(self, features: Features, state: State, generator: object) -> tuple[Features, State]:
        """The policy's, where it has one."""
        context = getattr(self.policy, "context", None)
        return context(features, state, generator) if context else (features, state)

    def initial_state(self, num_envs: int) -> State:
        return self.policy.initial_state(num_envs)

    def reset_state(self, state: State, env_ids: Array) -> State:
        return self.policy.reset_state(state, env_ids)

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        return self.policy.act(features, state, mode, generator)


class Watching(Wrapped):
    """Notes the moments in which the policy decides, in the environments ``env``, until somebody takes them."""

    def __init__(self, policy: Policy, simulator: Simulator, env: VecEnv) -> None:
        super().__init__(policy)
        self.simulator, self.env = simulator, env
        self.noted: list[Moments] = []

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        self.noted.append(self.simulator.moments(self.env, features, state))
        return super().act(features, state, mode, generator)

    def take(self) -> list[Moments]:
        """The moments of the decisions since the last call."""
        taken, self.noted = self.noted, []
        return taken
