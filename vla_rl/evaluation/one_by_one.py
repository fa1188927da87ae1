"""Decide for every environment by itself, so that what a policy does depends on nothing beside its own episode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_rl.contract.env import Array, Observation, on_host
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State, encode_observation
from vla_rl.experience.collect import features_of, observation_of


class OneByOne:
    """``policy`` in batches of one, as on a robot.

    Matrix products of different batch sizes differ in the last bits, and contacts make whole episodes of such bits.  So
    in batches an outcome depends on how many environments run side by side; decided one by one it does not.  It costs
    the speed of batches, and measures what one decision takes.

    Environments that :meth:`announce` does not name idle: nothing is computed for them.
    """

    def __init__(self, policy: Policy, num_envs: int) -> None:
        self.policy = policy
        self.version = policy.version
        self.reads_privileged = bool(getattr(policy, "reads_privileged", False))
        self._playing = np.ones(num_envs, bool)
        self._seconds: list[list[float]] = [[] for _ in range(num_envs)]

    def announce(self, playing: np.ndarray) -> None:
        """Decide for the environments in ``playing`` (bool [E]) alone from now on."""
        self._playing = playing

    def seconds(self, env_id: int) -> list[float]:
        """Wall time of every decision of environment ``env_id`` since its reset: encoder and policy."""
        return self._seconds[env_id]

    def encode(self, obs: Observation) -> Features:
        """The observation itself; :meth:`act` encodes."""
        return features_of(obs)

    def initial_state(self, num_envs: int) -> State:
        return self.policy.initial_state(num_envs)

    def reset_state(self, state: State, env_ids: Array) -> State:
        for env_id in env_ids:
            self._seconds[env_id] = []
        return self.policy.reset_state(state, env_ids)

    def act(self, features: Features, state: State, mode: Mode, generator: Sequence[Any]) -> tuple[ActionOut, State]:
        """Actions of the announced environments, 0 for the others; ``generator`` has one per environment."""
        obs = observation_of(features)
        chunks: dict[int, np.ndarray] = {}
        rows = {name: [item[i : i + 1] for i in range(len(item))] for name, item in state.items()}
        for env_id in np.flatnonzero(self._playing).tolist():
            start = time.perf_counter()
            own, generators = {name: row[env_id] for name, row in rows.items()}, [generator[env_id]]
            encoded, own = encode_observation(self.policy, obs.select(slice(env_id, env_id + 1)), own, generators)
            out, own = self.policy.act(encoded, own, mode, generators)
            chunks[env_id] = on_host(out.action)[0]  # a GPU has finished when the action is here
            self._seconds[env_id].append(time.perf_counter() - start)
            for name, row in rows.items():
                row[env_id] = own[name]
        action = _side_by_side(chunks, len(obs.time))
        after = {name: _joined(row) for name, row in rows.items()}
        return ActionOut(action, action, np.zeros(len(action), np.float32), policy_version=self.version), after


def _side_by_side(chunks: dict[int, np.ndarray], num_envs: int) -> np.ndarray:
    shapes = {chunk.shape for chunk in chunks.values()}
    if len(shapes) != 1:
        raise ContractError(
            f"the policy chose chunks of the shapes {sorted(shapes)} at the same time, so they cannot be executed "
            "together; let all have one length, or evaluate with --num-envs 1."
        )
    action = np.zeros((num_envs, *shapes.pop()), np.float32)
    for env_id, chunk in chunks.items():
        action[env_id] = chunk
    return action


def _joined(rows: Sequence[Array]) -> Array:
    """Arrays or tensors [1,...] as one [E,...]."""
    if isinstance(rows[0], np.ndarray):
        return np.concatenate(rows)
    import torch

    return torch.cat(list(rows))
