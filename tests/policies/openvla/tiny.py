"""A tiny OpenVLA for tests: the network whose outputs the golden data hold."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.policies.normalization import Affine
from vla_rl.policies.openvla.decoding import OpenVLAOptions
from vla_rl.policies.openvla.network import OpenVLANetwork, OpenVLAShape, ViTShape
from vla_rl.policies.openvla.policy import OpenVLA
from vla_rl.pretrained import save_folder

GOLDEN = Path(__file__).parents[2] / "golden" / "vla" / "openvla"


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


class TaskPrompts:
    """The golden prompts, by the tasks "0", "1" and "2"."""

    def encode(self, texts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, mask = prompts()
        index = [int(text) for text in texts]
        return tokens[index], mask[index]

    def save_pretrained(self, folder: Any) -> None:
        save_folder(Path(folder), {"prompts": "tests.policies.openvla.tiny:TaskPrompts"}, {})

    @classmethod
    def from_pretrained(cls, folder: Any) -> TaskPrompts:
        return cls()


PICTURE = ArraySpec((tiny.SIDE, tiny.SIDE, 3), "uint8", 0, 255)
SPEC = EnvSpec(
    name="tiny",
    images={"front": PICTURE, "wrist": PICTURE},
    state=ArraySpec((2,), "float32", -1, 1),
    action=ArraySpec((tiny.ENTRIES,), "float32", (-1, 0, -2), (1, 5, 2)),
    tasks=("0", "1", "2"),
    control_dt=0.1,
    time_limit=50,
    max_chunk=8,
)
STATE = Affine((0.0, 0.1), (1.0, 0.5))
ACTION = Affine((0.1, 2.0, 0.0), (0.5, 1.0, 3.0))


def tiny_policy(options: OpenVLAOptions, cameras: tuple[str, ...] = ("front",), **changes: Any) -> OpenVLA:
    """A policy over the tiny network; changes of its spec by name."""
    network = tiny_network()
    return OpenVLA(replace(SPEC, **changes), network, TaskPrompts(), STATE, ACTION, cameras, options).eval()


def observed(count: int = 6) -> Observation:
    """Tasks and pictures in turn."""
    rng, index = np.random.default_rng(0), np.arange(count)
    seen = dict(zip(("front", "wrist"), tiny.pictures(count), strict=True))
    state = rng.uniform(-1, 1, (count, 2)).astype(np.float32)
    return Observation(seen, state, index % 3, index)
