"""True policy gradients of small diffusion chains with almost no sampling error, for comparison with score functions.

As in ``policies/test_flow_gradients.py`` the noise is a scrambled Sobol sequence and the true gradient goes through the
sampling itself (reparameterised), on the same points.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vla_rl.policies.diffusion import Ddim, Ddpm, DiffusionSampler, Network, Process

N, K, HIDDEN = 2, 4, 12
LEARNT = Process(timesteps=20, clip=1.0)
# With the cosine schedule few, but then huge, terms would make up the true gradient (see ``Process``).
EPSILON = Process(timesteps=20, betas="linear", prediction="epsilon", clip=3.0)
SAMPLERS = {
    "ddim": DiffusionSampler(LEARNT, Ddim(1.0), K, K, 0.1),
    "ddim half": DiffusionSampler(LEARNT, Ddim(0.5), K, K, 0.2),
    "ddpm": DiffusionSampler(LEARNT, Ddpm(), K, K, 0.1),
    "epsilon": DiffusionSampler(EPSILON, Ddim(1.0), K, K, 0.1),
    "last two": DiffusionSampler(LEARNT, Ddim(1.0), K, 2, 0.1),
    "last one": DiffusionSampler(LEARNT, Ddim(1.0), K, 1, 0.1),
}


def network(theta: Tensor) -> Network:
    """A tanh network of 74 parameters."""
    first, bias = theta[:36].view(N + 1, HIDDEN), theta[36:48]
    second, shift = theta[48:72].view(HIDDEN, N), theta[72:74]
    return lambda x, t: torch.tanh(torch.cat([x, t.unsqueeze(-1)], -1) @ first + bias) @ second + shift


def weights(seed: int = 5) -> Tensor:
    return 0.6 * torch.randn(74, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reward(action: Tensor) -> Tensor:
    """Bounded and not linear, [B]."""
    return torch.sigmoid(3 * action[:, 0] - 2 * action[:, 1] ** 2)


@dataclass(frozen=True)
class Drawn:
    """Recorded chains, their advantages, and the gradient [74] of the mean reward."""

    points: Tensor
    advantage: Tensor
    gradient: Tensor


def draw(sampler: DiffusionSampler, monkeypatch: pytest.MonkeyPatch, samples: int = 2**15) -> Drawn:
    sobol = torch.quasirandom.SobolEngine(N * (K + 1), scramble=True, seed=6)
    uniform = sobol.draw(samples, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    noise, *steps = torch.special.ndtri(uniform).view(-1, K + 1, N).unbind(1)
    frozen = sampler.steps - sampler.fine_tuned
    quiet = [xi if k < frozen else torch.zeros_like(xi) for k, xi in enumerate(steps)]
    theta, other = weights().requires_grad_(), weights(1)

    def points(xis: list[Tensor]) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", lambda *args, **kwargs: xis.pop(0))
            return sampler.sample(network(other), network(theta), noise, torch.Generator())[0]

    chain = points(steps)
    gained = reward(chain[:, -1])
    (gradient,) = torch.autograd.grad(gained.mean(), theta)
    baseline = reward(points(quiet)[:, -1])  # depends on the first point of the density only, so it adds no bias
    return Drawn(chain.detach(), (gained - baseline).detach(), gradient)


def compare(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Cosine, and the ratio of the norms."""
    return (one @ other / (one.norm() * other.norm())).item(), (one.norm() / other.norm()).item()
