"""A rollout source in another process (``worker.py``), which acts with the weights that are published to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy, set_progress
from vla_rl.experience.columns import to_state
from vla_rl.experience.worker import Worker

_ACTOR = "vla_rl.experience.process:Actor"


class ProcessSource:
    """An ``ExperienceSource`` and a ``PolicyStore`` whose environment and acting policy live in another process.

    The process calls ``make`` ("module:function") with ``arguments``; it returns an object with ``next() -> Rollout``
    and the acting ``policy``.  Queue depth is 0: :meth:`next` acts with the weights of the last :meth:`publish`, so a
    rollout equals, bit for bit, that of the same source in this process.  Errors are those of ``Worker``.
    """

    def __init__(
        self,
        make: str,
        arguments: Mapping[str, Any],
        worker: Worker | None = None,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``worker`` is one that others use as well; without it the source starts, and closes, its own.

        ``progress`` returns the share of the run that is done; setting :attr:`policy` publishes it with the weights.
        """
        self.worker, self._own = worker or Worker(), worker is None
        self._progress = progress
        self._policy: Policy
        self._unsent: dict[str, Any] = {}
        try:
            self._number = self.worker.make(_ACTOR, make, make=make, arguments=dict(arguments))
        except BaseException:
            if self._own:
                self.worker.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self.worker.pid

    def next(self) -> Rollout:
        """One rollout as torch tensors; ``version`` is that of the weights that acted."""
        self._send_weights()
        return Rollout(**self.worker.call(self._number, "next"))

    def advance(self) -> bool:
        """One decision over there; returns whether the window is complete, for :meth:`deliver`."""
        self._send_weights()
        return bool(self.worker.call(self._number, "advance"))

    def deliver(self) -> Rollout:
        """The complete window."""
        return Rollout(**self.worker.call(self._number, "deliver"))

    def _send_weights(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, {}
            self.worker.call(self._number, "publish", **unsent)

    def publish(self, weights: Mapping[str, Tensor], progress: float = 0.0) -> int:
        """Copy ``weights`` (any of the policy's, by name) into the acting policy, as its next version."""
        return int(self.worker.call(self._number, "publish", weights=dict(weights), progress=progress))

    @property
    def policy(self) -> Policy:
        """The policy that acts.

        Setting it notes version and progress of the run; the weights are sent when the next rollout is collected and
        must not change until then.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._unsent = {"weights": changing(policy), "progress": self._progress(), "version": int(policy.version)}

    def latest(self) -> tuple[int, Mapping[str, Tensor]]:
        """Version and weights of the next rollout."""
        answer = self.worker.call(self._number, "latest")
        return int(answer["version"]), answer["weights"]

    def state_dict(self) -> dict[str, Any]:
        """The state of the source over there (see ``Resumable``)."""
        state: dict[str, Any] = self.worker.call(self._number, "state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.worker.call(self._number, "load_state_dict", state=state)

    def close(self) -> None:
        """Close the environment, and end the process if it is the source's own; safe to call twice."""
        if self._own:
            self.worker.close()
        elif self.worker.alive:
            self.worker.call(self._number, "close")

    def __enter__(self) -> ProcessSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Actor:
    """The source that ``make`` returns, in the process that acts."""

    def __init__(self, make: str, arguments: dict[str, Any]) -> None:
        self.source: Any = load(make)(**arguments)

    def next(self) -> dict[str, Any]:
        return to_state(self.source.next())

    def advance(self) -> bool:
        return bool(self.source.advance())

    def deliver(self) -> dict[str, Any]:
        return to_state(self.source.deliver())

    @torch.no_grad()
    def publish(self, weights: dict[str, Tensor], progress: float, version: int | None = None) -> int:
        policy = self.source.policy
        own = changing(policy)
        for name, item in weights.items():
            if name not in own or own[name].shape != item.shape:
                raise ContractError(
                    f"the acting policy has no weight {name!r} of shape {list(item.shape)}, so nothing was published; "
                    "make both policies from the same checkpoint or config."
                )
        for name, item in weights.items():
            own[name].copy_(item)
        set_progress(policy, progress)
        policy.version = policy.version + 1 if version is None else version
        return int(policy.version)

    def latest(self) -> dict[str, Any]:
        return {"version": self.source.policy.version, "weights": changing(self.source.policy)}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.source.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state)

    def close(self) -> None:
        self.source.close()


def changing(policy: Any) -> dict[str, Tensor]:
    """The weights and buffers of ``policy`` that may change in a run, by name: all but frozen parameters."""
    weights = dict(policy.trainable()) if callable(getattr(policy, "trainable", None)) else {}
    if not isinstance(policy, nn.Module):
        return weights
    frozen = {name for name, _ in policy.named_parameters()} - weights.keys() if weights else set()
    return {name: item for name, item in {**policy.state_dict(), **weights}.items() if name not in frozen}
