"""A tiny OpenVLA for tests: the network whose outputs the golden data hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vla_rl.policies.openvla_network import OpenVLANetwork, OpenVLAShape
from vla_rl.policies.openvla_vision import ViTShape

GOLDEN = Path(__file__).parents[1] / "golden" / "vla" / "openvla"


def _script(name: str) -> Any:
    """The file in the folder of the golden data, which is no package: another library's environment runs it."""
    spec = importlib.util.spec_from_file_location(f"openvla_{name}", GOLDEN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = _script("tiny")


def tiny_shape(state: int = 0) -> OpenVLAShape:
    patches = (tiny.SIDE // tiny.PATCH) ** 2
    dino, siglip = (
        ViTShape(s["embed_dim"], s["depth"], tiny.HEADS, s["mlp_ratio"] * s["embed_dim"], tiny.PATCH, patches)
        for s in (tiny.DINO, tiny.SIGLIP)
    )
    dino = ViTShape(**{**vars(dino), "registers": 4, "classes": True})
    return OpenVLAShape(tiny.LLAMA, dino, siglip, tiny.BINS, tiny.PADDING, state)


def tiny_network(state: int = 0) -> OpenVLANetwork:
    network = tiny_shape(state).build().eval()
    with torch.no_grad():
        for name, item in network.state_dict().items():
            item.copy_(torch.from_numpy(tiny.weight(name, tuple(item.shape))))
    return network


def golden_outputs() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "outputs.safetensors")


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [3,L] of the golden prompts, padded on the right."""
    longest = max(map(len, tiny.PROMPTS))
    tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in tiny.PROMPTS])
    return tokens, torch.tensor([[i < len(ids) for i in range(longest)] for ids in tiny.PROMPTS])


def pictures() -> list[torch.Tensor]:
    """uint8 [3,h,w,3] of either camera."""
    return [torch.from_numpy(item) for item in tiny.pictures(len(tiny.PROMPTS))]
