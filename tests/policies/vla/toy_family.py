"""A family of public folders around the toy network: what a family's own file has to say, and a folder to open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.policies.vla.public_folders import lerobot_features, word_tokenizer, write
from tests.policies.vla.toy_network import ToyNetwork, ToyShape
from vla_rl.contract.env import EnvSpec
from vla_rl.policies.vla.checkpoint import PublicCheckpoint
from vla_rl.policies.vla.flow_vla import FlowVLA, flow_from_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import TokenizerPrompts

TARGET = "tests.policies.vla.toy_family:ToyVLA"
WORDS = 40


class ToyVLA(FlowVLA):
    @classmethod
    def from_public(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions) -> ToyVLA:
        return flow_from_public(cls, folder, spec, options, _shape, _prompts)


def _shape(checkpoint: PublicCheckpoint) -> ToyShape:
    return ToyShape(checkpoint.chunk, checkpoint.config["max_action_dim"], checkpoint.config["max_state_dim"], WORDS)


def _prompts(checkpoint: PublicCheckpoint) -> TokenizerPrompts:
    return TokenizerPrompts(str(checkpoint.folder), checkpoint.tokenizer, "{}")


def write_folder(folder: Path, spec: EnvSpec, **changes: Any) -> Path:
    """A whole public folder that fits ``spec``: config, processors, tokenizer, weights; returns it."""
    state, action = spec.state.shape[0], spec.action_dim
    cameras = {f"observation.images.{name}": item.shape[:2] for name, item in spec.images.items()}
    config = {
        "type": "toy",
        **lerobot_features(cameras, state, action),
        "chunk_size": 4,
        "n_action_steps": 3,
        "max_state_dim": state + 2,
        "max_action_dim": action + 1,
        "vlm_model_name": "nobody/nothing",
        **changes,
    }
    write(folder / "config.json", config)
    write_statistics(folder, state, action)
    write_tokenizer(folder)
    torch.manual_seed(0)
    network = ToyNetwork(ToyShape(4, action + 1, state + 2, WORDS))
    save_file({f"model.{name}": item for name, item in network.state_dict().items()}, folder / "model.safetensors")
    return folder


def write_statistics(folder: Path, state: int, action: int) -> None:
    """``meta/stats.json`` as in a dataset."""
    sizes = {"observation.state": state, "action": action}
    stats = {name: {"mean": [0.1] * size, "std": [0.5] * size} for name, size in sizes.items()}
    write(folder / "meta" / "stats.json", stats)


def write_tokenizer(folder: Path) -> None:
    """Every word is unknown but for a few: token 0 is theirs."""
    words = ("<unk>", "lift", "the", "red", "cube", "put", "in", "bowl", "blue", "on")
    word_tokenizer(words).save(str(folder / "tokenizer.json"))
