"""The action expert of TinyVLA: flow matching, conditioned on features by FiLM (Perez et al. 2018)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class FilmBlock(nn.Module):
    """A residual MLP block; condition and time scale and shift its normalised hidden layer."""

    def __init__(self, width: int, condition: int, time: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.from_condition = nn.Linear(condition, 2 * width)
        self.from_time = nn.Linear(time, 2 * width, bias=False)

    def forward(self, hidden: Tensor, condition: Tensor, time: Tensor) -> Tensor:
        film = self.from_condition(condition)[:, None] + self.from_time(time)
        scale, shift = film.chunk(2, -1)
        inner = nn.functional.silu(self.inner(self.norm(hidden)) * (1 + scale) + shift)
        return hidden + self.outer(inner)


class FlowExpert(nn.Module):
    """Velocity ``v(x, t | condition)`` of the flow, and the raw log standard deviation for Flow-Noise."""

    frequencies = 16

    def __init__(self, dims: int, condition: int, width: int = 256, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(dims, width)
        self.time = nn.Sequential(nn.Linear(2 * self.frequencies, 64), nn.SiLU())
        self.blocks = nn.ModuleList(FilmBlock(width, condition, 64) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.velocity = nn.Linear(width, dims)
        last = nn.Linear(64, dims)
        self.noise = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), last)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, condition: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """``condition`` [B,C], ``x`` [B,k,N], ``t`` [B,k]: velocity and raw log-std, both [B,k,N]."""
        time = self.time(fourier_features(t, self.frequencies))
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden, condition, time)
        hidden = self.norm(hidden)
        return self.velocity(hidden), self.noise(hidden)


def fourier_features(t: Tensor, frequencies: int) -> Tensor:
    """Sines and cosines of times within [0, 1], ``t`` [...] -> [...,2*frequencies]; angular rates from 1 to 64."""
    rates = torch.exp(torch.linspace(0.0, math.log(64.0), frequencies, device=t.device, dtype=t.dtype))
    phase = t[..., None] * rates
    return torch.cat([phase.sin(), phase.cos()], -1)
