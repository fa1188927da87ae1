"""Where acting policies find the newest weights when everything runs in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class InProcessPolicyStore:
    """A ``PolicyStore`` for the synchronous loop: actor and learner hold the same module, so only its version moves."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def publish(self, weights: Mapping[str, Tensor]) -> int:
        self.policy.version += 1
        return int(self.policy.version)

    def state_dict(self) -> dict[str, Any]:
        """The version; the weights are the learner's."""
        return {"version": int(self.policy.version)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.version = state["version"]

    def latest(self) -> tuple[int, Mapping[str, Tensor]]:
        return int(self.policy.version), self.policy.trainable()
