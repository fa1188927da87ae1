"""pi0 (arXiv 2410.24164) as a policy: a folder of LeRobot or transformers as it was downloaded, or random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.policies.pi0.network import Gemma, Pi0Shape, Siglip
from vla_rl.policies.vla.flow_vla import FlowVLA, flow_from_public
from vla_rl.policies.vla.network import Letterbox, TransformersLetterbox, transformers
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import TokenizerPrompts


class Pi0(FlowVLA):
    """pi0: PaliGemma and a flow expert of 315M parameters; chunks of 50 x 32 numbers, padding included.

    The robot's state is a token behind the prefix, so the prefix depends on pictures and prompt alone.  pi0.5, whose
    state is written into the prompt as words, is not this class: transformers 5.23 has no model for it.
    """

    shape_class = Pi0Shape

    @classmethod
    def from_public(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions | None = None) -> Self:
        """A checkpoint of LeRobot (0.4 and later, type "pi0") or of transformers (model_type "pi0") for an environment.

        Pictures are fitted as that library does, the prompt is ``<bos>``, the instruction and a newline.  A missing
        camera has no tokens.  Raises UserError, naming the key and the cure, when files or tensors are missing and when
        cameras, state or action are not the environment's.
        """
        return flow_from_public(
            cls,
            folder,
            spec,
            options or VLAOptions(),
            lambda public: shape_of(public.folder, public.config),
            lambda public: TokenizerPrompts(
                str(public.folder),
                public.tokenizer,
                template="{}\n" if public.newline else "{}",
                start="<bos>",
                longest=public.longest,
            ),
        )


VARIANTS = {"gemma_2b": Gemma(), "gemma_300m": Gemma(hidden_size=1024, intermediate_size=4096)}
SO400M = Siglip()  # the only vision tower that openpi has
# What this network computes, where transformers' could be configured to compute something else.
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "attention_bias": False,
    "use_bidirectional_attention": True,
}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_channels": 3}
_SHARED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def shape_of(folder: Path, config: Mapping[str, Any]) -> Pi0Shape:
    """The sizes of the network in a public folder with this ``config.json``.

    Raises UserError for a LeRobot folder that was written before 0.4: that model saw other pictures.
    """
    if config.get("model_type") == "pi0":
        return _of_transformers(folder, config)
    if "paligemma_variant" not in config:
        raise UserError(
            f"{str(folder)!r} holds a pi0 of a LeRobot before 0.4, which prepared pictures in another way, so it would "
            "act wrongly; take a checkpoint of LeRobot 0.4 or later, such as lerobot/pi0_base."
        )
    return _of_variants(folder, config)


def _of_transformers(folder: Path, config: Mapping[str, Any]) -> Pi0Shape:
    """Raises UserError, naming the field, for a network that computes something else."""
    full = transformers().PI0Config(**{key: item for key, item in config.items() if key != "model_type"})
    text, vision, expert = full.vlm_config.text_config, full.vlm_config.vision_config, full.dit_config
    shared = {name: getattr(text, name) for name in _SHARED}  # the expert reads the keys and values of the language
    for part, given, assumed in (
        ("vlm_config.text_config", text, _GEMMA),
        ("vlm_config.vision_config", vision, _SIGLIP),
        ("dit_config", expert, _GEMMA | shared),
    ):
        for name, value in assumed.items():
            if getattr(given, name, value) != value:
                raise UserError(
                    f"config.json of {str(folder)!r} sets {part}.{name} to {getattr(given, name)!r}, but vla-rl's pi0 "
                    f"computes with {value!r}, so its actions would be wrong; use a checkpoint with that."
                )
    return Pi0Shape(
        vision=Siglip(**{item.name: getattr(vision, item.name) for item in fields(Siglip)}),
        language=Gemma(**{item.name: getattr(text, item.name) for item in fields(Gemma)}),
        expert_hidden_size=expert.hidden_size,
        expert_intermediate_size=expert.intermediate_size,
        chunk=full.chunk_size,
        action_size=full.max_action_dim,
        state_size=full.max_state_dim,
        min_period=full.min_period,
        max_period=full.max_period,
        time_dtype="float32",
        pictures=TransformersLetterbox(),
    )


def _of_variants(folder: Path, config: Mapping[str, Any]) -> Pi0Shape:
    """LeRobot's configuration names variants of openpi's."""
    height, width = config["image_resolution"]
    if height != width:
        raise UserError(
            f"config.json of {str(folder)!r} sets image_resolution to {height} x {width}, but the vision tower sees "
            "squares, so the model cannot be built; use a checkpoint whose resolution is square."
        )
    language, expert = (_variant(folder, config[f"{part}_variant"]) for part in ("paligemma", "action_expert"))
    return Pi0Shape(
        vision=replace(SO400M, image_size=height),
        language=language,
        expert_hidden_size=expert.hidden_size,
        expert_intermediate_size=expert.intermediate_size,
        chunk=config["chunk_size"],
        action_size=config["max_action_dim"],
        state_size=config["max_state_dim"],
        min_period=config["min_period"],
        max_period=config["max_period"],
        pictures=Letterbox(),
    )


def _variant(folder: Path, name: str) -> Gemma:
    if name not in VARIANTS:
        raise UserError(
            f"config.json of {str(folder)!r} names the variant {name!r}, whose sizes are not known, so the model "
            f"cannot be built; {did_you_mean(name, VARIANTS)}"
        )
    return VARIANTS[name]
