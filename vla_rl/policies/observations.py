"""What policies that are trained from nothing read: proprioception and the pixels of chosen cameras."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from vla_rl.contract.config import check_choice
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.policy import Features

IMAGE = "image/"  # before the camera's name in features
Activation: TypeAlias = Literal["tanh", "elu"]


def check_activation(config: Any) -> None:
    """Raise UserError unless ``config.activation`` is one of :data:`Activation`."""
    check_choice(config, "activation", "tanh", "elu")


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
