"""A policy of ours that answers requests that have nothing to do with each other, several in one forward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from vla_rl.contract.env import on_host
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import Policy, encode_observation
from vla_rl.policies.normalization import action_limits
from vla_rl.serving.observation import SingleObservation, batch_of
from vla_rl.serving.servable import servable_spec


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
