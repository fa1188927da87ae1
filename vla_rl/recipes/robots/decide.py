"""Who decides for an arm: a policy, a scripted expert, or nobody until a person takes over."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from robot_drivers.decisions import Decision, Query
from vla_rl.contract.env import on_host
from vla_rl.contract.policy import Policy, continue_chunk, encode_observation
from vla_rl.contract.spec import EnvSpec


class PolicyDecider:
    """A policy on one arm, chunk after chunk; its state begins anew where the runtime says that no chunk counts.

    An episode may end while a decision is made; the first one of the next episode then waits for it.
    """

    def __init__(self, policy: Policy, generator: Any) -> None:
        """``generator`` draws the noise of its chunks."""
        self.policy, self._generator = policy, generator
        self._state = policy.initial_state(1)
        self._deciding = threading.Lock()

    def __call__(self, query: Query) -> Decision:
        """The chunk [H,D] for what ``query`` sees."""
        with self._deciding:
            self._state = self._continued(query)
            features, state = encode_observation(self.policy, query.obs, self._state, self._generator)
            out, self._state = self.policy.act(features, state, "eval", self._generator)
            self._horizon = out.action.shape[1]
            return Decision(on_host(out.action)[0], self.policy.version)

    def close(self) -> None:
        """End the connection of a policy that lives in a server; safe to call twice."""
        close = getattr(self.policy, "close", None)
        if close is not None:
            close()

    def _continued(self, query: Query) -> Any:
        """The state with what became of the last chunk."""
        if query.consumed is None:
            return self.policy.reset_state(self._state, np.zeros(1, np.int64))
        steps = query.consumed  # a late query has less of a delay to bridge
        delay = max(0, min(query.delay, steps, self._horizon - steps))
        return continue_chunk(self.policy, self._state, np.zeros(1, np.int64), np.array([steps]), np.array([delay]))


def open_policy(name: str, spec: EnvSpec) -> Policy:
    """The policy of a checkpoint, a run or a server's address, for an arm like ``spec``; raises UserError."""
    from vla_rl.policies.pretrained import load_policy
    from vla_rl.recipes.policies import remote_policy
    from vla_rl.serving.access import names_server

    policy: Policy = remote_policy(name, spec) if names_server(name) else load_policy(name, spec)
    return policy


class ExpertDecider:
    """A scripted expert, which reads ``privileged/*`` and so drives simulated robots only."""

    def __init__(self, expert: Any) -> None:
        """``expert.act(obs)`` plans [1,H,D]."""
        self._expert = expert

    def __call__(self, query: Query) -> Decision:
        """Its plan [H,D] for what ``query`` sees."""
        return Decision(np.asarray(self._expert.act(query.obs))[0])


def hold_position(query: Query) -> Decision:
    """Stay where the arm is, until a person takes over."""
    return Decision(np.asarray(query.obs.state, np.float64))
