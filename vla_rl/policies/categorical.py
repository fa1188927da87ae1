"""A categorical policy over discrete actions, from proprioception, images or both, trained from nothing by PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_rl.contract.errors import ContractError
from vla_rl.contract.limits import check_sizes
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.feed_forward import FeedForwardPolicy
from vla_rl.policies.likelihood_parts import LogprobPer, check_logprob_per
from vla_rl.policies.noise import Generators, uniform
from vla_rl.policies.normalization import Affine
from vla_rl.policies.observations import Activation, check_activation
from vla_rl.policies.statistics import RunningStatistics

_IMPOSSIBLE = -1e9  # logit of an index that an entry does not have; finite, as 0 * -inf would be NaN


@dataclass(frozen=True)
class CategoricalConfig:
    """Sizes of the network, and the cameras that it reads."""

    horizon: int = 1  # H: actions in a chunk
    width: int = 64
    depth: int = 2
    cameras: tuple[str, ...] = ()
    logprob_per: LogprobPer = "chunk"  # or "action", "token": what has a ratio of its own in PPO and GRPO
    activation: Activation = "tanh"  # or "elu", of the hidden layers

    def __post_init__(self) -> None:
        check_sizes(self, "horizon", "width", "depth")
        check_logprob_per(self)
        check_activation(self)


class CategoricalPolicy(FeedForwardPolicy):
    """An independent categorical distribution for every entry of the chunk, given the observation.

    See ``FeedForwardPolicy`` for what it depends on.  A sample is indices that count from 0; the action counts from the
    lowest index of the spec.  All indices are equally likely at initialisation.  Mode "eval" takes the most likely
    indices.  It implements ``LikelihoodPolicy`` and ``Observer``.
    """

    config: CategoricalConfig
    first: Tensor
    impossible: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        proprioception: Affine | RunningStatistics | None = None,
        config: CategoricalConfig | None = None,
    ) -> None:
        """Raises ContractError for an environment whose actions are not discrete."""
        if not spec.discrete:
            raise ContractError(
                f"the actions of {spec.name!r} are physical quantities, so a categorical policy cannot choose them; "
                "use vla_rl.policies.gaussian:GaussianPolicy."
            )
        super().__init__(spec, proprioception, config or CategoricalConfig())
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        first, counts = _indices(spec)
        impossible = torch.arange(int(counts.max())) >= counts[:, None]
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("impossible", impossible.repeat(self.config.horizon, 1), persistent=False)

    def _num_outputs(self) -> int:
        return self.entries * int(_indices(self.spec)[1].max())

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Mode "eval" draws nothing, so it needs no generator."""
        log_probs = self.log_probs(features)
        index = log_probs.argmax(-1)
        logprob = self.logprob(torch.zeros_like(log_probs[..., 0]))
        if mode == "sample":
            # The largest of log-probabilities plus Gumbel noise is a sample of the distribution.
            drawn = uniform(log_probs.shape, generator, like=log_probs).clamp_min(1e-20)
            index = (log_probs - (-drawn.log()).log()).argmax(-1)
            logprob = self.logprob(_log_density(log_probs, index))
        sample = self.chunked(index)
        return ActionOut(sample + self.first, sample, logprob, {}, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Log-probability of recorded indices, summed over the chunk in float64, or over each of its parts."""
        log_probs = self.log_probs(features)
        entropy = -(log_probs.exp() * log_probs).sum((1, 2), dtype=torch.float64)
        logprob = self.logprob(_log_density(log_probs, sample.flatten(1)))
        return Likelihood(logprob, entropy, {"log_probs": log_probs})

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        """Exact KL(old || new) [B]."""
        one, other = old["log_probs"], new["log_probs"]
        return (one.exp() * (one - other)).sum((1, 2))

    def log_probs(self, features: Features) -> Tensor:
        """The logarithm of the probability of every index of every entry, [B,H*D,N]."""
        logits = self.outputs(features).unflatten(-1, (self.entries, -1))
        return logits.masked_fill(self.impossible, _IMPOSSIBLE).log_softmax(-1)


def _indices(spec: EnvSpec) -> tuple[Tensor, Tensor]:
    """Lowest index and number of indices of every entry of an action, both int64 [D]."""
    low, high = (torch.as_tensor(bound, dtype=torch.int64) for bound in (spec.action.low, spec.action.high))
    return low.expand(spec.action_dim), (high - low + 1).expand(spec.action_dim)


def _log_density(log_probs: Tensor, index: Tensor) -> Tensor:
    """The log-probability of the chosen ``index``, both [B,H*D]."""
    return log_probs.gather(-1, index[..., None]).squeeze(-1)
