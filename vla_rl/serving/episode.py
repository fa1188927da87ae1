"""A policy of ours that acts for one environment somewhere else, one action per observation."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vla_rl.contract.env import PRIVILEGED, EnvSpec, on_host
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.policy import Policy, State, encode_observation
from vla_rl.policies.normalization import action_limits
from vla_rl.serving.observation import SingleObservation, batch_of


class ServedPolicy:
    """``policy`` in mode "eval" for any number of episodes side by side; one of them computes at a time.

    What an episode draws depends on ``seed`` and on its task (with the harness's ``episode_idx``), so neither the order
    of episodes nor the number of connections changes an action.  Raises UserError for a policy without a spec, or whose
    spec has observations that no message carries.
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.spec, self.seed, self._lock = policy, servable_spec(policy), seed, threading.Lock()
        self._low, self._high = (limit.numpy() for limit in action_limits(self.spec))

    def begin(self, task: Mapping[str, Any]) -> Episode:
        """A new episode of ``task``; raises ContractError for a task that is no JSON."""
        try:
            words = json.dumps([self.seed, task], sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise ContractError(
                f"a task cannot be named ({error}), so its episode is not started; describe it by texts and numbers."
            ) from error
        noise = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7])
        return Episode(self, torch.Generator().manual_seed(noise))

    def decide(self, obs: SingleObservation, time: int, state: State, generator: torch.Generator) -> tuple[Any, State]:
        """The chunk float32 [H,D] after ``time`` actions, clipped to the bounds, and the policy's next state."""
        with self._lock, torch.no_grad():
            batch = batch_of([obs], time, self.spec)
            features, state = encode_observation(self.policy, batch, state, [generator])
            out, state = self.policy.act(features, state, "eval", [generator])
        chunk = on_host(out.action)[0]
        if not np.isfinite(chunk).all():
            raise NonFiniteError("the policy chose an action that is not finite, so none is sent; serve another one.")
        return np.clip(chunk.astype(np.float32), self._low, self._high)[: self.spec.max_chunk], state


class Episode:
    """One episode: the rest of the policy's last chunk and its state."""

    def __init__(self, served: ServedPolicy, generator: torch.Generator) -> None:
        self._served, self._generator, self._time = served, generator, 0
        self._state = served.policy.reset_state(served.policy.initial_state(1), np.zeros(1, np.int64))
        self._chunk: deque[np.ndarray] = deque()

    def act(self, obs: SingleObservation) -> np.ndarray:
        """The next action float32 [D]: of the running chunk, as in our own environments, or the first of a new one.

        Raises ContractError for an observation that the policy would misread.
        """
        obs = obs.checked(self._served.spec)
        if not self._chunk:
            chunk, self._state = self._served.decide(obs, self._time, self._state, self._generator)
            self._chunk.extend(chunk)
        self._time += 1
        return self._chunk.popleft()


def servable_spec(policy: Policy) -> EnvSpec:
    """The spec of ``policy``; raises UserError when it has none, or has observations that no message carries."""
    spec = getattr(policy, "spec", None)
    if not isinstance(spec, EnvSpec):
        raise UserError(
            f"{type(policy).__name__} has no spec, so nobody could check what it is shown; keep the environment's "
            "spec in its attribute 'spec'."
        )
    shown = [name for name in spec.extras if not name.startswith(PRIVILEGED)]
    if shown:
        raise UserError(
            f"the policy was trained with {', '.join(shown)}, which the protocol does not carry, so it cannot be "
            "served; train it on images and state alone."
        )
    return spec


class StatelessPolicy:
    """``policy`` in mode "eval", which decides on every observation anew.

    What a request draws depends on ``seed`` and on its observation alone, so neither the order of requests nor those
    that are decided with it change its noise; float32 sums of another batch size may differ in the last bits.  The
    observation's ``time`` is always 0, because a request has none; our policies show it to their critics only.

    Raises UserError for a policy that carries a state from one decision to the next, and for one that cannot be served
    at all (``servable_spec``).
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.spec, self.seed = policy, servable_spec(policy), seed
        if state := policy.initial_state(1):
            raise UserError(
                f"{type(policy).__name__} carries a state ({', '.join(sorted(state))}) from one decision to the next, "
                "but a request of openpi's protocol belongs to no episode, so it cannot be served that way; use "
                "--protocol vla-eval, or serve a policy without state, such as its base."
            )
        self._low, self._high = (limit.numpy() for limit in action_limits(self.spec))

    def decide(self, seen: Sequence[SingleObservation]) -> list[np.ndarray | Exception]:
        """For each of ``seen``, which are checked, the chunk float32 [H,D] within the bounds, or what is wrong."""
        generators = [torch.Generator().manual_seed(self._noise_of(one)) for one in seen]
        with torch.no_grad():
            features, state = encode_observation(self.policy, batch_of(seen, 0, self.spec), {}, generators)
            out, _ = self.policy.act(features, state, "eval", generators)
        chunks = on_host(out.action).astype(np.float32)[:, : self.spec.max_chunk]
        return [self._checked(chunk) for chunk in chunks]

    def _checked(self, chunk: np.ndarray) -> np.ndarray | Exception:
        if not np.isfinite(chunk).all():
            return NonFiniteError("the policy chose an action that is not finite, so none is sent; serve another one.")
        return np.clip(chunk, self._low, self._high)

    def _noise_of(self, seen: SingleObservation) -> int:
        """The seed of what is drawn for ``seen``."""
        digest = hashlib.blake2b(f"{self.seed} {seen.instruction}".encode(), digest_size=7)
        for array in (seen.state, *seen.images.values()):
            digest.update(np.ascontiguousarray(array).data)
        return int.from_bytes(digest.digest())
