"""Sizes of a SmolVLA network: of the published one, of a LeRobot folder's, and of small ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.network import FlowNetwork


@dataclass(frozen=True)
class VisionShape:
    """The SigLIP tower, in the words of its ``config.json``; the defaults are SmolVLM2-500M-Video-Instruct's."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    image_size: int = 512  # pixels a side for which positions are learnt
    patch_size: int = 16
    layer_norm_eps: float = 1e-6


@dataclass(frozen=True)
class TextShape:
    """The Llama-like language model in the same words; the defaults are SmolVLM2-500M's, half its layers."""

    vocab_size: int = 49280
    hidden_size: int = 960
    num_hidden_layers: int = 16  # those that are used: the first of the model's 32
    num_attention_heads: int = 15
    num_key_value_heads: int = 5
    head_dim: int = 64
    intermediate_size: int = 2560
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True)
class SmolVLAShape:
    """A SmolVLA network; the defaults are those of lerobot/smolvla_base.

    Raises UserError for a number of expert layers with which some layer could not attend to its own keys.
    """

    vision: VisionShape = VisionShape()
    text: TextShape = TextShape()
    pixel_shuffle: int = 4  # a picture token covers so many patches a side
    expert_width: int = 720
    expert_layers: int = 16
    self_attention_every: int = 2  # in every n-th layer actions attend to each other; 0: in none
    chunk: int = 50  # C
    action_size: int = 32  # A
    state_size: int = 32
    picture: tuple[int, int] | None = (512, 512)  # width and height; None: pictures keep their size
    picture_start: tuple[int, ...] = ()  # tokens before every picture
    picture_end: tuple[int, ...] = ()  # and after it
    empty_cameras: int = 0  # missing cameras that get a place between such tokens
    min_period: float = 4e-3  # of the sines that encode the time of the flow
    max_period: float = 4.0

    def __post_init__(self) -> None:
        layers = self.text.num_hidden_layers
        check_limits(self, expert_layers=(1, layers), chunk=(1, math.inf))
        experts = {layer: self.expert_layer(layer) for layer in range(layers) if self.self_attends(layer)}
        alone = [layer for layer, expert in experts.items() if expert is None or not self.self_attends(expert)]
        if alone or layers % self.expert_layers:
            raise UserError(
                f"{self.expert_layers} expert layers do not fit {layers} layers of the language model with "
                f"self-attention in every {self.self_attention_every}, so no velocity can be computed; take as many "
                "expert layers as the language model has, or no self-attention."
            )

    def self_attends(self, layer: int) -> bool:
        """Whether actions attend to each other in this layer of the language model, and not to the prefix alone.

        The layer of this number of the *expert* then has key and value projections for its own hidden states.
        """
        return self.self_attention_every > 0 and layer % self.self_attention_every == 0

    def expert_layer(self, layer: int) -> int | None:
        """The expert's layer beside this one of the language model, None if there is none."""
        index, rest = divmod(layer, self.text.num_hidden_layers // self.expert_layers)
        return None if rest else index

    @property
    def expert_mlp(self) -> int:
        """Width inside the expert's feed-forward layers: 8/3 of its own, rounded up to a multiple of 256."""
        return 256 * math.ceil(4 * int(2 * self.expert_width / 3) / 256)

    @property
    def picture_tokens(self) -> int:
        """Tokens of a picture of the size for which positions are learnt."""
        side = (self.picture[0] if self.picture else self.vision.image_size) // self.vision.patch_size
        return (side // self.pixel_shuffle) ** 2

    def with_words(self, count: int) -> SmolVLAShape:
        """The same with ``count`` tokens in the vocabulary."""
        return replace(self, text=replace(self.text, vocab_size=count))

    def build(self) -> FlowNetwork:
        """An untrained network; raises UserError without transformers."""
        from vla_rl.policies.smolvla.network import SmolVLANetwork

        return SmolVLANetwork(self)

    @classmethod
    def small(cls, state: int, action: int, chunk: int = 10, picture: int = 64) -> SmolVLAShape:
        """About two million parameters for states and actions of these sizes, to be trained from nothing on a CPU."""
        return cls(
            vision=VisionShape(96, 3, 3, 384, image_size=picture, patch_size=8),
            text=TextShape(1, 144, 4, 6, num_key_value_heads=2, head_dim=24, intermediate_size=384),
            pixel_shuffle=1,
            expert_width=108,
            expert_layers=4,
            chunk=chunk,
            action_size=action,
            state_size=state,
            picture=(picture, picture),
        )

    @classmethod
    def from_lerobot(cls, config: Mapping[str, Any], vlm: Mapping[str, Any] | None = None) -> SmolVLAShape:
        """The network of a LeRobot folder's ``config.json``.

        ``vlm`` is the ``config.json`` of the vision-language model that it names (``vlm_model_name``), which such a
        folder lacks; None: SmolVLM2-500M-Video-Instruct.  What ``config`` leaves out has LeRobot's default.
        Raises UserError for a vision-language model other than that one without its ``vlm``.
        """
        name = str(config.get("vlm_model_name", _VLM))
        if vlm is None and name.rpartition("/")[2] != _VLM.rpartition("/")[2]:
            raise UserError(
                f"this SmolVLA is built on {name!r}, whose sizes are not in its folder, so it cannot be built; put "
                "that model's config.json into the folder as vlm/config.json."
            )
        vision = _known(VisionShape, (vlm or {}).get("vision_config", {}))
        whole = {"num_hidden_layers": 32, **_known(TextShape, (vlm or {}).get("text_config", {}))}
        if "hidden_size" in whole and "num_attention_heads" in whole:
            whole.setdefault("head_dim", whole["hidden_size"] // whole["num_attention_heads"])
        kept = int(config.get("num_vlm_layers", 16))
        whole["num_hidden_layers"] = min(kept if kept > 0 else math.inf, whole["num_hidden_layers"])
        text = TextShape(**whole)
        expert, every = int(config.get("num_expert_layers", -1)), int(config.get("self_attn_every_n_layers", 2))
        fenced, picture = bool(config.get("add_image_special_tokens", False)), _picture(config)
        return cls(
            vision=VisionShape(**vision),
            text=text,
            pixel_shuffle=int((vlm or {}).get("scale_factor", 4)),
            expert_width=int(text.hidden_size * float(config.get("expert_width_multiplier", 0.75))),
            expert_layers=expert if expert > 0 else text.num_hidden_layers,
            self_attention_every=max(every, 0) if "cross" in config.get("attention_mode", "cross_attn") else 1,
            chunk=int(config.get("chunk_size", 50)),
            action_size=int(config.get("max_action_dim", 32)),
            state_size=int(config.get("max_state_dim", 32)),
            picture=picture,
            picture_start=_PICTURE_START if fenced else (),
            picture_end=_PICTURE_END if fenced else (),
            empty_cameras=int(config.get("empty_cameras", 0)),
            min_period=float(config.get("min_period", 4e-3)),
            max_period=float(config.get("max_period", 4.0)),
        )


_VLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
# <fake_token_around_image> and <global-img> in the tokenizer of SmolVLM2
_PICTURE_START, _PICTURE_END = (49189, 49152), (49189,)


def _picture(config: Mapping[str, Any]) -> tuple[int, int] | None:
    size = config.get("resize_imgs_with_padding", (512, 512))
    return None if size is None else (int(size[0]), int(size[1]))


def _known(shape: type[VisionShape | TextShape], config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config`` says of the fields of ``shape``."""
    return {item.name: config[item.name] for item in fields(shape) if item.name in config}
