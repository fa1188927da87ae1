"""pi0 (arXiv 2410.24164) around the modules of ``transformers``' PI0ForConditionalGeneration.

Its weights, names and layers are those of transformers; how they are run is written out here, because there the prefix
cannot be kept: a denoising step appends to its cache, and gradient checkpointing drops it.

Shapes: ``B`` batch, ``P`` tokens of the prefix (256 per camera, then the prompt), ``C`` actions of a chunk, ``A`` their
padded size, ``n`` layers, ``h`` key-value heads, ``d`` entries of a head.

Tensor names of public checkpoints (LeRobot's, transformers' and openpi's) are openpi's; what is in front of them, and
which of tied tensors is written, differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.network import (
    DecoderNetwork,
    Layer,
    Letterbox,
    ModuleLayer,
    Pair,
    Run,
    bias_of,
    exact,
    linear,
    norm_by,
    padded,
    plainly,
    points_behind,
    rotations,
    rounding,
    self_attended,
    transformers,
    vision_layer,
)

_OFFSET = 1.0  # what a GemmaRMSNorm adds to its weights


@dataclass(frozen=True)
class Gemma:
    """Sizes of a Gemma decoder as its ``config.json`` names them; the defaults are the 2B model in PaliGemma."""

    hidden_size: int = 2048
    intermediate_size: int = 16384
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    vocab_size: int = 257152


@dataclass(frozen=True)
class Siglip:
    """Sizes of a SigLIP vision tower as its ``config.json`` names them; the defaults are So400m/14 at 224 pixels."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    patch_size: int = 14
    image_size: int = 224


@dataclass(frozen=True)
class Pi0Shape:
    """Sizes of a pi0; the defaults are those of the public checkpoints.

    The expert's layers, heads and their size are those of ``language``: it reads that one's keys and values.
    """

    vision: Siglip = Siglip()
    language: Gemma = Gemma()
    expert_hidden_size: int = 1024
    expert_intermediate_size: int = 4096
    chunk: int = 50
    action_size: int = 32
    state_size: int = 32
    min_period: float = 4e-3
    max_period: float = 4.0
    time_dtype: str = "float64"  # of the waves that encode the time: LeRobot's and openpi's; transformers has float32
    pictures: Letterbox = Letterbox()

    @classmethod
    def small(cls, state: int, action: int, chunk: int = 10, picture: int = 64) -> Pi0Shape:
        """About two million parameters for states and actions of these sizes, to be trained from nothing on a CPU."""
        return cls(
            vision=Siglip(96, 384, num_hidden_layers=3, num_attention_heads=3, patch_size=8, image_size=picture),
            language=Gemma(144, 384, num_hidden_layers=4, num_attention_heads=6, head_dim=24, vocab_size=1),
            expert_hidden_size=108,
            expert_intermediate_size=288,
            chunk=chunk,
            action_size=action,
            state_size=state,
        )

    def with_words(self, count: int) -> Pi0Shape:
        """The same with ``count`` tokens in the vocabulary."""
        return replace(self, language=replace(self.language, vocab_size=count))

    def build(self) -> Pi0Network:
        return Pi0Network(self)

    def config(self) -> Any:
        """The same sizes as ``transformers``' PI0Config."""
        language = {"model_type": "gemma", **asdict(self.language)}
        expert = {"hidden_size": self.expert_hidden_size, "intermediate_size": self.expert_intermediate_size}
        vision = {"projection_dim": self.language.hidden_size, "vision_use_head": False, **asdict(self.vision)}
        return transformers().PI0Config(
            vlm_config={
                "model_type": "paligemma",
                "text_config": language,
                "vision_config": {"model_type": "siglip_vision_model", **vision},
                "projection_dim": self.language.hidden_size,
                "image_token_id": self.language.vocab_size,
            },
            dit_config={**language, **expert},
            chunk_size=self.chunk,
            max_action_dim=self.action_size,
            max_state_dim=self.state_size,
            min_period=self.min_period,
            max_period=self.max_period,
        )


class Pi0Network(DecoderNetwork):
    """A :class:`~vla_rl.policies.vla.network.FlowNetwork` with the tensor names of PI0ForConditionalGeneration.

    Without the expert's table of words (263M numbers), which nothing reads.  ``gradient_checkpointing``: whether the
    activations of a layer are computed again in the backward pass instead of kept; it changes no number.
    """

    def __init__(self, shape: Pi0Shape) -> None:
        """Raises UserError without transformers."""
        super().__init__()
        full = transformers().PI0ForConditionalGeneration(shape.config())
        self.shape, self.gradient_checkpointing = shape, False
        self.chunk, self.action_size, self.state_size = shape.chunk, shape.action_size, shape.state_size
        self.pooled_size, self.hidden_size = shape.language.hidden_size, shape.expert_hidden_size
        self.model, self.embed_action_time, self.action_out_proj = (
            full.model,
            full.embed_action_time,
            full.action_out_proj,
        )
        self.model.dit.embed_tokens = None

    @property
    def vision_language(self) -> nn.Module:
        found: nn.Module = self.model.vlm
        return found

    @property
    def value_size(self) -> int:
        return self.shape.language.num_key_value_heads * self.shape.language.head_dim

    @property
    def picture_side(self) -> int:
        return self.shape.vision.image_size // self.shape.vision.patch_size

    # -- the prefix -------------------------------------------------------------------------------------------------

    def encode(
        self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None, run: Run = plainly
    ) -> dict[str, Tensor]:
        """``keys`` (rotated) and ``values`` [B,n,h,P,d], ``pooled`` [B,W], and ``mask`` bool [B,P] of the valid tokens
        unless ``token_mask`` is None.

        A missing camera has no tokens; elsewhere they are masked, which gives the same numbers, for positions count
        valid tokens only.  Raises UserError when all cameras are missing.
        """
        language, dtype = self.model.vlm.language_model, self.computes_in(self.model.vlm.language_model)
        words = language.embed_tokens(tokens)
        shown = self.embed_pictures([item for item in pictures if item is not None], run)
        hidden = torch.cat([*shown, words], 1).to(dtype)
        layers = self._layers(language, dtype)
        return self.kept(hidden, token_mask, layers, language.norm, partial(self._run, run))

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Pair:
        return rotations(positions, self.shape.language.head_dim, dtype)

    def embed_pictures(self, pictures: Sequence[Tensor], run: Run = plainly) -> Sequence[Tensor]:
        """Tokens [B,256,W] of each picture uint8 [B,h,w,3], from one run of the vision tower."""
        if not pictures:
            raise UserError("all cameras of this pi0 are missing, so it sees nothing; give it one at least.")
        tower, side = self.model.vlm.vision_tower, self.shape.vision.image_size
        pixels = torch.cat([self.shape.pictures(item, side) for item in pictures])
        with rounding(self.computes_in(tower), tower):
            hidden = tower.embeddings(pixels)
            for layer in tower.encoder.layers:
                hidden = self._run(run, vision_layer, layer, hidden)
            return self.model.vlm.multi_modal_projector(tower.post_layernorm(hidden)).chunk(len(pictures))

    def prefix_bytes(self, cameras: Sequence[str | None], tokens: int) -> int:
        """Keys and values in the dtype of the language model, the mask, and ``pooled``."""
        language = self.shape.language
        shown = sum(name is not None for name in cameras)
        length = shown * self.picture_side**2 + tokens
        pair = 2 * language.num_hidden_layers * language.num_key_value_heads * language.head_dim
        width = self.model.vlm.language_model.embed_tokens.weight.element_size()
        return length * (pair * width + 1) + 4 * self.pooled_size

    @staticmethod
    def public_name(name: str) -> str | None:
        """The name here of a tensor of a public checkpoint; None for one that nothing reads."""
        bare = name.removeprefix("model.")
        if _UNUSED.match(bare):
            return None
        for pattern, replacement in _RENAMED:
            renamed, count = re.subn(f"^{pattern}", replacement, bare)
            if count:
                return renamed
        return name

    # -- denoising --------------------------------------------------------------------------------------------------

    def condition(
        self, prefix: Mapping[str, Tensor], state: Tensor, layers: Sequence[Layer] = (), run: Run = plainly
    ) -> dict[str, Tensor]:
        """``I.cache`` [B,2g,P+1,d], keys and values for every layer ``I`` of the expert, and their ``mask``, if any.

        Behind the prefix is a token of the ``state`` [B,S], which sees no action, so that it is the same in all steps.
        """
        dtype, mask = self.computes_in(self.model.dit), prefix.get("mask")
        hidden = linear(self.embed_action_time.state_proj, exact(state)).to(dtype)[:, None]
        bias, length = None, prefix["cache"].shape[3]
        positions = torch.full((1, 1), length, device=state.device)
        if mask is not None:
            bias, positions = bias_of(padded(mask)[:, None, None], dtype), mask.sum(1, keepdim=True)
        found, chosen = {} if mask is None else {"mask": padded(mask)}, layers or self.expert_layers()
        tables = chosen[0].tables(self.rotation(positions, dtype))
        for i, (layer, past) in enumerate(zip(chosen, prefix["cache"].to(dtype).unbind(1), strict=True)):
            hidden, own = self._run(run, self_attended, layer, hidden, tables, bias, past)
            found[f"{i}.cache"] = torch.cat((past, own), 2)
        return found

    def velocity(
        self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor, layers: Sequence[Layer] = (), run: Run = plainly
    ) -> tuple[Tensor, Tensor]:
        """The noisy actions behind prefix and state, which stay as they are; see ``FlowNetwork``.

        The points of a sample are further queries to its prefix, which is not copied for them.
        """
        first, mask = condition["0.cache"], condition.get("mask")
        dtype, (batch, _, length, size) = first.dtype, first.shape
        points = len(x) // batch
        hidden, chosen, norm = self.noisy(x, t, points, layers or self.expert_layers(), dtype)
        seen = points_behind(mask, length, points, x.shape[1], causal=False, device=x.device)
        language = self.shape.language
        shared = language.num_attention_heads // language.num_key_value_heads
        bias = None if seen is None else bias_of(seen, dtype, shared)
        steps = torch.arange(x.shape[1], device=x.device).repeat(points)[None]
        positions = steps + (length if mask is None else mask.sum(1, keepdim=True))
        tables = chosen[0].tables(rotations(positions, size, dtype))
        for i, layer in enumerate(chosen):
            hidden = self._run(run, self_attended, layer, hidden, tables, bias, condition[f"{i}.cache"])[0]
        hidden = exact(norm(hidden).unflatten(1, (points, -1)).flatten(0, 1))
        return linear(self.action_out_proj, hidden), hidden

    def noisy(
        self, x: Tensor, t: Tensor, points: int, layers: Sequence[Layer], dtype: torch.dtype
    ) -> tuple[Tensor, Sequence[Layer], Callable[[Tensor], Tensor]]:
        """What a step begins with: tokens [B,kC,width] of ``x`` at ``t``, its layers, and the norm behind them."""
        hidden = self.embed_actions(x, t).to(dtype).unflatten(0, (-1, points)).flatten(1, 2)
        return hidden, layers, lambda last: norm_by(self.model.dit.norm, last, _OFFSET)

    def embed_actions(self, x: Tensor, t: Tensor) -> Tensor:
        """The noisy actions ``x`` [B,C,A] at ``t`` [B] as a token each, [B,C,hidden_size]."""
        parts: Any = self.embed_action_time
        actions = linear(parts.action_in_proj, exact(x)).to(self.computes_in(self.model.dit))
        time = waves(t, self.shape).to(actions.dtype)[:, None].expand_as(actions)
        inner = functional.silu(linear(parts.action_time_mlp_in, torch.cat([actions, time], 2)))
        return linear(parts.action_time_mlp_out, inner)

    def expert_layers(self) -> list[ModuleLayer]:
        return self._layers(self.model.dit, self.computes_in(self.model.dit))

    def denoised(self, horizon: int) -> int:
        return self.chunk

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        return {name: item for name, item in self.named_parameters() if not name.startswith("model.vlm.")}

    def _layers(self, decoder: Any, dtype: torch.dtype) -> list[ModuleLayer]:
        return [ModuleLayer(layer, dtype, _OFFSET) for layer in decoder.layers]

    def _run(self, run: Run, function: Callable[..., Any], *inputs: Any) -> Any:
        """``function(*inputs)``, its activations kept or computed again."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return run(function, *inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # no layer draws numbers


def waves(t: Tensor, shape: Pi0Shape) -> Tensor:
    """Sines, then cosines, of ``t`` [B] at geometrically spaced periods, [B,expert_hidden_size].

    The fastest turns 250 times while ``t`` goes from 0 to 1, so in float32 its angle is 1e-4 off.
    """
    dtype = getattr(torch, shape.time_dtype)
    share = torch.linspace(0.0, 1.0, shape.expert_hidden_size // 2, dtype=dtype, device=t.device)
    period = shape.min_period * (shape.max_period / shape.min_period) ** share
    angle = (1.0 / period * 2.0 * math.pi) * t.to(dtype)[:, None]
    return torch.cat([angle.sin(), angle.cos()], 1)


# Regular expression at the start of a name: its replacement.  Tried in order; the first that fits counts.
_RENAMED = (
    (r"paligemma_with_expert\.gemma_expert\.model\.", "model.dit."),
    (r"paligemma_with_expert\.paligemma\.lm_head\.", "model.vlm.language_model.embed_tokens."),
    (r"paligemma_with_expert\.paligemma\.(model\.)?language_model\.(model\.)?", "model.vlm.language_model."),
    (r"paligemma_with_expert\.paligemma\.(model\.)?vision_tower\.(vision_model\.)?", "model.vlm.vision_tower."),
    (r"paligemma_with_expert\.paligemma\.(model\.)?multi_modal_projector\.", "model.vlm.multi_modal_projector."),
    (r"(state_proj|action_in_proj|action_time_mlp_in|action_time_mlp_out)\.", r"embed_action_time.\1."),
    (r"action_out_proj\.", "action_out_proj."),
)
# The expert predicts no words, and LeRobot once kept statistics among the weights; see vla/dataset_statistics.py.
_UNUSED = re.compile(r"paligemma_with_expert\.gemma_expert\.lm_head\.|(un)?normalize_")
