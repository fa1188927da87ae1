"""What the networks of vision-language-action models share: what a policy asks of them, decoder layers, pictures.

Shape letters: ``B`` batch, ``C`` actions in the model's chunk (50), ``A`` the padded size of an action (32), ``L``
tokens of the prompt, ``W`` numbers that sum the prefix up for critics; in layers ``L`` tokens, ``h`` heads, ``g`` heads
of keys and values, ``d`` size of a head, ``M`` tokens seen.

The arithmetic of a layer of Gemma or Llama runs on two kinds of weights: those of transformers' modules
(:class:`ModuleLayer`), where they are learnt, and copies that lie together (:class:`FusedLayer`), where they act and
every kernel costs a launch.  Pictures are fitted into a square with bars beside them as the libraries around pi0 do,
each one differently; a square picture of the right size is the same in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.load import installed
from vla_rl.policies.vla.weights import load_public_weights

WAVELENGTH = 10_000.0  # of RoPE: LeRobot's and transformers', whatever SmolVLM's own configuration says
Pair = tuple[Tensor, Tensor]
Run = Callable[..., Any]  # (function, *inputs) -> what the function returns


def plainly(function: Callable[..., Any], *inputs: Any) -> Any:
    """The function itself."""
    return function(*inputs)


@dataclass(frozen=True)
class ModuleLayer:
    """A decoder layer of transformers.

    dtype   what it computes in
    offset  what a norm adds to its weights: 1 in Gemma, 0 in Llama
    cross   whether it has queries of its own alone
    """

    layer: Any
    dtype: torch.dtype
    offset: float = 0.0
    cross: bool = False

    @property
    def shared(self) -> int:
        """``g``."""
        return int(self.layer.self_attn.config.num_key_value_heads)

    def tables(self, rotation: Pair) -> Pair:
        """What :meth:`projected` takes for the ``rotation`` [B,L,1,d] of :func:`rotations`."""
        return rotation

    def projected(self, hidden: Tensor, tables: Pair) -> Tensor:
        """Queries and keys, rotated, and values [B,L,h+2g,d] of ``hidden`` [B,L,width]; queries alone if ``cross``."""
        attention, inputs = self.layer.self_attn, self.normed(hidden, 0)
        parts = (attention.q_proj,) if self.cross else (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = [linear(part, inputs).unflatten(-1, (-1, attention.head_dim)) for part in parts]
        turned = torch.cat(heads[:2], 2)
        return torch.cat((rotated(turned, swapped(turned), tables), *heads[2:]), 2)

    def finished(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """The rest of the layer after its attention [B,L,h*d]: both residual connections and the feed-forward part."""
        mlp, hidden = self.layer.mlp, self.added(hidden, linear(self.layer.self_attn.o_proj, seen), 0)
        inputs = self.normed(hidden, 1)
        wide = mlp.act_fn(linear(mlp.gate_proj, inputs)) * linear(mlp.up_proj, inputs)
        return self.added(hidden, linear(mlp.down_proj, wide), 1)

    def normed(self, hidden: Tensor, part: int) -> Tensor:
        """What goes into attention (``part`` 0) or the feed-forward part (1)."""
        return norm_by((self.layer.input_layernorm, self.layer.post_attention_layernorm)[part], hidden, self.offset)

    def added(self, hidden: Tensor, change: Tensor, part: int) -> Tensor:
        """``hidden`` behind what ``part`` made of it."""
        return hidden + change

    def fused(self) -> FusedLayer:
        """The same with weights that lie together, in ``dtype``."""
        norms = self.layer.input_layernorm, self.layer.post_attention_layernorm
        before, after = ((norm.weight + self.offset).to(self.dtype) for norm in norms)
        return FusedLayer(**self.parts(), before=before, after=after)

    def parts(self) -> dict[str, Any]:
        """What a fused layer has beside its norms."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        turned = self._together(*((attention.q_proj,) if self.cross else (attention.q_proj, attention.k_proj)))
        values = () if self.cross else (self._together(attention.v_proj),)
        halves = turned.unflatten(0, (-1, 2, attention.head_dim // 2)).flip(1).flatten(0, 2)
        return {
            "inputs": torch.cat((turned, *values, halves, *values)),
            "out": self._together(attention.o_proj),
            "wide": self._together(mlp.gate_proj, mlp.up_proj),
            "down": self._together(mlp.down_proj),
            "activation": mlp.act_fn,
            "epsilon": epsilon_of(self.layer.input_layernorm),
            "head_size": attention.head_dim,
            "shared": 0 if self.cross else self.shared,
        }

    def _together(self, *parts: Any) -> Tensor:
        return torch.cat([_weight(part).to(self.dtype) for part in parts])


@dataclass(frozen=True)
class FusedLayer:
    """The same as six tensors: one product makes queries, keys and values, another both halves of the MLP.

    The first makes all of them twice, queries and keys with their halves swapped, which costs less than another kernel;
    ``shared`` heads at the end are values, which tables leave as they are.
    """

    inputs: Tensor
    out: Tensor
    wide: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    epsilon: float
    head_size: int
    shared: int
    before: Tensor | None = None
    after: Tensor | None = None

    def tables(self, rotation: Pair) -> Pair:
        turned = len(self.inputs) // (2 * self.head_size) - self.shared
        plain = torch.zeros_like(rotation[0]).expand(-1, -1, self.shared, -1)
        cos, sin = (item.expand(-1, -1, turned, -1) for item in rotation)
        return torch.cat((cos, plain + 1), 2), torch.cat((sin, plain), 2)

    def projected(self, hidden: Tensor, tables: Pair) -> Tensor:
        both = functional.linear(self.normed(hidden, 0), self.inputs)
        heads, halves = both.unflatten(-1, (-1, self.head_size)).chunk(2, 2)
        return rotated(heads, halves, tables)

    def finished(self, hidden: Tensor, seen: Tensor) -> Tensor:
        hidden = self.added(hidden, seen, self.out, 0)
        gate, up = functional.linear(self.normed(hidden, 1), self.wide).chunk(2, -1)
        return self.added(hidden, self.activation(gate) * up, self.down, 1)

    def normed(self, hidden: Tensor, part: int) -> Tensor:
        """What goes into attention (``part`` 0) or the feed-forward part (1)."""
        return normalized(hidden, self.after if part else self.before, self.epsilon)

    def added(self, hidden: Tensor, x: Tensor, weight: Tensor, part: int) -> Tensor:
        """``hidden + x @ weight.T`` in one kernel."""
        return torch.addmm(hidden.flatten(0, 1), x.flatten(0, 1), weight.t()).view_as(hidden)


Layer = ModuleLayer | FusedLayer


def linear(part: Any, x: Tensor) -> Tensor:
    """``x`` through a linear part, computed in the dtype of ``x``: of float32 weights, which learn, a copy is rounded.

    An adapter's part and one of which every process holds a shard round by themselves.
    """
    if type(part) is not nn.Linear:
        return part(x).to(x.dtype)
    return functional.linear(x, part.weight.to(x.dtype), None if part.bias is None else part.bias.to(x.dtype))


def _weight(part: Any) -> Tensor:
    """The weight of a linear part, with that of its adapter, if it has one."""
    weight: Tensor = part.weight
    for adapter in getattr(part, "active_adapters", ()):
        weight = weight + part.get_delta_weight(adapter)
    return weight


def epsilon_of(norm: Any) -> float:
    """What a norm adds to a mean square."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def normalized(hidden: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMSNorm of ``hidden`` [B,L,width] (arXiv 1910.07467); transformers' own would round float64 to float32."""
    scale = None if weight is None else weight.to(hidden.dtype)
    return functional.rms_norm(hidden, hidden.shape[-1:], scale, epsilon)


def norm_by(norm: Any, hidden: Tensor, offset: float = 0.0) -> Tensor:
    """:func:`normalized` by a module of transformers; ``offset``: see :class:`ModuleLayer`."""
    return normalized(hidden, norm.weight + offset if offset else norm.weight, epsilon_of(norm))


def vision_layer(layer: Any, hidden: Tensor) -> Tensor:
    """A layer of a vision tower of transformers, without a mask."""
    return layer(hidden, None)


def exact(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotations(positions: Tensor, head_size: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Cosines and signed sines [B,L,1,d] of RoPE (arXiv 2104.09864) at ``positions`` [B,L], computed in float32."""
    half = torch.arange(head_size // 2, dtype=torch.float32, device=positions.device)
    radians = (positions[..., None].float() / WAVELENGTH ** (half * (2.0 / head_size))).unsqueeze(-2)
    cos, sin = radians.cos(), radians.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def swapped(x: Tensor) -> Tensor:
    """``x`` [...,d] with its halves swapped."""
    return x.roll(x.shape[-1] // 2, -1)


def rotated(x: Tensor, halves: Tensor, rotation: Pair) -> Tensor:
    """Queries or keys ``x`` [B,L,h,d] turned by :func:`rotations`: entry ``i`` pairs with entry ``i + d/2``.

    ``halves``: :func:`swapped` of ``x``.
    """
    cos, sin = rotation
    return torch.addcmul(x * cos, halves, sin).to(x.dtype)


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of ``query`` [B,h,L,d] to ``key`` and ``value`` [B,g,M,d], [B,L,h*d].

    ``bias`` is that of :func:`bias_of`, None where everything is seen.  Consecutive ``h/g`` heads share their keys,
    which no kernel copies: those that take a bias do not know shared keys, so there they become queries of one head.
    """
    (_, heads, length, _), groups = query.shape, key.shape[1]
    if bias is None:
        out = functional.scaled_dot_product_attention(query, key, value, enable_gqa=heads != groups)
        return out.transpose(1, 2).flatten(2)
    shared = heads // groups
    folded = query.unflatten(1, (groups, shared)).flatten(2, 3)
    out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=bias)
    return out.unflatten(2, (shared, length)).permute(0, 3, 1, 2, 4).flatten(2)


def bias_of(seen: Tensor, dtype: torch.dtype, shared: int = 1) -> Tensor:
    """What :func:`attended` adds to logits: 0 where ``seen`` bool [B or 1,1,L,M] is true, elsewhere -inf.

    [B or 1,1,L,M] if ``L`` is 1, for all queries; else [B or 1,1,shared*L,M] for ``shared = h/g`` heads.  Rows are
    eight numbers apart or a multiple, since a kernel would copy others in every layer.
    """
    seen = seen.repeat(1, 1, shared if seen.shape[2] > 1 else 1, 1)
    room = 8 * math.ceil(seen.shape[-1] / 8)
    bias = torch.zeros((*seen.shape[:-1], room), dtype=dtype, device=seen.device)[..., : seen.shape[-1]]
    return bias.masked_fill_(~seen, -math.inf)


def padded(mask: Tensor) -> Tensor:
    """``mask`` bool [B,M] with a token more, which counts."""
    return functional.pad(mask, (0, 1), value=True)


def mean_where(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The mean [B,width] of ``hidden`` [B,M,width] over the tokens that count, ``mask`` bool [B,M]; None: all."""
    if mask is None:
        return hidden.mean(1)
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def rounding(dtype: torch.dtype, module: nn.Module) -> AbstractContextManager[Any]:
    """In it, a ``module`` of transformers computes in ``dtype`` although its weights, which learn, are float32."""
    weight = next(module.parameters())
    if weight.dtype == dtype:
        return nullcontext()
    return torch.autocast(weight.device.type, dtype, cache_enabled=False)


def self_attended(layer: Layer, hidden: Tensor, tables: Pair, bias: Tensor | None, past: Tensor | None = None) -> Pair:
    """``hidden`` [B,L,width] after a layer, behind the keys and values ``past`` [B,2g,P,d], and its own [B,2g,L,d]."""
    heads = layer.projected(hidden, tables).transpose(1, 2)
    query, own = heads[:, : -2 * layer.shared], heads[:, -2 * layer.shared :]
    key, value = (own if past is None else torch.cat((past, own), 2)).chunk(2, 1)
    return layer.finished(hidden, attended(query, key, value, bias)), own


def cross_attended(layer: Layer, hidden: Tensor, tables: Pair, bias: Tensor | None, past: Tensor) -> Tensor:
    """``hidden`` [B,L,width] after a layer that sees nothing but the keys and values ``past`` [B,2g,P,d]."""
    query, (key, value) = layer.projected(hidden, tables).transpose(1, 2), past.chunk(2, 1)
    return layer.finished(hidden, attended(query, key, value, bias))


def points_behind(
    mask: Tensor | None, count: int, points: int, length: int, causal: bool, device: torch.device
) -> Tensor | None:
    """What ``points`` times ``length`` tokens behind ``count`` others see, bool [B or 1,1,kL,M+kL], None: everything.

    ``mask`` bool [B,M]: which of the others they see, None: all.  They see no token of another point and, if
    ``causal``, none after themselves.
    """
    if mask is None and points == 1 and not causal:
        return None
    token = torch.arange(length, device=device).repeat(points)
    point = torch.arange(points, device=device).repeat_interleave(length)
    among = point == point[:, None]
    if causal:
        among = among & (token <= token[:, None])
    before = mask[:, None] if mask is not None else torch.ones(1, 1, count, dtype=torch.bool, device=device)
    before = before.expand(-1, len(token), -1)
    return torch.cat((before, among.expand(len(before), -1, -1)), 2)[:, None]


class VisionLanguage(Protocol):
    """A model that reads pictures and a prompt once per observation; an ``nn.Module`` with public tensor names."""

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> dict[str, Tensor]:
        """The prefix {name: [B,...]}, computed once per observation: in a flow network the ``cache`` of keys and values
        of every layer, their ``mask``, if any, and ``pooled`` float32 [B,W], the mean of the last hidden states of
        valid tokens.

        ``pictures`` uint8 [B,h,w,3] of every camera, None where it is missing; ``tokens`` int64 and ``token_mask``
        bool, both [B,L], None where all tokens count: faster kernels can then be used.  The prefix does not depend on
        the robot's state.
        """

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """What is trained when the vision-language model is not, by public name."""

    def prefix_bytes(self, cameras: Sequence[str | None], tokens: int) -> int:
        """Bytes per observation of what :meth:`encode` returns for these cameras, None where one is missing, and so
        many tokens of the prompt.
        """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class DecoderNetwork(nn.Module):
    """A flow network whose expert is a decoder, so that its layers can be fused, compiled and recorded.

    Its ``encode``, ``condition`` and ``velocity`` are those of ``FlowNetwork``, with ``run`` (of a layer) and, but for
    ``encode``, the ``layers`` of the expert besides, () for those that learn.

    compute_dtype  what layers compute in, whatever their weights are stored in; None: the dtype of the weights.  What
                   goes in and comes out (states, actions, velocities, ``pooled``) is float32
    moves          how often weights may have begun to lie elsewhere, by .to(), .cuda() and their like of this module or
                   of one around it; a step of an optimizer moves none
    """

    compute_dtype: torch.dtype | None = None
    moves = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.moves += 1
        return super()._apply(fn, recurse)

    def expert_layers(self) -> Sequence[ModuleLayer]:
        raise NotImplementedError

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Pair:
        """:func:`rotations` of its heads at ``positions`` [B,L], for layers that compute in ``dtype``."""
        raise NotImplementedError

    def kept(
        self, hidden: Tensor, token_mask: Tensor | None, layers: Sequence[ModuleLayer], norm: Any, run: Run
    ) -> dict[str, Tensor]:
        """The prefix of embeddings ``hidden`` [B,M,width], of which the last L tokens count by ``token_mask`` [B,L].

        ``cache`` [B,n,2g,M,d], keys (rotated) and values of ``layers``, ``pooled`` behind ``norm``, and ``mask`` bool
        [B,M] of the tokens that count unless ``token_mask`` is None.
        """
        prefix, bias = {}, None
        if token_mask is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        else:
            before = token_mask.new_ones(len(hidden), hidden.shape[1] - token_mask.shape[1])
            prefix["mask"] = mask = torch.cat((before, token_mask), 1)
            bias, positions = bias_of(mask[:, None, None], hidden.dtype), mask.cumsum(1) - 1
        rotation, cache = self.rotation(positions, hidden.dtype), []
        for layer in layers:
            hidden, own = run(self_attended, layer, hidden, rotation, bias)
            cache.append(own)
        hidden = norm_by(norm, hidden, layers[0].offset).float()
        prefix["cache"] = torch.stack(cache, 1)
        return {**prefix, "pooled": mean_where(hidden, prefix.get("mask"))}

    def load_public(self, folder: Path) -> None:
        """Fill the weights from a public folder, in its precision; raises UserError that lists what does not fit."""
        load_public_weights(self, folder, self.public_name, dtype=None)

    @staticmethod
    def public_name(name: str) -> str | None:
        """The name here of a tensor of a public folder; None for one that nothing reads."""
        raise NotImplementedError

    def computes_in(self, module: nn.Module) -> torch.dtype:
        return self.compute_dtype or next(module.parameters()).dtype


class FlowNetwork(VisionLanguage, Protocol):
    """A vision-language model and its action expert; an ``nn.Module`` whose tensors have their public names.

    chunk, action_size, state_size   C, A, and the padded size of a state
    pooled_size                      W
    hidden_size                      of the expert's last hidden states
    """

    chunk: int
    action_size: int
    state_size: int
    pooled_size: int
    hidden_size: int

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        """All that a denoising step needs of the observation, {name: [B,...]}; ``state`` is padded, normalised."""

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity [Bk,R,A] at ``x`` [Bk,R,A] and ``t`` [Bk] (1: noise, 0: action) and the expert's last hidden
        states [Bk,R,hidden_size], both float32; ``R`` is :meth:`denoised` or ``C``.

        ``k`` is 1 or more points for each of the ``B`` samples of ``condition``, those of a sample in a row.
        """

    def denoised(self, horizon: int) -> int:
        """How many actions of the chunk a chain has to hold so that its first ``horizon`` are the whole chunk's.

        All ``C`` where actions see each other; ``horizon`` where each sees only those before it.
        """

    @property
    def vision_language(self) -> nn.Module:
        """All but the action expert: what a public checkpoint was trained on before it saw a robot."""

    @property
    def value_size(self) -> int:
        """Entries of what a layer of it lets the expert read of a token."""

    @property
    def picture_side(self) -> int:
        """Tokens of a picture in a row, and so many rows there are."""

    @property
    def shape(self) -> NetworkShape:
        """The sizes from which an untrained one is built again."""

    def load_public(self, folder: Path) -> None:
        """Fill the weights from a public folder; raises UserError that lists what is missing or does not fit."""


class NetworkShape(Protocol):
    """The frozen dataclass with the sizes of a network."""

    def build(self) -> FlowNetwork:
        """The untrained network."""


def transformers() -> Any:
    """The package; raises UserError, naming the extra, when it is not installed."""
    return installed("transformers", "no vision-language-action model can be used", "vla")


_HALF = 127.5  # 0..255 to [-1, 1]


@dataclass(frozen=True)
class Letterbox:
    """LeRobot's (since 0.5) and openpi's in torch: bilinear without antialiasing, black bars around the picture.

    LeRobot 0.4's bars were -3: it filled them before it mapped [0, 1] to [-1, 1].  A folder does not say which version
    wrote it, and openpi, where the published weights come from, has always had black ones.
    """

    resample: str = "bilinear"
    antialias: bool = False
    before: float = 0.5  # share of the bars that is left of the picture, or above it
    bar: float = -1.0  # value of the bars, where black is -1 and white 1

    def __call__(self, picture: Tensor, side: int) -> Tensor:
        """uint8 [B,h,w,3] -> float32 [B,3,side,side], black -1 and white 1."""
        image = picture.permute(0, 3, 1, 2).float()
        if image.shape[2:] != (side, side):
            height, width = self.fitted(image.shape[2], image.shape[3], side)
            top, left = int(self.before * (side - height)), int(self.before * (side - width))
            bars = (left, side - width - left, top, side - height - top)
            image = functional.pad(self.resized(image, height, width), bars, value=(self.bar + 1.0) * _HALF)
        return image / _HALF - 1.0

    def fitted(self, height: int, width: int, side: int) -> tuple[int, int]:
        """Height and width within the square."""
        ratio = max(width / side, height / side)
        return int(height / ratio), int(width / ratio)

    def resized(self, image: Tensor, height: int, width: int) -> Tensor:
        """[B,3,h,w] -> [B,3,height,width], both within 0..255."""
        options: dict[str, Any] = {"mode": self.resample, "antialias": self.antialias, "align_corners": False}
        return functional.interpolate(image, size=(height, width), **options)


@dataclass(frozen=True)
class OpenpiLetterbox(Letterbox):
    """openpi's resize_with_pad (its client's, by Pillow): bilinear with antialiasing.

    Rows are rounded to 8 bits before columns are resized; Pillow's own weights have 8 bits too, which makes a
    difference of one level in some pixels.
    """

    antialias: bool = True

    def resized(self, image: Tensor, height: int, width: int) -> Tensor:
        wide = super().resized(image, image.shape[2], width).clamp(0.0, 255.0).round()
        return super().resized(wide, height, width).clamp(0.0, 255.0).round()


@dataclass(frozen=True)
class TransformersLetterbox(OpenpiLetterbox):
    """transformers' PI0ImageProcessor (5.23, by torchvision): bicubic, grey bars on the right and below.

    Its bars are zeros that are added after normalisation.  Its sizes are products, which rounding sometimes leaves one
    pixel shorter than the others' quotients (1280 x 720 becomes 224 x 125, not 224 x 126).
    """

    resample: str = "bicubic"
    before: float = 0.0
    bar: float = 0.0

    def fitted(self, height: int, width: int, side: int) -> tuple[int, int]:
        scale = min(side / height, side / width)
        return int(height * scale), int(width * scale)


def padded_picture(images: Tensor, size: tuple[int, int] | None) -> Tensor:
    """uint8 [B,h,w,3] as float32 [B,3,height,width] in [-1, 1], with ``size`` (width, height).

    As LeRobot prepares them for SmolVLA: scaled to fit without antialiasing, black added on the left and on top.
    None leaves the size as it is.
    """
    pictures = images.permute(0, 3, 1, 2).float() / 255.0
    if size is not None:
        width, height = size
        ratio = max(pictures.shape[3] / width, pictures.shape[2] / height)
        fitted = (int(pictures.shape[2] / ratio), int(pictures.shape[3] / ratio))
        pictures = functional.interpolate(pictures, size=fitted, mode="bilinear", align_corners=False)
        pictures = functional.pad(pictures, (width - fitted[1], 0, height - fitted[0], 0))
    return pictures * 2.0 - 1.0
