"""What a downloaded OpenVLA folder says: the sizes of its network, its prompt, its reading of the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.normalization import Affine
from vla_rl.policies.openvla.network import OpenVLANetwork, OpenVLAShape
from vla_rl.policies.openvla.vision import ViTShape
from vla_rl.policies.vla.files import open_tensors
from vla_rl.policies.vla.tokenizer import TokenizerPrompts
from vla_rl.policies.vla.weights import load_public_weights, weight_files, without_weights

_EMPTY = 29871  # Llama's token of a lone word boundary; in training it stood between the colon and the first action
_HEADS = {"vit_large_patch14_reg4_dinov2.lvd142m": 16, "vit_so400m_patch14_siglip_224": 16}
_TOWERS = ("vision_backbone.featurizer", "vision_backbone.fused_featurizer")
# What OpenVLA's code does otherwise for other values than these.
_ASSUMED = {
    "use_fused_vision_backbone": True,
    "image_resize_strategy": "resize-naive",
    "timm_override_act_layers": [None, None],
    "timm_model_ids": list(_HEADS),
}
_PROPRIO, _CONTINUOUS = "proprio_projector", "action_head"


@dataclass(frozen=True)
class OpenVLAPrompts(TokenizerPrompts):
    """``In: What action should the robot take to INSTRUCTION?`` and ``Out:``, the instruction in lower case.

    OpenVLA appends token 29871 where the tokenizer does not (``predict_action``), as it was there in training.
    """

    template: str = "In: What action should the robot take to {}?\nOut:"
    start: str = "<s>"
    longest: int = 2048

    def _tokens(self, text: str) -> list[int]:
        if text in self.known:
            return list(self.known[text])
        found = list(super()._tokens(text.lower()))
        return found if found[-1] == _EMPTY else [*found, _EMPTY]


def public_shape(folder: Path, config: Mapping[str, Any], crop: float) -> OpenVLAShape:
    """The sizes of the network of ``folder``, by its config and, for the vision transformers, by its tensors.

    Raises UserError, naming the key, for a model that differs from OpenVLA's in what is computed, and for one whose
    tokens were never trained, as a continuous head makes its actions.
    """
    heads = sorted(path.name for path in folder.glob(f"{_CONTINUOUS}*"))
    if heads:
        raise UserError(
            f"{str(folder)!r} makes its actions by a continuous head ({heads[0]}), so the distribution over its action "
            "tokens means nothing; use an OpenVLA-OFT checkpoint that was fine-tuned for discrete tokens."
        )
    for name, assumed in _ASSUMED.items():
        if config.get(name, assumed) != assumed:
            raise UserError(
                f"{str(folder / 'config.json')!r} sets {name} to {config[name]}, but only {assumed} is supported, so "
                "its pictures would be misread; use an OpenVLA checkpoint with DINOv2 and SigLIP at 224 pixels."
            )
    shapes = _tensor_shapes(folder)
    missing = [f"{tower}.pos_embed" for tower in _TOWERS if f"{tower}.pos_embed" not in shapes]
    if missing:
        raise UserError(f"{str(folder)!r} has no tensor {missing[0]}, so it cannot be built; download it again.")
    dino, siglip = (ViTShape.of(shapes, tower, count) for tower, count in zip(_TOWERS, _HEADS.values(), strict=True))
    return OpenVLAShape(
        llama=dict(config["text_config"]),
        dino=dino,
        siglip=siglip,
        bins=config["n_action_bins"],
        padding=config["pad_to_multiple_of"],
        state=proprio_size(folder),
        crop=crop,
    )


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with open_tensors(path) as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def proprio_size(folder: Path) -> int:
    """Entries of the state that OFT's projector in ``folder`` reads; 0 when there is none."""
    tensors = _proprio_tensors(folder)
    return tensors["fc1.weight"].shape[1] if tensors else 0


def filled_network(shape: OpenVLAShape, folder: Path, dtype: torch.dtype) -> OpenVLANetwork:
    """The network of ``shape`` with the weights of ``folder`` in ``dtype``; it is never in memory twice.

    OFT's projector of the state, if there is one, is in a file of its own and stays float32.
    """
    with without_weights():
        network = shape.build()
    own = [name for name in network.state_dict() if name.startswith(f"{_PROPRIO}.")]
    load_public_weights(network, folder, dtype=dtype, absent=own)
    if own:
        network.proprio_projector.load_state_dict(_proprio_tensors(folder), assign=True)
    return network


def _proprio_tensors(folder: Path) -> dict[str, Tensor]:
    """float32 tensors of OFT's projector, saved with or without DDP's ``module.``; {} when the folder has none.

    Raises UserError for a pickle, as OFT writes it.
    """
    files = sorted(folder.glob(f"{_PROPRIO}*"))
    if not files:
        return {}
    readable = [path for path in files if path.suffix == ".safetensors"]
    if not readable:
        raise UserError(
            f"{str(files[0])!r} is a pickle, which could run code, so the projector of the state is not read; write "
            f"its tensors into {files[0].stem}.safetensors with safetensors.torch.save_file."
        )
    with open_tensors(readable[0]) as tensors:
        names = list(tensors.keys())
        return {name.removeprefix("module."): tensors.get_tensor(name).to(torch.float32) for name in names}


def with_gripper(action: Affine, gripper: tuple[float, float]) -> Affine:
    """``action`` for an environment where the last entry is ``gripper`` (closed, open) instead of (0, 1).

    OpenVLA's data have 0 and 1 in every dataset; its evaluations convert them outside the policy.
    """
    closed, opened = gripper
    offset = (*action.offset[:-1], closed + (opened - closed) * action.offset[-1])
    return Affine(offset, (*action.scale[:-1], (opened - closed) * action.scale[-1]))


def critics_scale(spec: EnvSpec) -> Affine:
    """For critics, where the network reads no state: entries with finite bounds to [-1, 1], others as they are."""
    shape = spec.state.shape
    low, high = (np.broadcast_to(np.asarray(bound, dtype=float), shape) for bound in (spec.state.low, spec.state.high))
    bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
    offset, scale = np.zeros(shape), np.ones(shape)
    low, high = low[bounded], high[bounded]
    offset[bounded], scale[bounded] = (low + high) / 2, (high - low) / 2
    return Affine(tuple(offset.tolist()), tuple(scale.tolist()))
