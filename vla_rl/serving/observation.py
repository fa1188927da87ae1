"""One environment's observation as it crosses a connection, and the actions that come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.contract.errors import ContractError, did_you_mean


@dataclass(frozen=True)
class SingleObservation:
    """What one environment shows a policy, without any batch axis.

    images       {camera: uint8 [h,w,c]}, in the spec's order
    state        float32 [S], proprioception in the spec's units
    instruction  the task in words
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    instruction: str

    @classmethod
    def of(cls, obs: Observation, env_id: int, spec: EnvSpec) -> SingleObservation:
        """The observation of one environment of ``obs``, whose arrays are numpy."""
        images = {name: np.ascontiguousarray(obs.images[name][env_id]) for name in spec.images}
        return cls(images, np.asarray(obs.state[env_id], np.float32), spec.tasks[int(obs.task[env_id])])

    def checked(self, spec: EnvSpec) -> SingleObservation:
        """The same with its cameras in the spec's order and the state as float32.

        Raises ContractError, naming the part, when a policy for ``spec`` would misread it.
        """
        for name in spec.images:
            if name not in self.images:
                found = ", ".join(map(repr, self.images))
                raise ContractError(
                    f"the observation has no camera {name!r} but {found:.200}, so the policy cannot act; send it, or "
                    "rename one by a layout function."
                )
        images = {name: _fitting(f"camera {name!r}", self.images[name], item) for name, item in spec.images.items()}
        state = _fitting("state", self.state, spec.state)
        if not np.isfinite(state).all():
            raise ContractError("the observation's state is not finite, so no action is chosen; look at the simulator.")
        if self.instruction not in spec.tasks:
            raise ContractError(
                f"the policy knows no instruction {self.instruction!r:.200}, so it cannot act on it; "
                f"{did_you_mean(self.instruction, spec.tasks)}"
            )
        return SingleObservation(images, state, self.instruction)


def batch_of(seen: Sequence[SingleObservation], time: int, spec: EnvSpec) -> Observation:
    """The observation [N,...] of the contract, of N that were checked, after ``time`` actions."""
    images = {name: np.stack([one.images[name] for one in seen]) for name in spec.images}
    task = np.array([spec.tasks.index(one.instruction) for one in seen])
    return Observation(images, np.stack([one.state for one in seen]), task, np.full(len(seen), time))


@dataclass(frozen=True)
class Request:
    """What one environment asks a server for: a chunk for ``payload``, the first of an episode if ``first``.

    A ``session`` is one environment's episodes, one after the other.  ``rest`` [n,D] of its last chunk, of which
    ``delay`` actions are executed while the next is computed; none where the next does not continue it.
    """

    session: int
    first: bool
    payload: Mapping[str, Any]
    rest: np.ndarray
    delay: int


def chunk_of(answer: Mapping[str, Any], sender: str) -> np.ndarray:
    """float32 [H,D]: the "actions" of a server's answer, which may be one action [D]; raises ContractError."""
    actions = answer.get("actions")
    if not isinstance(actions, np.ndarray) or actions.ndim not in (1, 2) or not actions.size:
        found = (
            f"of shape {list(actions.shape)}"
            if isinstance(actions, np.ndarray)
            else f"among {sorted(map(str, answer))}"
        )
        raise ContractError(
            f"the answer of {sender} has no actions [H,D] ({found}), so nothing was executed; check which protocol the "
            "server speaks."
        )
    if actions.dtype.kind not in "fiu":
        raise ContractError(f"{sender} sent actions of dtype {actions.dtype}, so nothing was executed; look at it.")
    with np.errstate(over="ignore"):  # what float32 does not hold is not finite
        chunk = np.atleast_2d(actions).astype(np.float32)
    if not np.isfinite(chunk).all():
        raise ContractError(f"{sender} chose an action that is not finite, so nothing was executed; look at it.")
    return chunk


def _fitting(what: str, found: Any, wanted: ArraySpec) -> np.ndarray:
    shape = list(found.shape) if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
    if shape != list(wanted.shape):
        raise ContractError(
            f"the observation's {what} has shape {shape} but the policy was trained for {list(wanted.shape)}, so it "
            "would be misread; ask the simulator for that size, or convert it by a layout function."
        )
    if found.dtype != wanted.dtype if wanted.dtype == "uint8" else found.dtype.kind not in "fiu":
        raise ContractError(
            f"the observation's {what} has dtype {found.dtype} but the policy was trained for {wanted.dtype}, so it "
            "would be misread; convert it by a layout function."
        )
    with np.errstate(over="ignore"):  # what float32 does not hold is not finite
        return np.asarray(found, wanted.dtype)
