"""The newest weights for acting policies when everything runs in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vla_rl.contract.policy import set_progress


class InProcessPolicyStore:
    """A ``PolicyStore`` for the synchronous loop.

    Actor and learner hold the same module, so :meth:`publish` changes only its version and its progress.
    """

    def __init__(self, policy: Any) -> None:
        self.policy, self.progress = policy, 0.0
        self._apply()

    def publish(self, weights: Mapping[str, Tensor], progress: float = 0.0) -> int:
        self.policy.version += 1
        self.progress = progress
        self._apply()
        return int(self.policy.version)

    def state_dict(self) -> dict[str, Any]:
        """Version and progress; the weights are the learner's."""
        return {"version": int(self.policy.version), "progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.version, self.progress = state["version"], state["progress"]
        self._apply()

    def latest(self) -> tuple[int, Mapping[str, Tensor]]:
        return int(self.policy.version), self.policy.trainable()

    def _apply(self) -> None:
        set_progress(self.policy, self.progress)
