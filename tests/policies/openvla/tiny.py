"""A tiny OpenVLA for tests: the network whose outputs the golden data hold."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file

from tests.golden.vla.weights import weight
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.policies.normalization import Affine
from vla_rl.policies.openvla.base import OpenVLABase
from vla_rl.policies.openvla.decoding import OpenVLAOptions
from vla_rl.policies.openvla.heads import FILES, HeadShape
from vla_rl.policies.openvla.network import OpenVLANetwork, OpenVLAShape, ViTShape
from vla_rl.policies.openvla.policy import OpenVLA
from vla_rl.pretrained import save_folder

P = TypeVar("P", bound=OpenVLABase)
GOLDEN = Path(__file__).parents[2] / "golden" / "vla" / "openvla"


def _script(name: str) -> Any:
    """The file in the folder of the golden data, which is no package: another library's environment runs it."""
    spec = importlib.util.spec_from_file_location(f"openvla_{name}", GOLDEN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = _script("tiny")


def tiny_shape(state: int = 0, head: HeadShape | None = None) -> OpenVLAShape:
    patches = (tiny.SIDE // tiny.PATCH) ** 2
    dino, siglip = (
        ViTShape(s["embed_dim"], s["depth"], tiny.HEADS, s["mlp_ratio"] * s["embed_dim"], tiny.PATCH, patches)
        for s in (tiny.DINO, tiny.SIGLIP)
    )
    dino = ViTShape(**{**vars(dino), "registers": 4, "classes": True})
    return OpenVLAShape(tiny.LLAMA, dino, siglip, tiny.BINS, tiny.PADDING, state, head)


def tiny_network(state: int = 0, head: HeadShape | None = None) -> OpenVLANetwork:
    return filled(tiny_shape(state, head).build())


def filled(network: OpenVLANetwork, prefix: str = "action_head.") -> OpenVLANetwork:
    """``network`` with weights by the rules of the golden data; ``prefix`` of the names of its head's."""
    with torch.no_grad():
        for name, item in network.state_dict().items():
            rule = weight if name.partition(".")[0] in FILES[1:] else tiny.weight
            item.copy_(torch.from_numpy(rule(name.replace("action_head.", prefix), tuple(item.shape))))
    return network.eval()


def golden_outputs() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "outputs.safetensors")


def prompts(of: tuple[tuple[int, ...], ...] = tiny.PROMPTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [3,L] of the golden prompts, padded on the right."""
    longest = max(map(len, of))
    tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in of])
    return tokens, torch.tensor([[i < len(ids) for i in range(longest)] for ids in of])


def pictures() -> list[torch.Tensor]:
    """uint8 [3,h,w,3] of either camera."""
    return [torch.from_numpy(item) for item in tiny.pictures(len(tiny.PROMPTS))]


class TaskPrompts:
    """The golden prompts, by the tasks "0", "1" and "2"."""

    of = tiny.PROMPTS

    def encode(self, texts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, mask = prompts(self.of)
        index = [int(text) for text in texts]
        return tokens[index], mask[index]

    def save_pretrained(self, folder: Any) -> None:
        save_folder(Path(folder), {"prompts": f"tests.policies.openvla.tiny:{type(self).__name__}"}, {})

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


def tiny_policy(
    options: OpenVLAOptions,
    cameras: tuple[str, ...] = ("front",),
    kind: type[P] = OpenVLA,  # type: ignore[assignment]
    head: HeadShape | None = None,
    **changes: Any,
) -> P:
    """A policy over the tiny network; changes of its spec by name."""
    network = tiny_network(head=head)
    return kind(replace(SPEC, **changes), network, TaskPrompts(), STATE, ACTION, cameras, options).eval()


def observed(count: int = 6) -> Observation:
    """Tasks and pictures in turn."""
    rng, index = np.random.default_rng(0), np.arange(count)
    seen = dict(zip(("front", "wrist"), tiny.pictures(count), strict=True))
    state = rng.uniform(-1, 1, (count, 2)).astype(np.float32)
    return Observation(seen, state, index % 3, index)


# -- OpenVLA-OFT's continuous heads -----------------------------------------------------------------------------------


def oft_golden() -> dict[str, torch.Tensor]:
    """What OpenVLA-OFT's own classes computed, see ``write_oft.py``."""
    return load_file(GOLDEN / "oft.safetensors")


def oft_network(head: HeadShape, prefix: str) -> OpenVLANetwork:
    """The network of those golden data; ``prefix``: of its head's tensors in the rule of their weights."""
    return filled(replace(tiny_shape(tiny.OFT_STATE, head), llama=tiny.OFT_LLAMA).build(), prefix)


class OftPrompts(TaskPrompts):
    """Those of the continuous heads' golden data."""

    of = tiny.OFT_PROMPTS


OFT_SPEC = replace(
    SPEC,
    state=ArraySpec((tiny.OFT_STATE,), "float32", -1, 1),
    action=ArraySpec((tiny.OFT_ENTRIES,), "float32", -9, 9),
)


def oft_policy(kind: type[P], head: HeadShape, prefix: str, options: OpenVLAOptions | None = None) -> P:
    """The policy of those golden data; what it executes are the normalised actions."""
    numbers = Affine((0.0,) * tiny.OFT_STATE, (1.0,) * tiny.OFT_STATE)
    actions = Affine((0.0,) * tiny.OFT_ENTRIES, (1.0,) * tiny.OFT_ENTRIES)
    both, chosen = ("front", "wrist"), options or OpenVLAOptions()
    return kind(OFT_SPEC, oft_network(head, prefix), OftPrompts(), numbers, actions, both, chosen).eval()


def oft_observed() -> Observation:
    index = np.arange(len(tiny.PROMPTS))
    seen = dict(zip(("front", "wrist"), tiny.pictures(len(tiny.PROMPTS)), strict=True))
    return Observation(seen, tiny.states(), index, index)
