"""pi0 (arXiv 2410.24164) around the modules of ``transformers``' PI0ForConditionalGeneration.

Its weights, names and layers are those of transformers; how they are run is written out here, because there the prefix
cannot be kept: a denoising step appends to its cache, and gradient checkpointing drops it.

Shapes: ``B`` batch, ``P`` tokens of the prefix (256 per camera, then the prompt), ``C`` actions of a chunk, ``A`` their
padded size, ``n`` layers, ``h`` key-value heads, ``d`` entries of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vla_rl.contract.errors import UserError
from vla_rl.policies.pi0.names import public_name
from vla_rl.policies.vla.letterbox import Letterbox
from vla_rl.policies.vla.transformers import transformers
from vla_rl.policies.vla.weights import load_public_weights

Pair = tuple[Tensor, Tensor]


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
        """The network with random weights."""
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


class Pi0Network(nn.Module):
    """A :class:`~vla_rl.policies.vla.network.FlowNetwork` with the tensor names of PI0ForConditionalGeneration.

    Without the expert's table of words (263M numbers), which nothing reads.  ``gradient_checkpointing``: whether the
    activations of a layer are computed again in the backward pass instead of kept; it changes no number.
    Layers compute in the dtype of their weights; velocities, chains and ``pooled`` are float32.
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

    # -- the prefix -------------------------------------------------------------------------------------------------

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor) -> dict[str, Tensor]:
        """``keys`` (rotated) and ``values`` [B,n,h,P,d], ``mask`` bool [B,P] of the valid tokens, ``pooled`` [B,W].

        A missing camera has no tokens; elsewhere they are masked, which gives the same numbers, for positions count
        valid tokens only.  Raises UserError when all cameras are missing.
        """
        language = self.model.vlm.language_model
        words = language.embed_tokens(tokens)
        hidden = torch.cat([*self.embed_pictures([item for item in pictures if item is not None]), words], 1)
        seen = token_mask.new_ones(len(tokens), hidden.shape[1] - tokens.shape[1])
        mask = torch.cat([seen, token_mask], 1)
        every = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)  # all valid tokens see each other
        rotation = language.rotary_emb(hidden, mask.long().cumsum(1) - 1)
        pairs: list[Pair] = []
        for layer in language.layers:
            hidden, *own = self._run(_gemma_layer, layer, hidden, rotation, every, None)
            pairs.append((own[0], own[1]))
        hidden = _exact(_normed(language.norm, hidden))
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        keys, values = (torch.stack(items, 1) for items in zip(*pairs, strict=True))
        return {"keys": keys, "values": values, "mask": mask, "pooled": pooled}

    def embed_pictures(self, pictures: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tokens [B,256,W] of each picture uint8 [B,h,w,3], from one run of the vision tower."""
        if not pictures:
            raise UserError("all cameras of this pi0 are missing, so it sees nothing; give it one at least.")
        tower, side = self.model.vlm.vision_tower, self.shape.vision.image_size
        hidden = tower.embeddings(torch.cat([self.shape.pictures(item, side) for item in pictures]))
        for layer in tower.encoder.layers:
            hidden = self._run(layer, hidden, None)
        return self.model.vlm.multi_modal_projector(tower.post_layernorm(hidden)).chunk(len(pictures))

    def load_public(self, folder: Path) -> None:
        """Fill the weights from a folder of LeRobot or transformers, in its precision.

        Raises UserError that lists what is missing or does not fit.
        """
        load_public_weights(self, folder, public_name, dtype=None)

    def prefix_bytes(self, cameras: Sequence[str | None], tokens: int) -> int:
        """Keys and values in the dtype of the language model, the mask, and ``pooled``."""
        language, vision = self.shape.language, self.shape.vision
        shown = sum(name is not None for name in cameras)
        length = shown * (vision.image_size // vision.patch_size) ** 2 + tokens
        pair = 2 * language.num_hidden_layers * language.num_key_value_heads * language.head_dim
        width = self.model.vlm.language_model.embed_tokens.weight.element_size()
        return length * (pair * width + 1) + 4 * self.pooled_size

    # -- denoising --------------------------------------------------------------------------------------------------

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        """Keys, values and mask of the prefix, and the state [B,S]: its token is computed in every step."""
        return {"keys": prefix["keys"], "values": prefix["values"], "mask": prefix["mask"], "state": state}

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The state and the noisy actions behind the prefix, which stays as it is; see ``FlowNetwork``.

        The points of a sample are further queries to its prefix, which is not copied for them.
        """
        expert, mask = self.model.dit, condition["mask"]
        points = len(x) // len(mask)
        suffix = self.embed_suffix(condition["state"].repeat_interleave(points, 0), x, t)
        hidden = suffix.to(_dtype(expert)).unflatten(0, (-1, points)).flatten(1, 2)
        allowed, positions = _behind(mask, points, suffix.shape[1])
        rotation = expert.rotary_emb(hidden, positions)
        for i, layer in enumerate(expert.layers):
            past = condition["keys"][:, i], condition["values"][:, i]
            hidden = self._run(_gemma_layer, layer, hidden, rotation, allowed, past)[0]
        hidden = _normed(expert.norm, hidden).unflatten(1, (points, -1)).flatten(0, 1)[:, -self.chunk :]
        return _exact(self.action_out_proj(hidden.to(self.action_out_proj.weight.dtype))), _exact(hidden)

    def embed_suffix(self, state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The state [B,S] as one token, then the noisy actions ``x`` at ``t`` as one each, [B,1+C,hidden_size]."""
        parts: Any = self.embed_action_time
        actions = parts.action_in_proj(x.to(parts.action_in_proj.weight.dtype))
        time = _waves(t, self.shape).to(actions.dtype)[:, None].expand_as(actions)
        merged = parts.action_time_mlp_out(F.silu(parts.action_time_mlp_in(torch.cat([actions, time], 2))))
        return torch.cat([parts.state_proj(state.to(actions.dtype))[:, None], merged], 1)

    def denoised(self, horizon: int) -> int:
        """``C``: all actions of a chunk see each other."""
        return self.chunk

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """All but the vision-language model."""
        return {name: item for name, item in self.named_parameters() if not name.startswith("model.vlm.")}

    def _run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """``function(*inputs)``, its activations kept or computed again."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # no layer draws numbers


def _waves(t: Tensor, shape: Pi0Shape) -> Tensor:
    """Sines, then cosines, of ``t`` [B] at geometrically spaced periods, [B,expert_hidden_size].

    The fastest turns 250 times while ``t`` goes from 0 to 1, so in float32 its angle is 1e-4 off.
    """
    dtype = getattr(torch, shape.time_dtype)
    share = torch.linspace(0.0, 1.0, shape.expert_hidden_size // 2, dtype=dtype, device=t.device)
    period = shape.min_period * (shape.max_period / shape.min_period) ** share
    angle = (1.0 / period * 2.0 * math.pi) * t.to(dtype)[:, None]
    return torch.cat([angle.sin(), angle.cos()], 1)


def _behind(mask: Tensor, points: int, length: int) -> tuple[Tensor, Tensor]:
    """What ``points`` times ``length`` tokens behind a prefix see, bool [B,1,kL,P+kL], and their positions [B,kL].

    All see the valid prefix, and no token of another point.  The first of a point, the state, sees itself but no
    action; actions see the state and each other.
    """
    token = torch.arange(length, device=mask.device).repeat(points)
    point = torch.arange(points, device=mask.device).repeat_interleave(length)
    among = (point == point[:, None]) & ((token == 0) | (token[:, None] > 0))
    prefix = mask[:, None, :].expand(-1, len(token), -1)
    allowed = torch.cat([prefix, among.expand(len(mask), -1, -1)], 2)
    return allowed[:, None], mask.sum(1, keepdim=True) + token


def _gemma_layer(
    layer: Any, hidden: Tensor, rotation: Pair, allowed: Tensor, past: Pair | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A Gemma decoder layer on ``hidden`` [B,L,W], behind the keys and values ``past`` [B,h,P,d].

    ``allowed`` bool [B,1,L,P+L].  Returns its output and its own keys, rotated, and values [B,h,L,d].
    """
    attention = layer.self_attn
    inputs = _normed(layer.input_layernorm, hidden)
    query, own_key, value = (
        project(inputs).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, own_key = _rotated(query, rotation), _rotated(own_key, rotation)
    keys, values = own_key, value
    if past is not None:
        keys = torch.cat([past[0].to(own_key.dtype), own_key], 2)
        values = torch.cat([past[1].to(value.dtype), value], 2)
    groups = query.shape[1] // keys.shape[1]
    seen = F.scaled_dot_product_attention(
        query, _shared(keys, groups), _shared(values, groups), attn_mask=allowed, scale=attention.scaling
    )
    hidden = hidden + attention.o_proj(seen.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden)), own_key, value


def _rotated(x: Tensor, rotation: Pair) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of [B,heads,L,d] by cosines and sines [B,L,d], halves paired."""
    cos, sin = (item[:, None] for item in rotation)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _shared(x: Tensor, groups: int) -> Tensor:
    """[B,h,L,d] seen by ``groups`` heads each, [B,h*groups,L,d]; no copy where h is 1."""
    return x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    """``hidden`` through a GemmaRMSNorm, which itself would round float64 to float32."""
    wide = _exact(hidden)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (scaled * (1.0 + norm.weight.to(wide.dtype))).to(hidden.dtype)


def _exact(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _dtype(module: nn.Module) -> torch.dtype:
    """The dtype that the layers of ``module`` compute in."""
    return next(module.parameters()).dtype
