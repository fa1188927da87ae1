"""Downloaded folders of every family, tiny and with random weights, that fit any environment with pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from tests.golden.vla.smolvla.cases import VLM
from tests.golden.vla.weights import weight
from tests.policies.openvla.tiny import tiny, tiny_shape
from tests.policies.vla.public_folders import lerobot_features, word_tokenizer, write
from vla_rl.contract.env import EnvSpec
from vla_rl.policies.openvla.heads import Denoising, HeadShape, Perceptron, Regression
from vla_rl.policies.pi0.network import Gemma, Siglip
from vla_rl.policies.pi0.policy import shape_of
from vla_rl.policies.pi05.policy import shape_of as pi05_shape
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.checkpoint import PublicCheckpoint
from vla_rl.policies.vla.network import NetworkShape

CHUNK, ROOM = 20, 2  # actions of a flow's chunk; entries of its state and action that no environment here has
_EMPTY_TOKEN = 29871  # the last that OpenVLA's prompts have


def smolvla(folder: Path, spec: EnvSpec) -> Path:
    """As LeRobot writes it: ``vlm/config.json`` is what a small vision-language model needs besides."""
    config = {
        "type": "smolvla",
        **_features(spec),
        "chunk_size": CHUNK,
        "n_action_steps": CHUNK,
        "num_vlm_layers": 2,
        "resize_imgs_with_padding": [32, 32],
        "vlm_model_name": "a/small-one",
    }
    write(folder / "config.json", config)
    write(folder / "vlm" / "config.json", VLM)
    statistics = {f"observation.{name}": item for name, item in _moments(spec).items() if name == "state"}
    write(folder / "meta" / "stats.json", {**statistics, "action": _moments(spec)["action"]})
    _tokenizer(folder)
    return _weights(folder, SmolVLAShape.from_lerobot(config, VLM))


def pi0(folder: Path, spec: EnvSpec) -> Path:
    """As transformers writes it, with the statistics of its processor."""
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "model_type": "pi0",
        "vlm_config": {
            "model_type": "paligemma",
            "text_config": {"model_type": "gemma", **text, **heads},
            "vision_config": {"model_type": "siglip_vision_model", **vision, "image_size": 28, "patch_size": 14},
            "projection_dim": text["hidden_size"],
        },
        "dit_config": {"model_type": "gemma", **text, **heads, "hidden_size": 16, "intermediate_size": 24},
        "chunk_size": CHUNK,
        **_room(spec),
    }
    write(folder / "config.json", config)
    moments = {("actions" if name == "action" else name): item for name, item in _moments(spec).items()}
    flat = {f"{name}_{key}": value for name, item in moments.items() for key, value in item.items()}
    write(folder / "processor_config.json", {"processor_class": "PI0Processor", **flat})
    _tokenizer(folder, "<bos>")
    return _weights(folder, shape_of(folder, config))


VARIANTS = {
    "gemma_2b": Gemma(32, 48, 2, 2, 1, head_dim=16, vocab_size=64),
    "gemma_300m": Gemma(16, 24, 2, 2, 1, head_dim=16, vocab_size=64),
}
TOWER = Siglip(16, 24, 1, 2, patch_size=14, image_size=28)


@contextmanager
def tiny_variants() -> Iterator[None]:
    """Meanwhile the variants that LeRobot's config.json names are tiny, for it has no words for other sizes."""
    with mock.patch.multiple("vla_rl.policies.pi0.policy", VARIANTS=VARIANTS, SO400M=TOWER):
        yield


def pi05(folder: Path, spec: EnvSpec) -> Path:
    """As LeRobot writes it, to be opened among :func:`tiny_variants`."""
    modes = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    config = {
        "type": "pi05",
        **_features(spec),
        "normalization_mapping": modes,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "image_resolution": [28, 28],
        "chunk_size": CHUNK,
        "n_action_steps": CHUNK,
        "min_period": 4e-3,
        "max_period": 4.0,
        "tokenizer_max_length": 200,
    }
    write(folder / "config.json", config)
    names = {"observation.state": spec.state.shape[0], "action": spec.action_dim}
    write(folder / "meta" / "stats.json", {name: {"q01": [-1.0] * n, "q99": [1.0] * n} for name, n in names.items()})
    _tokenizer(folder)
    with tiny_variants():
        return _weights(folder, pi05_shape(PublicCheckpoint(folder, "pi05", config, (), 0, 0, CHUNK, CHUNK, "")))


def openvla(folder: Path, spec: EnvSpec, head: Callable[[int, int], HeadShape] | None = None) -> Path:
    """As OpenVLA's are, the statistics of one dataset within its config; with OFT's files of a ``head``."""
    text = {"model_type": "llama", **tiny.LLAMA, "vocab_size": _EMPTY_TOKEN + 1 + tiny.BINS + tiny.PADDING}
    size = spec.action_dim
    action = {
        "q01": [-1.0] * size,
        "q99": [1.0] * size,
        "min": [-1.0] * size,
        "max": [1.0] * size,
        "mask": [True] * size,
    }
    state = spec.state.shape[0]
    config = {
        "model_type": "openvla",
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "n_action_bins": tiny.BINS,
        "pad_to_multiple_of": tiny.PADDING,
        "text_config": text,
        "norm_stats": {"here": {"action": action, "proprio": {"q01": [-1.0] * state, "q99": [1.0] * state}}},
    }
    write(folder / "config.json", config)
    _tokenizer(folder, "<s>")
    _weights(folder, replace(tiny_shape(), llama=text))
    if head:
        parts = {"proprio_projector": Perceptron(state, 32, 32), **head(size, 32).parts(32)}
        for part, module in parts.items():
            names = {name: tuple(item.shape) for name, item in module.state_dict().items()}
            tensors = {
                f"module.{name}": torch.from_numpy(weight(f"{part}.{name}", size)) for name, size in names.items()
            }
            save_file(tensors, folder / f"{part}--1_checkpoint.safetensors")
    return folder


MAKERS: Mapping[str, Callable[[Path, EnvSpec], Path]] = {
    "smolvla": smolvla,
    "pi0": pi0,
    "pi05": pi05,
    "openvla_oft": openvla,
}
"""By the name of the family's config file."""
HEADS: Mapping[str, Callable[[Path, EnvSpec], Path]] = {
    "openvla_l1": partial(openvla, head=Regression),
    "openvla_diffusion": partial(openvla, head=Denoising),
}
"""Those of OpenVLA-OFT with a continuous head."""


def _features(spec: EnvSpec) -> dict[str, Any]:
    cameras = {f"observation.images.{name}": item.shape[:2] for name, item in spec.images.items()}
    return {**lerobot_features(cameras, spec.state.shape[0], spec.action_dim), **_room(spec)}


def _room(spec: EnvSpec) -> dict[str, int]:
    return {"max_state_dim": spec.state.shape[0] + ROOM, "max_action_dim": spec.action_dim + ROOM}


def _moments(spec: EnvSpec) -> dict[str, dict[str, list[float]]]:
    sizes = {"state": spec.state.shape[0], "action": spec.action_dim}
    return {name: {"mean": [0.0] * size, "std": [0.5] * size} for name, size in sizes.items()}


def _weights(folder: Path, shape: NetworkShape) -> Path:
    """``model.safetensors`` by the rule of the golden files; returns ``folder``."""
    with torch.device("meta"):
        sizes = {name: tuple(item.shape) for name, item in shape.build().state_dict().items()}  # type: ignore[attr-defined]
    tensors = {name: torch.from_numpy(weight(name, size)) for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _tokenizer(folder: Path, start: str = "<bos>") -> None:
    """Words are three tokens at most: the start of a prompt, "the", and everything else."""
    word_tokenizer(("?", start, "the")).save(str(folder / "tokenizer.json"))
