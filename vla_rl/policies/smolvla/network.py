"""SmolVLA (arXiv 2506.01844): a vision-language model with an action expert that reads its keys and values.

The tensors have the names of a LeRobot folder (``model.vlm_with_expert.vlm.model...``); the arithmetic follows LeRobot
0.4.4, against which ``tests/policies/smolvla/test_parity.py`` compares.  Where we differ:

- Pictures and language do not attend to the state, the last token of the prefix.  :meth:`SmolVLANetwork.encode`
  therefore leaves it out and is the same at every state; :meth:`SmolVLANetwork.condition` runs that one token.
- What an expert layer reads of the prefix is projected once per condition, not in every denoising step.
- The place of a missing camera and the padding to ``prefix_length`` are masked, so they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.errors import UserError
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.network import (
    DecoderNetwork,
    Layer,
    ModuleLayer,
    Pair,
    Run,
    bias_of,
    cross_attended,
    exact,
    linear,
    norm_by,
    padded,
    padded_picture,
    plainly,
    points_behind,
    rotations,
    rounding,
    self_attended,
    transformers,
    vision_layer,
)

_VLM = "model.vlm_with_expert.vlm."
# In LeRobot's files, but no action depends on it: the language model's next-token head.
UNUSED = (_VLM + "lm_head.weight",)
# Statistics among the weights of folders from before LeRobot's processors; dataset_statistics.py reads them.
_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
_COMPILED = "model._orig_mod."  # how a policy that torch.compile had wrapped was saved


class SmolVLANetwork(DecoderNetwork):
    """Implements ``FlowNetwork``.  Shapes: ``n`` layers, ``G`` heads of keys, ``d`` their size, ``M`` prefix tokens."""

    model: Any  # the nn.ModuleDict of all that a LeRobot file holds
    picture_start: Tensor
    picture_end: Tensor

    def __init__(self, shape: SmolVLAShape) -> None:
        """Random weights; raises UserError without transformers."""
        super().__init__()
        self.shape = shape
        self.chunk, self.action_size, self.state_size = shape.chunk, shape.action_size, shape.state_size
        self.pooled_size, self.hidden_size = shape.text.hidden_size, shape.expert_width
        for name, around in {"picture_start": shape.picture_start, "picture_end": shape.picture_end}.items():
            self.register_buffer(name, torch.tensor(around, dtype=torch.int64), persistent=False)
        vlm = nn.ModuleDict({"model": nn.ModuleDict(_build_vlm(shape))})
        width = shape.expert_width
        self.model = nn.ModuleDict(
            {
                "vlm_with_expert": nn.ModuleDict({"vlm": vlm, "lm_expert": _build_expert(shape)}),
                "state_proj": nn.Linear(shape.state_size, shape.text.hidden_size),
                "action_in_proj": nn.Linear(shape.action_size, width),
                "action_out_proj": nn.Linear(width, shape.action_size),
                "action_time_mlp_in": nn.Linear(2 * width, width),
                "action_time_mlp_out": nn.Linear(width, width),
            }
        )

    @property
    def vision_language(self) -> nn.Module:
        found: nn.Module = self.model["vlm_with_expert"]["vlm"]
        return found

    @property
    def value_size(self) -> int:
        return self.shape.text.num_key_value_heads * self.shape.text.head_dim

    @property
    def picture_side(self) -> int:
        return round(self.shape.picture_tokens**0.5)

    @property
    def _vlm(self) -> Any:
        return self.model["vlm_with_expert"]["vlm"]["model"]

    @property
    def _expert(self) -> Any:
        return self.model["vlm_with_expert"]["lm_expert"]

    # -- the prefix -------------------------------------------------------------------------------------------------

    def encode(
        self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None, run: Run = plainly
    ) -> dict[str, Tensor]:
        """The prefix: pictures uint8 [B,h,w,3] (None: a missing camera) and prompt ``tokens`` [B,L]; see FlowNetwork.

        ``cache`` [B,n,2G,M,d], keys (rotated) and values of all layers of the language model, ``pooled``, and ``mask``
        bool [B,M] of the tokens that count unless ``token_mask`` is None.

        Raises UserError when all cameras are missing.
        """
        dtype, text = self.computes_in(self._vlm), self._vlm["text_model"]
        layers = [ModuleLayer(layer, dtype) for layer in text.layers]
        return self.kept(self._embedded(pictures, tokens, run).to(dtype), token_mask, layers, text.norm, run)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Pair:
        return rotations(positions, self.shape.text.head_dim)

    def _embedded(self, pictures: Sequence[Tensor | None], tokens: Tensor, run: Run) -> Tensor:
        """Pictures, then the prompt, as embeddings [B,M,width].

        As in LeRobot, pictures and words are scaled by the root of the width, the tokens around pictures are not, and
        those of missing cameras come after the pictures.
        """
        shown = [picture for picture in pictures if picture is not None]
        if not shown:
            raise UserError("all cameras of this SmolVLA are missing, so it sees nothing; give it one at least.")
        missing = min(len(pictures) - len(shown), self.shape.empty_cameras)
        embed, batch = self._vlm["text_model"].embed_tokens, len(tokens)
        scale = math.sqrt(self.shape.text.hidden_size)
        start, end = (embed(around).expand(batch, -1, -1) for around in (self.picture_start, self.picture_end))
        parts: list[Tensor] = []
        for seen in self._seen(shown, run):
            parts += [start, seen * scale, end]
        parts += [start, end] * missing
        return torch.cat([*parts, embed(tokens) * scale], 1)

    def _seen(self, pictures: Sequence[Tensor], run: Run) -> Sequence[Tensor]:
        """The picture tokens [B,m,width] of every camera, from one run of the vision tower."""
        pixels = torch.cat([padded_picture(picture, self.shape.picture) for picture in pictures])
        tower = self._vlm["vision_model"]
        with rounding(self.computes_in(tower), tower):
            hidden = _patches(tower.embeddings, pixels.to(tower.dtype))
            for layer in tower.encoder.layers:
                hidden = run(vision_layer, layer, hidden)
            return self._vlm["connector"](tower.post_layernorm(hidden)).chunk(len(pictures))

    # -- a denoising step -------------------------------------------------------------------------------------------

    def condition(
        self, prefix: Mapping[str, Tensor], state: Tensor, layers: Sequence[Layer] = (), run: Run = plainly
    ) -> dict[str, Tensor]:
        """``I.cache`` [B,2G,M+1,d], keys and values for every layer ``I`` of the expert, and their ``mask``, if any.

        ``state`` [B,S], normalised and padded, goes as one token through the language model over the prefix.
        """
        text, dtype, mask = self._vlm["text_model"], self.computes_in(self._vlm), prefix.get("mask")
        hidden = linear(self.model["state_proj"], exact(state)).to(dtype)[:, None]
        bias, positions = None, torch.full((1, 1), prefix["cache"].shape[3], device=state.device)
        found: dict[str, Tensor] = {}
        if mask is not None:
            found["mask"] = padded(mask)
            bias, positions = bias_of(found["mask"][:, None, None], dtype), mask.sum(1, keepdim=True)
        rotation = rotations(positions, self.shape.text.head_dim)
        for number, (layer, past) in enumerate(zip(text.layers, prefix["cache"].unbind(1), strict=True)):
            hidden, own = run(self_attended, ModuleLayer(layer, dtype), hidden, rotation, bias, past)
            index = self.shape.expert_layer(number)
            if index is not None:
                found[f"{index}.cache"] = self._read(number, index, torch.cat((past, own), 2))
        return found

    def _read(self, number: int, index: int, cache: Tensor) -> Tensor:
        """What layer ``index`` of the expert reads of the ``cache`` [B,2G,M,d] of the language model's ``number``."""
        cache, attention = cache.to(self.computes_in(self._expert)), self._expert.layers[index].self_attn
        if self.shape.self_attends(number):
            return cache
        parts = zip((attention.k_proj, attention.v_proj), cache.chunk(2, 1), strict=True)
        projected = [linear(part, item.transpose(1, 2).flatten(2)) for part, item in parts]
        return torch.cat(projected, 2).unflatten(2, (-1, cache.shape[3])).transpose(1, 2)

    def velocity(
        self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor, layers: Sequence[Layer] = (), run: Run = plainly
    ) -> tuple[Tensor, Tensor]:
        """The velocity [Bk,R,A] at ``x`` [Bk,R,A], ``t`` [Bk], and the expert's last hidden states [Bk,R,hidden_size].

        ``R`` may be less than C: no action depends on those after it.  The ``k`` points of a sample are further queries
        to its keys, which are not copied for them.
        """
        mask, size, dtype = condition.get("mask"), self.shape.text.head_dim, self.computes_in(self._expert)
        batch, count = len(condition["0.cache"]), condition["0.cache"].shape[2]
        points, device = len(x) // batch, x.device
        hidden = self._actions(x, t).unflatten(0, (-1, points)).flatten(1, 2)
        seen = points_behind(mask, count, points, x.shape[1], causal=True, device=device)
        shared = self.shape.text.num_attention_heads // self.shape.text.num_key_value_heads
        joint = None if seen is None else bias_of(seen, dtype, shared)
        prefix = None if mask is None else bias_of(mask[:, None, None], dtype)
        steps = torch.arange(x.shape[1], device=device).repeat(points)[None]
        chosen, own = layers or self.expert_layers(), self._self_attends
        alone = rotations(steps, size, dtype)  # of queries to the prefix alone, where the actions' positions start at 0
        after = rotations(steps + (count if mask is None else mask.sum(1, keepdim=True)), size, dtype)
        after = chosen[own.index(True)].tables(after) if True in own else after
        for index, layer in enumerate(chosen):
            past = condition[f"{index}.cache"]
            if own[index]:
                hidden = run(self_attended, layer, hidden, after, joint, past)[0]
            else:
                hidden = run(cross_attended, layer, hidden, alone, prefix, past)
        hidden = exact(norm_by(self._expert.norm, hidden).unflatten(1, (points, -1)).flatten(0, 1))
        return linear(self.model["action_out_proj"], hidden), hidden

    def _actions(self, x: Tensor, t: Tensor) -> Tensor:
        """Noisy actions [B,R,A] and the time [B] of the flow as the expert's inputs [B,R,width]."""
        action = linear(self.model["action_in_proj"], exact(x)).to(self.computes_in(self._expert))
        time = _sines(t, self.shape).to(action.dtype)
        both = torch.cat((action, time[:, None].expand_as(action)), 2)
        inner = functional.silu(linear(self.model["action_time_mlp_in"], both))
        return linear(self.model["action_time_mlp_out"], inner)

    def expert_layers(self) -> list[ModuleLayer]:
        dtype, own = self.computes_in(self._expert), self._self_attends
        return [ModuleLayer(layer, dtype, cross=not own[i]) for i, layer in enumerate(self._expert.layers)]

    @property
    def _self_attends(self) -> list[bool]:
        """Whether a layer of the expert sees the other actions."""
        shape = self.shape
        numbers = (number for number in range(shape.text.num_hidden_layers) if shape.expert_layer(number) is not None)
        return [shape.self_attends(number) for number in numbers]

    def denoised(self, horizon: int) -> int:
        """``horizon``: actions see only those before them, so a chain of these alone is the same."""
        return horizon

    # -- what the policy asks ---------------------------------------------------------------------------------------

    @staticmethod
    def public_name(name: str) -> str | None:
        """The name here of a LeRobot tensor, None for one that no action depends on."""
        name = name.replace(_COMPILED, "model.", 1) if name.startswith(_COMPILED) else name
        return None if name in UNUSED or name.startswith(_STATISTICS) else name

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """The expert and the projections of state, action and time (LeRobot's train_expert_only)."""
        return {name: item for name, item in self.named_parameters() if not name.startswith(_VLM)}

    def prefix_bytes(self, cameras: Sequence[str | None], tokens: int) -> int:
        """Keys, values and mask of pictures and prompt, and ``pooled``; of a missing camera, what is around it."""
        text, dtype = self.shape.text, self._vlm["text_model"].embed_tokens.weight.dtype
        around = len(self.shape.picture_start) + len(self.shape.picture_end)
        shown = sum(name is not None for name in cameras)
        missing = min(len(cameras) - shown, self.shape.empty_cameras)
        length = shown * (self.shape.picture_tokens + around) + missing * around + tokens
        token = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * dtype.itemsize + 1
        return length * token + 4 * self.pooled_size


def _patches(embeddings: Any, pixels: Tensor) -> Tensor:
    """Embeddings [B,patches,width] of whole pictures; where they have another size, with the nearest learnt positions.

    As transformers' SmolVLMVisionEmbeddings does it, without its mask, which is made on the host.
    """
    patches, side = embeddings.patch_embedding(pixels), embeddings.num_patches_per_side
    edges = torch.arange(1 / side, 1.0, 1 / side, device=pixels.device)
    row, column = (
        torch.bucketize(
            (torch.arange(count, device=pixels.device) * (1.0 / count)).clamp(max=1 - 1e-6), edges, right=True
        )
        for count in patches.shape[2:]
    )
    places = row[:, None] * side + column
    return patches.flatten(2).transpose(1, 2) + embeddings.position_embedding(places.flatten())


def _sines(t: Tensor, shape: SmolVLAShape) -> Tensor:
    """Sines, then cosines, float64 [B,width] of ``t`` at geometrically spaced periods.

    The shortest turns 250 times while ``t`` goes from 0 to 1, hence the precision.
    """
    steps = torch.linspace(0.0, 1.0, shape.expert_width // 2, dtype=torch.float64, device=t.device)
    period = shape.min_period * (shape.max_period / shape.min_period) ** steps
    radians = 2.0 * math.pi / period * t.double()[:, None]
    return torch.cat((radians.sin(), radians.cos()), 1)


def _build_vlm(shape: SmolVLAShape) -> dict[str, nn.Module]:
    """Vision tower, connector and language model of transformers' SmolVLM."""
    package = transformers()
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

    config = package.SmolVLMConfig(
        vision_config=asdict(shape.vision), text_config=_text(shape), scale_factor=shape.pixel_shuffle
    )
    text = package.LlamaModel(config.text_config)
    del text.rotary_emb  # vla/network.py does it
    return {
        "vision_model": SmolVLMVisionTransformer(config.vision_config),
        "connector": SmolVLMConnector(config),
        "text_model": text,
    }


def _build_expert(shape: SmolVLAShape) -> nn.Module:
    """A narrow Llama; layers that attend to the prefix alone project keys and values of the language model's size."""
    sizes = {
        "vocab_size": 1,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_size": shape.expert_width,
        "intermediate_size": shape.expert_mlp,
        "num_hidden_layers": shape.expert_layers,
    }
    package = transformers()
    expert = package.LlamaModel(package.LlamaConfig(**{**_text(shape), **sizes}))
    del expert.rotary_emb
    expert.embed_tokens = None
    keys = shape.text.num_key_value_heads * shape.text.head_dim
    for number, layer in enumerate(expert.layers):
        if not shape.self_attends(number):
            layer.self_attn.k_proj, layer.self_attn.v_proj = (nn.Linear(keys, keys, bias=False) for _ in range(2))
    return expert


def _text(shape: SmolVLAShape) -> dict[str, Any]:
    return {"model_type": "llama", **asdict(shape.text)}
