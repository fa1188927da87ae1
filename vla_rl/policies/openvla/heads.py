"""OpenVLA-OFT's continuous heads: actions of the hidden states of a chunk's placeholders (arXiv 2502.19645).

Names of tensors are those of the files that its authors' code writes.  Shape letters: ``B`` batch, ``W`` width of the
language model, ``D`` entries of an action, ``C`` actions of a chunk, which has ``C D`` placeholders, an action's side
by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BLOCKS = 2  # of a head's residual network


class Perceptron(nn.Module):
    """Two layers; of vision transformers, and OFT's projector of the state or of noisy actions."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x.to(self.fc1.weight.dtype))))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ResidualNetwork(nn.Module):
    """[...,inputs] -> [...,outputs]: a layer, two residual blocks and a layer, with norms before each."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, hidden)
        self.mlp_resnet_blocks = nn.ModuleList(_Block(hidden) for _ in range(BLOCKS))
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class ActionHead(nn.Module):
    """Hidden states of placeholders [B,C D,W] -> numbers of every action [B,C,D], in the dtype of its weights."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries = entries

    def forward(self, hidden: Tensor) -> Tensor:
        stacked = hidden.unflatten(1, (-1, self.entries)).flatten(2)
        found: Tensor = self.residual_network(stacked.to(self.residual_network.fc1.weight.dtype))
        return found

    @property
    def residual_network(self) -> ResidualNetwork:
        raise NotImplementedError


class RegressionHead(ActionHead):
    """The normalised actions themselves, trained by their L1 distance to those demonstrated."""

    def __init__(self, inputs: int, hidden: int, entries: int) -> None:
        super().__init__(entries)
        self.model = ResidualNetwork(inputs, hidden, entries)

    @property
    def residual_network(self) -> ResidualNetwork:
        return self.model


class NoiseHead(ActionHead):
    """The noise in the normalised actions that the placeholders hold."""

    def __init__(self, inputs: int, hidden: int, entries: int) -> None:
        super().__init__(entries)
        self.noise_predictor = nn.ModuleDict({"mlp_resnet": ResidualNetwork(inputs, hidden, entries)})

    @property
    def residual_network(self) -> ResidualNetwork:
        found = self.noise_predictor["mlp_resnet"]
        assert isinstance(found, ResidualNetwork)
        return found


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head."""

    entries: int  # D
    hidden: int = 4096  # of its residual network

    def parts(self, width: int) -> dict[str, nn.Module]:
        """What a network of ``width`` has for this head, by the names of OFT's files."""
        raise NotImplementedError


@dataclass(frozen=True)
class Regression(HeadShape):
    """L1 regression: the placeholders are empty, and the head's output is the chunk."""

    def parts(self, width: int) -> dict[str, nn.Module]:
        return {"action_head": RegressionHead(self.entries * width, self.hidden, self.entries)}


@dataclass(frozen=True)
class Denoising(HeadShape):
    """Diffusion: a placeholder holds a noisy number, and the head's output is its noise."""

    def parts(self, width: int) -> dict[str, nn.Module]:
        head = NoiseHead(self.entries * width, self.hidden, self.entries)
        return {"action_head": head, "noisy_action_projector": Perceptron(1, width, width)}


FILES = ("proprio_projector", "action_head", "noisy_action_projector")  # what OFT saves beside the model
FILM = "vision_backbone"  # and what it saves where the instruction changes what is seen
_LAST: dict[str, type[HeadShape]] = {"model.fc2.bias": Regression, "noise_predictor.mlp_resnet.fc2.bias": Denoising}


def head_of(shapes: Mapping[str, tuple[int, ...]]) -> HeadShape | None:
    """The head whose tensors have these ``shapes``; None for those of no known head."""
    for last, kind in _LAST.items():
        first = last.replace("fc2", "fc1")
        if last in shapes and first in shapes:
            return kind(entries=shapes[last][0], hidden=shapes[first][0])
    return None


def time_encoding(timesteps: Tensor, width: int) -> Tensor:
    """float32 [...,width] of timesteps [...]: sines, then cosines, of frequencies from 1 down to 1e-4."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=timesteps.device) * (-math.log(10_000) / (half - 1)))
    angles = timesteps[..., None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)
