"""A rollout source in another process (``worker.py``), which acts with the weights that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy, set_progress
from vla_rl.contract.tracker import is_shard
from vla_rl.experience.rollout import to_state
from vla_rl.experience.worker import Worker

_ACTOR = "vla_rl.experience.process:Actor"


class ProcessSource:
    """A ``CollectingSource`` whose environment and acting policy live in another process.

    The process calls ``make`` ("module:function") with ``arguments``; it returns such a source.  A rollout equals, bit
    for bit, that of the same source in this process.  Errors are those of ``Worker``.
    """

    def __init__(
        self,
        make: str,
        arguments: Mapping[str, Any],
        worker: Worker,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``worker`` may be one that others use as well.

        ``progress`` returns the share of the run that is done; setting :attr:`policy` sends it with the weights.
        """
        self.worker, self._progress = worker, progress
        self._policy: Policy
        self._unsent: dict[str, Any] = {}
        self._number = worker.make(_ACTOR, make, make=make, arguments=dict(arguments))

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

    def next(self) -> Rollout:
        """One rollout as torch tensors; ``version`` is that of the weights that acted."""
        self._send_weights()
        return Rollout(**self.worker.call(self._number, "next"))

    def advance(self) -> bool:
        """One decision over there; returns whether the window is complete, for :meth:`deliver`."""
        self._send_weights()
        return bool(self.worker.call(self._number, "advance"))

    def deliver(self) -> Rollout:
        return Rollout(**self.worker.call(self._number, "deliver"))

    def state_dict(self) -> dict[str, Any]:
        return self.worker.call(self._number, "state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.worker.call(self._number, "load_state_dict", state=state)

    def close(self) -> None:
        if self.worker.alive:
            self.worker.call(self._number, "close")

    def _send_weights(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, {}
            self.worker.call(self._number, "receive", **unsent)


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
    def receive(self, weights: dict[str, Tensor], progress: float, version: int) -> None:
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
        policy.version = version

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

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


def is_cut(policy: Any) -> bool:
    """Whether this process holds shards of the weights of ``policy``."""
    return any(map(is_shard, changing(policy).values()))


@dataclass(frozen=True)
class WholeWeights:
    """The weights of a policy that is cut into shards, for sources in other processes."""

    version: int
    weights: Mapping[str, Tensor]

    @classmethod
    def of(cls, policy: Any) -> WholeWeights:
        """Those of ``policy`` on the host; all processes that hold shards call it together, and gather one by one."""
        whole = {
            name: (item.detach().full_tensor() if is_shard(item) else item.detach()).cpu().clone()
            for name, item in changing(policy).items()
        }
        return cls(int(policy.version), whole)

    def trainable(self) -> Mapping[str, Tensor]:
        return self.weights
