"""Every policy with a likelihood x every sampler, small and with random weights, for ``test_likelihoods.py``.

A new family is one line of :data:`FAMILIES`: how to make it, and whether its density is that of what it samples.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Normal

from tests.policies import (
    test_diffusion,
    test_feed_forward,
    test_latent_noise,
    test_tiny,
)
from tests.policies.openvla.tiny import tiny_policy
from tests.policies.test_tiny import NOISE_PLACEMENTS, SCHEDULES, SPEC
from tests.policies.vla import test_flow_vla
from tests.policies.vla.tiny_vlas import PI0, PI05, SMOLVLA, STATE
from tests.residuals import POINT, SMALL, StateEncoder, biased_base
from tests.token_toys import PARTS, token_policy
from tests.toys import seeded
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.policy import ActionOut, Features, Likelihood, LikelihoodPolicy, encode_observation
from vla_rl.policies.advantage_conditioned import AdvantageConditioned, AdvantageConfig
from vla_rl.policies.diffusion import DiffusionSampler
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy, LogprobPer
from vla_rl.policies.flow import AllSteps, FlowNoise, FlowSampler, FlowSde, LastStepFromNoise
from vla_rl.policies.gaussian_around import AroundConfig, GaussianAround
from vla_rl.policies.openvla.decoding import (
    OFT_PROCESS,
    OFT_REVERSE,
    Autoregressive,
    Decoding,
    OpenVLAOptions,
    Parallel,
)
from vla_rl.policies.openvla.heads import Denoising, Regression
from vla_rl.policies.openvla.policy import OpenVLA, OpenVLADiffusion, OpenVLARegression
from vla_rl.policies.pi0.policy import Pi0
from vla_rl.policies.pi05.policy import Pi05
from vla_rl.policies.residual import GaussianResidual
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions

BATCH = 16


@dataclass(frozen=True)
class Family:
    """``make`` gives equal weights at every call; without ``exact`` a part of the chain is kept as it was sampled.

    ``copies``: decisions per observation where means are estimated; ``full``: only in the full gate, as a combination
    of a schedule and a placement that are both in other lines.
    """

    make: Callable[[], Any]
    exact: bool = True
    copies: int = 64
    full: bool = False


def gaussian(logprob_per: LogprobPer) -> GaussianPolicy:
    torch.manual_seed(0)
    policy = GaussianPolicy(SPEC, config=GaussianConfig(3, width=16, logprob_per=logprob_per))
    torch.nn.init.normal_(policy.last.weight, std=0.5)
    torch.nn.init.normal_(policy.log_std, std=0.3)
    return policy


def advantage_conditioned() -> AdvantageConditioned:
    """With vectors that differ, and guided: both of its passes count."""
    sampler = FlowSampler(FlowSde(0.5), AllSteps(), 4)
    base = test_tiny.made(sampler)
    policy = AdvantageConditioned(base, AdvantageConfig(base.config.horizon, sampler, guidance=1.5))
    torch.manual_seed(0)
    torch.nn.init.normal_(policy.indicators.weight, std=0.5)
    return policy


def flow_vla(new: Callable[[VLAOptions], FlowVLA], kept: str, sampler: FlowSampler) -> FlowVLA:
    """With larger weights: with those of an initialization, hardly anything is attended to."""
    torch.manual_seed(0)
    policy = new(VLAOptions(horizon=2, kept=kept, sampler=sampler))
    with torch.no_grad():
        for parameter in policy.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
            parameter.add_(torch.randn_like(parameter), alpha=0.5 / fan_in**0.5)
    return policy.eval()


def open_vla(decoding: Decoding, logprob_per: LogprobPer) -> OpenVLA:
    return tiny_policy(OpenVLAOptions(decoding=decoding, horizon=2, temperature=1.6, logprob_per=logprob_per))


def open_vla_gaussian(logprob_per: LogprobPer) -> GaussianAround:
    """Around an L1 head, with a std of its own for every number."""
    options = OpenVLAOptions(decoding=Parallel(3), horizon=2)
    base = tiny_policy(options, kind=OpenVLARegression, head=Regression(3, 16))
    policy = GaussianAround(base, AroundConfig(0.3, logprob_per))
    torch.manual_seed(0)
    torch.nn.init.normal_(policy.log_std, std=0.3)
    return policy


def open_vla_diffusion() -> OpenVLADiffusion:
    sampler = DiffusionSampler(OFT_PROCESS, OFT_REVERSE, 5, 5)
    options = OpenVLAOptions(decoding=Parallel(3), horizon=2, denoising=sampler)
    return tiny_policy(options, kind=OpenVLADiffusion, head=Denoising(3, 16))


def residual() -> GaussianResidual:
    torch.manual_seed(1)
    policy = GaussianResidual(biased_base(), StateEncoder(POINT), SMALL)
    torch.nn.init.normal_(policy.delta.last.weight, std=0.2)
    return policy


FLOW_VLAS: dict[str, tuple[Callable[[VLAOptions], FlowVLA], int]] = {
    "toy": (test_flow_vla.made, 64),
    "SmolVLA": (lambda options: SmolVLA.new(SPEC, STATE, SMOLVLA, options), 16),
    "pi0": (lambda options: Pi0.new(SPEC, STATE, PI0, options), 16),
    "pi0.5": (lambda options: Pi05.new(SPEC, STATE, PI05, options), 16),
}
VLA_CHOICES = [
    ("prefix", FlowSampler(FlowSde(0.5), AllSteps(), 3)),
    ("pictures", FlowSampler(FlowNoise(), AllSteps(), 3)),
    ("prefix", FlowSampler(FlowSde(0.5), LastStepFromNoise(), 3)),
]

GATE = (("toy", 0), ("toy", 1), ("SmolVLA", 2), ("pi0", 0), ("pi0.5", 1))  # families and choices

FAMILIES: dict[str, Family] = {
    **{f"gaussian per {per}": Family(partial(gaussian, per)) for per in PARTS},
    **{f"categorical per {per}": Family(partial(token_policy, per, 0.5)) for per in PARTS},
    "categorical with unequal counts": Family(test_feed_forward.made_categorical),
    **{
        f"flow {type(schedule).__name__} {type(placement).__name__}": Family(
            partial(test_tiny.made, FlowSampler(schedule, placement, 4)),
            exact=type(placement) in (AllSteps, LastStepFromNoise),
            full=(i - j) % len(NOISE_PLACEMENTS) != 0,
        )
        for i, schedule in enumerate(SCHEDULES)
        for j, placement in enumerate(NOISE_PLACEMENTS)
    },
    **{
        f"diffusion {name}": Family(partial(test_diffusion.made, item))
        for name, item in test_diffusion.POLICIES.items()
    },
    "flow with a history": Family(
        lambda: test_tiny.made(FlowSampler(FlowSde(0.5), AllSteps(), 4), n_obs_steps=3), full=True
    ),
    "latent noise": Family(test_latent_noise.gaussian),
    "advantage-conditioned flow": Family(advantage_conditioned),
    "residual": Family(residual),
    **{
        f"{name} with {kept}, {sampler.schedule} {sampler.placement}": Family(
            partial(flow_vla, new, kept, sampler), copies=copies, full=(name, i) not in GATE
        )
        for (name, (new, copies)), (i, (kept, sampler)) in itertools.product(FLOW_VLAS.items(), enumerate(VLA_CHOICES))
    },
    "OpenVLA in turn": Family(partial(open_vla, Autoregressive(2), "token"), copies=16),
    "OpenVLA at once": Family(partial(open_vla, Parallel(3), "action"), copies=16),
    "OpenVLA's L1 head": Family(partial(open_vla_gaussian, "action"), copies=16),
    "OpenVLA's diffusion head": Family(open_vla_diffusion, copies=16),
}


# -- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """A policy, and what it decided for ``BATCH`` observations."""

    policy: Any
    features: Features
    out: ActionOut

    def log_prob(self, index: Any = slice(None), policy: LikelihoodPolicy | None = None) -> Likelihood:
        """The likelihood of the decisions at ``index`` under ``policy``, or the one that made them."""
        features, aux = ({name: item[index] for name, item in part.items()} for part in (self.features, self.out.aux))
        return (policy or self.policy).log_prob(features, self.out.sample[index], aux)


def observed(spec: EnvSpec, count: int = BATCH, seed: int = 0) -> Observation:
    """Random observations within the bounds of ``spec``."""
    rng = np.random.default_rng(seed)
    low, high = (
        np.clip(np.broadcast_to(bound, spec.state.shape), -1, 1) for bound in (spec.state.low, spec.state.high)
    )
    images = {name: rng.integers(0, 256, (count, *item.shape), np.uint8) for name, item in spec.images.items()}
    state = rng.uniform(low, high, (count, *spec.state.shape)).astype(np.float32)
    return Observation(images, state, rng.integers(0, len(spec.tasks), count), rng.integers(0, spec.time_limit, count))


def in_dtype(features: Features, dtype: torch.dtype) -> Features:
    """``features`` with all that is floating point in ``dtype``."""
    return {name: item.to(dtype) if item.is_floating_point() else item for name, item in features.items()}


def encoded(policy: Any, obs: Observation, dtype: torch.dtype) -> tuple[Features, Any]:
    """Features of ``obs`` in ``dtype``, and the policy's state, at the beginning of episodes."""
    count = len(obs.state)
    state = policy.reset_state(policy.initial_state(count), np.arange(count))
    features, state = encode_observation(policy, obs, state, seeded(7))
    return in_dtype(features, dtype), state


@cache
def recorded(name: str, dtype: torch.dtype = torch.float64, many: bool = False) -> Recorded:
    """A decision of the family ``name`` for each of ``BATCH`` observations, or ``copies``; do not change it."""
    policy = FAMILIES[name].make()
    for part in (policy, getattr(policy, "base", None)):  # a frozen base is not a module of its policy
        if isinstance(part, torch.nn.Module):
            part.to(dtype)
    features, state = encoded(policy, observed(policy.spec), dtype)
    copies = FAMILIES[name].copies if many else 1
    features, state = (
        {key: item.repeat_interleave(copies, 0) for key, item in part.items()} for part in (features, state)
    )
    out, _ = policy.act(features, state, "sample", seeded(1))
    return Recorded(policy, features, out)


def moved(found: Recorded, spread: float) -> Any:
    """A copy of the policy with random changes of its weights, such that log-ratios have a std of about ``spread``."""
    before, step = found.log_prob().logprob.detach(), 1e-5
    near = (found.log_prob(policy=_shifted(found.policy, step)).logprob.detach() - before).flatten(
        1 if before.ndim > 1 else 0
    )
    change = near.sum(1) if near.ndim > 1 else near
    return _shifted(found.policy, step * spread / float(change.std()))


def _shifted(policy: Any, step: float) -> Any:
    policy, generator = copy.deepcopy(policy), seeded(3)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            if parameter.requires_grad:
                parameter += step * torch.randn(parameter.shape, generator=generator).to(parameter)
    return policy


# -- the same by torch ------------------------------------------------------------------------------------------------


def law(params: Mapping[str, Tensor]) -> Distribution:
    """The distribution of every entry, [B,N], or of every entry of every denoising step, [B,K',N]."""
    if "log_probs" in params:
        return Categorical(logits=params["log_probs"])
    return Normal(params["mean"], params["std"])


def outcome(out: ActionOut, params: Mapping[str, Tensor]) -> Tensor:
    """What was drawn from :func:`law`."""
    if "log_probs" in params:
        return out.sample.flatten(1)
    if "points" not in out.aux:
        return out.sample.flatten(1)[:, None]
    points, count = out.aux["points"], params["mean"].shape[1]
    steps = out.aux.get("noisy_steps", torch.arange(count).expand(len(points), -1))
    return points.gather(1, 1 + steps[..., None].expand(-1, -1, points.shape[-1]))
