"""Which policies can be served: those whose spec says what a request has to show them."""

from __future__ import annotations

from vla_rl.contract.env import PRIVILEGED
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec


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
