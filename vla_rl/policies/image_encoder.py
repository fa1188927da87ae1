"""Networks that see: a small one for pixels, trained with the policy or critic that reads it, and TinyVLA's backbone.

In the backbone text queries attend to the image cells that the instruction names.  It stands in for a pretrained
vision-language model: ``training/imitation.py`` trains it to point at named objects; afterwards it is frozen, and its
features are computed once per observation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.policy import Features


class ImageEncoder(nn.Module):
    """Image features [B,F] of the pixels ``image/NAME`` uint8 [B,h,w,c] among a policy's features.

    Every camera has three convolutions (those of Mnih et al. 2015, with half the channels and kernels that also fit
    images of 16 pixels) and a linear layer.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], width: int = 128) -> None:
        """``shapes`` (h, w, c) by camera, at least 16 pixels a side; ``width``: features of each camera."""
        super().__init__()
        self.cameras, self.size = tuple(shapes), width * len(shapes)
        self.networks = nn.ModuleList(_network(h, w, c, width) for h, w, c in shapes.values())

    @classmethod
    def of(cls, spec: EnvSpec, cameras: tuple[str, ...]) -> ImageEncoder:
        """The encoder of ``cameras`` of ``spec``; raises UserError for a camera that is not there or too small."""
        for name in cameras:
            if name not in spec.images:
                raise UserError(
                    f"{spec.name!r} has no camera {name!r}, so no policy can read it; {did_you_mean(name, spec.images)}"
                )
            if min(spec.images[name].shape[:2]) < 16:
                raise UserError(
                    f"the images {name!r} of {spec.name!r} have {spec.images[name].shape[:2]} pixels, too few for "
                    "three convolutions; give images of at least 16 pixels a side."
                )
        return cls({name: spec.images[name].shape for name in cameras})

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """[...,F] for images [...,h,w,c]; F is 0 without cameras."""
        state = features["state"]
        parts = [state.new_zeros((*state.shape[:-1], 0))]
        for name, network in zip(self.cameras, self.networks, strict=True):
            image = features[IMAGE + name]
            flat = network(_pixels(image.flatten(0, -4), like=next(network.parameters())))
            parts.append(flat.unflatten(0, image.shape[:-3]))
        return torch.cat(parts, -1)


def _pixels(image: Tensor, like: Tensor) -> Tensor:
    """uint8 [B,h,w,c] as numbers within [0, 1], channels first; black is 0, so that a dark background is silent."""
    return image.permute(0, 3, 1, 2).to(like).div(255.0)


def _network(height: int, width: int, channels: int, features: int) -> nn.Sequential:
    convolutions = nn.Sequential(
        _scaled(nn.Conv2d(channels, 16, 5, 4, 2)),
        nn.ReLU(),
        _scaled(nn.Conv2d(16, 32, 3, 2, 1)),
        nn.ReLU(),
        _scaled(nn.Conv2d(32, 32, 3, 1, 1)),
        nn.ReLU(),
        nn.Flatten(),
    )
    with torch.no_grad():
        size = convolutions(torch.zeros(1, channels, height, width)).shape[1]
    return convolutions.extend([_scaled(nn.Linear(size, features)), nn.ReLU()])


def _scaled(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """``layer`` with orthogonal weights that keep the scale through ReLU, and without bias at first."""
    nn.init.orthogonal_(layer.weight, 2.0**0.5)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


IMAGE = "image/"  # before the camera's name in features
Activation: TypeAlias = Literal["tanh", "elu"]


@torch.no_grad()
def encode_inputs(obs: Observation, spec: EnvSpec, cameras: tuple[str, ...], device: torch.device) -> Features:
    """``{"state": [E,S] physical, "time": [E,1], "image/NAME": uint8 [E,h,w,c]}`` on ``device``.

    time / time limit is for critics only.
    """
    state = torch.as_tensor(obs.state, device=device)
    time = torch.as_tensor(obs.time)[:, None].to(state) / spec.time_limit
    images = {IMAGE + name: torch.as_tensor(obs.images[name], device=device) for name in cameras}
    return {"state": state, "time": time, **images}


def hidden_layers(inputs: int, width: int, depth: int, activation: Activation = "tanh") -> list[nn.Module]:
    """``depth`` linear layers of ``width``, each followed by ``activation``."""
    follow, sizes = nn.Tanh if activation == "tanh" else nn.ELU, [inputs] + [width] * depth
    return [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), follow())]


@torch.no_grad()
def make_orthogonal(layers: Iterable[nn.Module]) -> None:
    """Draw the linear ones of hidden ``layers`` anew from torch's global generator: orthogonal with gain sqrt(2).

    Biases are 0.  PPO from nothing learns in fewer steps with it (Engstrom et al. 2020, arXiv 2005.12729).
    """
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class BackboneOutput:
    """features [B,F]; ``uv`` [B,Q,2]: attended positions (x right, y down, in [-1,1]); attention logits [B,Q,cells]."""

    features: Tensor
    uv: Tensor
    logits: Tensor


class PointingBackbone(nn.Module):
    """Convolutions for one camera, a small text encoder, and ``queries`` that attend from the text to image cells.

    Each query returns its soft-argmax position (spatial softmax, Levine et al. 2016) and the features attended to.
    """

    stride = 4

    def __init__(self, words: int, queries: int = 4, width: int = 48, value: int = 96, max_words: int = 12) -> None:
        super().__init__()
        self.queries, self.value = queries, value
        self.conv = nn.Sequential(
            nn.Conv2d(3, 16, 5, 2, 2), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU(), nn.Conv2d(32, width, 3, 1, 1)
        )
        self.context = nn.Sequential(nn.SiLU(), nn.Conv2d(width, width, 3, 1, 1), nn.SiLU())
        self.words = nn.Embedding(words + 1, width, padding_idx=0)
        self.positions = nn.Parameter(0.02 * torch.randn(max_words, width))
        self.text = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.query = nn.Linear(width, queries * width)
        self.key = nn.Conv2d(width, width, 1)
        self.values = nn.Conv2d(width, value, 1)

    @property
    def features(self) -> int:
        """``F``: numbers per observation and camera."""
        return self.queries * (2 + self.value)

    def forward(self, images: Tensor, tokens: Tensor) -> BackboneOutput:
        """Encode ``images`` uint8 [B,h,w,3] under instructions ``tokens`` int64 [B,L]."""
        pixels = images.permute(0, 3, 1, 2).to(self.positions.dtype).contiguous(memory_format=torch.channels_last)
        cells = self.context(self.conv(pixels.div_(127.5).sub_(1.0)))
        centres, cells = cell_centres(cells.shape[2], cells.shape[3], like=cells), cells.flatten(2)
        logits = self._logits(self.text_queries(tokens), cells)
        weight = logits.softmax(-1)
        uv = weight @ centres
        attended = self._values(weight @ cells.transpose(1, 2))
        return BackboneOutput(torch.cat([uv, attended], -1).flatten(1), uv, logits)

    # Keys and values are affine in the cells, so the few queries and means are mapped instead of the many cells:
    # q.(Wc + b) = (W'q).c + q.b, and a mean of values is the value of the mean.

    def _logits(self, queries: Tensor, cells: Tensor) -> Tensor:
        """Scaled products [B,Q,cells] of ``queries`` [B,Q,width] with the keys of ``cells`` [B,width,cells]."""
        weight, bias = self.key.weight.flatten(1), self.key.bias
        assert bias is not None
        return ((queries @ weight) @ cells + (queries @ bias)[..., None]) / cells.shape[1] ** 0.5

    def _values(self, cells: Tensor) -> Tensor:
        """The values [B,Q,value] of mean cells [B,Q,width]."""
        return nn.functional.linear(cells, self.values.weight.flatten(1), self.values.bias)

    def text_queries(self, tokens: Tensor) -> Tensor:
        """Queries [B,Q,width] from an instruction; each distinct one is encoded once, an empty one as zeros."""
        unique, inverse = torch.unique(tokens, dim=0, return_inverse=True)
        padding = unique == 0
        masked = padding & ~padding.all(1, keepdim=True)  # a softmax over no key is NaN in some kernels
        encoded = self.text(self.words(unique) + self.positions[: unique.shape[1]], src_key_padding_mask=masked)
        words = (~padding).sum(1, keepdim=True).clamp_min(1)
        mean = encoded.masked_fill(padding[..., None], 0.0).sum(1) / words
        return self.query(mean).unflatten(-1, (self.queries, -1))[inverse]


def cell_centres(rows: int, columns: int, like: Tensor) -> Tensor:
    """Centres of image cells [rows*columns, 2] as (x right, y down) in [-1,1]."""
    y = (torch.arange(rows, device=like.device, dtype=like.dtype) + 0.5) / rows * 2 - 1
    x = (torch.arange(columns, device=like.device, dtype=like.dtype) + 0.5) / columns * 2 - 1
    return torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1).reshape(-1, 2)


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
