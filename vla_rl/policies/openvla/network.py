"""OpenVLA's network: DINOv2 + SigLIP, a projector and Llama, under the tensor names of the published checkpoints.

Shape letters: ``B`` batch, ``N`` tokens of all pictures, ``L`` of the prompt, ``P`` of the prefix (both together),
``n`` action tokens, ``W`` width of the language model, ``K`` tokens that stand for bins (256).

Architecture and tensor names of its vision half are those of timm's ``vit_large_patch14_reg4_dinov2`` and
``vit_so400m_patch14_siglip_224``, as the published checkpoints hold them (OpenVLA, Kim et al. 2024, arXiv 2406.09246,
section 3.1).  timm is not needed.
Shape letters: ``B`` batch, ``P`` patches of a picture, ``F`` width of a vision transformer, ``W`` of the language
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vla_rl.contract.errors import ContractError
from vla_rl.policies.openvla.heads import HeadShape, Perceptron
from vla_rl.policies.vla.network import mean_where, transformers

_EPSILON = 1e-6  # of timm's layer norms


@dataclass(frozen=True)
class ViTShape:
    """Sizes of a vision transformer."""

    width: int  # F
    depth: int
    heads: int
    hidden: int  # of the perceptron in a block
    patch: int  # pixels along its side
    patches: int  # P
    registers: int = 0  # DINOv2's register tokens (arXiv 2309.16588), besides its class token
    classes: bool = False  # DINOv2: class and register tokens, LayerScale.  SigLIP: an attention pool instead

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], prefix: str, heads: int) -> ViTShape:
        """The sizes by the tensors of a checkpoint below ``prefix``; only the number of heads is not in them."""
        below = f"{prefix}.blocks."
        blocks = {name.removeprefix(below).split(".")[0] for name in shapes if name.startswith(below)}
        _, patches, width = shapes[f"{prefix}.pos_embed"]
        registers = shapes.get(f"{prefix}.reg_token", (1, 0))[1]
        hidden = shapes[f"{prefix}.blocks.0.mlp.fc1.bias"][0]
        patch = shapes[f"{prefix}.patch_embed.proj.weight"][-1]
        return cls(width, len(blocks), heads, hidden, patch, patches, registers, f"{prefix}.cls_token" in shapes)

    @property
    def picture(self) -> int:
        """Pixels along the side of a picture."""
        return self.patch * round(self.patches**0.5)


DINOV2 = ViTShape(width=1024, depth=24, heads=16, hidden=4096, patch=14, patches=256, registers=4, classes=True)
SIGLIP = ViTShape(width=1152, depth=27, heads=16, hidden=4304, patch=14, patches=256)


class VisionTransformer(nn.Module):
    """Features of every patch after the last block but one; a public checkpoint's last block and pool are unused."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.shape = shape
        if shape.classes:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
            self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width))
        self.pos_embed = nn.Parameter(torch.randn(1, shape.patches, shape.width) * 0.02)
        self.patch_embed = _PatchEmbed(shape)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, eps=_EPSILON)
        if not shape.classes:
            self.attn_pool = _AttentionPool(shape)

    def forward(self, pictures: Tensor) -> Tensor:
        """[B,P,F] of normalised pictures [B,3,h,w]; class and register tokens are dropped, and nothing is normed."""
        x = self.patch_embed.proj(pictures).flatten(2).transpose(1, 2) + self.pos_embed
        extra = 0
        if self.shape.classes:
            tokens = torch.cat([self.cls_token, self.reg_token], 1).expand(len(x), -1, -1)
            x, extra = torch.cat([tokens, x], 1), tokens.shape[1]
        for block in list(self.blocks)[:-1]:
            x = block(x)
        return x[:, extra:]


class VisionBackbone(nn.Module):
    """DINOv2 (``featurizer``) and SigLIP (``fused_featurizer``) on the same pictures, stacked along channels."""

    def __init__(self, dino: ViTShape, siglip: ViTShape) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(dino)
        self.fused_featurizer = VisionTransformer(siglip)

    def forward(self, dino: Tensor, siglip: Tensor) -> Tensor:
        """[B,P,F_1+F_2] of one batch of pictures [B,3,h,w], normalised once for either model."""
        return torch.cat([self.featurizer(dino), self.fused_featurizer(siglip)], -1)


class Projector(nn.Module):
    """Patch features to the width of the language model: three layers, the first four times as wide as its input."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features)
        self.fc2 = nn.Linear(4 * features, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """[B,P,F] -> [B,P,W]."""
        gelu = nn.functional.gelu
        return self.fc3(gelu(self.fc2(gelu(self.fc1(features)))))


class _PatchEmbed(nn.Module):
    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, kernel_size=shape.patch, stride=shape.patch)


class _Block(nn.Module):
    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=_EPSILON)
        self.attn = _Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width, eps=_EPSILON)
        self.mlp = Perceptron(shape.width, shape.hidden, shape.width)
        scaled = shape.classes
        self.ls1, self.ls2 = (_LayerScale(shape.width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class _Attention(nn.Module):
    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class _LayerScale(nn.Module):
    """timm's ``gamma``; transformers renames tensors of that name while loading, so the checkpoints call it this."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _AttentionPool(nn.Module):
    """SigLIP's pool: it is in the checkpoints and nothing of OpenVLA reads its output."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.q = nn.Linear(shape.width, shape.width)
        self.kv = nn.Linear(shape.width, 2 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=_EPSILON)
        self.mlp = Perceptron(shape.width, shape.hidden, shape.width)


VISION = ("vision_backbone.", "projector.")  # tensors that the patches depend on
LLAMA_2_7B = {"vocab_size": 32064, "pad_token_id": 32000}  # text_config of openvla-7b; the rest are Llama's defaults


@dataclass(frozen=True)
class OpenVLAShape:
    """The sizes from which an untrained network is built again."""

    llama: Mapping[str, Any] = field(default_factory=lambda: dict(LLAMA_2_7B))  # transformers' LlamaConfig
    dino: ViTShape = DINOV2
    siglip: ViTShape = SIGLIP
    bins: int = 256  # K
    padding: int = 64  # rows of the vocabulary after its last token
    state: int = 0  # entries of the proprioception that OFT's projector reads; 0: without one
    head: HeadShape | None = None  # OFT's continuous one; None: actions are tokens
    crop: float = 1.0  # the share of a picture's area that it sees; .9 where it was fine-tuned with random crops

    def build(self) -> OpenVLANetwork:
        return OpenVLANetwork(self)

    @classmethod
    def small(
        cls, width: int = 64, picture: int = 56, patch: int = 14, seen: int = 48, depths: tuple[int, int] = (3, 2)
    ) -> OpenVLAShape:
        """A few hundred thousand parameters, for training from nothing; without words.

        ``seen``: width of either vision transformer; ``depths``: layers of these, of which one is unused, and of the
        language model.
        """
        vit = ViTShape(seen, depths[0], heads=4, hidden=2 * seen, patch=patch, patches=(picture // patch) ** 2)
        llama = {
            "vocab_size": 256,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": depths[1],
            "num_attention_heads": 4,
        }
        return cls(llama, replace(vit, registers=4, classes=True), vit, padding=0)

    def with_words(self, count: int) -> OpenVLAShape:
        """The same with ``count`` tokens before those of the bins."""
        return replace(self, llama={**self.llama, "vocab_size": count + self.bins + self.padding})


@dataclass(frozen=True)
class Prefix:
    """What the language model reads before the actions, position by position.

    embeddings [B,P,W]; mask bool [B,P], false at padding.  The last position holds the last token of the prompt, for
    every row: prompts are aligned on the right, and their padding lies between the pictures and them.
    """

    embeddings: Tensor
    mask: Tensor


class OpenVLANetwork(nn.Module):
    """Prismatic VLM (Karamcheti et al. 2024, arXiv 2402.07865) whose last tokens are actions (arXiv 2406.09246)."""

    def __init__(self, shape: OpenVLAShape) -> None:
        """Raises UserError where transformers is missing."""
        super().__init__()
        self.shape = shape
        self.vision_backbone = VisionBackbone(shape.dino, shape.siglip)
        self.language_model = _llama(shape.llama)
        self.width = int(self.language_model.config.hidden_size)
        self.projector = Projector(shape.dino.width + shape.siglip.width, self.width)
        if shape.state:
            self.proprio_projector = Perceptron(shape.state, self.width, self.width)  # OFT's (arXiv 2502.19645)
        for name, part in shape.head.parts(self.width).items() if shape.head else ():
            self.add_module(name, part)

    # -- what is read ------------------------------------------------------------------------------------------------

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> dict[str, Tensor]:
        """``patches`` [B,N,W], and ``pooled`` float32 [B,2W] for critics: means of patches and of the prompt's tokens.

        No layer of the language model is run.  Deviation: RLinf's critic reads its hidden state at the first action
        token, which would double the cost of acting and change with every update.
        """
        patches = self.patches([item for item in pictures if item is not None])
        text = mean_where(self.embed(tokens).float(), token_mask)
        return {"patches": patches, "pooled": torch.cat([patches.float().mean(1), text], -1)}

    def patches(self, pictures: Sequence[Tensor]) -> Tensor:
        """[B,N,W] of uint8 pictures [B,h,w,3], camera by camera."""
        size, dtype = self.shape.dino.picture, self.projector.fc1.weight.dtype
        seen = [openvla_pictures(item, size, self.shape.crop) for item in pictures]
        found = [self.projector(self.vision_backbone(*(item.to(dtype) for item in pair))) for pair in seen]
        return torch.cat(found, 1)

    def prefix_bytes(self, cameras: Sequence[str | None], tokens: int) -> int:
        """Bytes per observation of the patches."""
        shown = sum(name is not None for name in cameras)
        return shown * self.shape.dino.patches * self.width * self.projector.fc1.weight.element_size()

    @property
    def pooled_size(self) -> int:
        return 2 * self.width

    def embed(self, tokens: Tensor) -> Tensor:
        """[...,W] of token ids."""
        return self.language_model.get_input_embeddings()(tokens)

    def prefix(
        self, patches: Tensor, tokens: Tensor, mask: Tensor, state: Tensor | None = None, time: Tensor | None = None
    ) -> Prefix:
        """Begin of sequence, pictures, the state if OFT's projector reads it, ``time``, the rest of the prompt.

        ``tokens`` int64 and ``mask`` bool [B,L] are padded on the right and start with the begin of sequence; ``time``
        [B,W] is the encoded timestep of a diffusion, if there is one.
        """
        text, valid = _aligned_right(tokens[:, 1:], mask[:, 1:])
        parts = [self.embed(tokens[:, :1]), patches.to(self.dtype)]
        if self.shape.state:
            if state is None:
                raise ContractError("this OpenVLA reads the state, which is missing; give it the normalised state.")
            parts.append(self.proprio_projector(state.clamp(-1.0, 1.0)).to(self.dtype)[:, None])
        if time is not None:
            parts.append(time.to(self.dtype)[:, None])
        seen = torch.cat(parts, 1)
        everything = torch.ones(seen.shape[:2], dtype=torch.bool, device=seen.device)
        return Prefix(torch.cat([seen, self.embed(text)], 1), torch.cat([everything, valid], 1))

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.get_input_embeddings().weight.dtype

    # -- the language model ------------------------------------------------------------------------------------------

    def hidden(self, embeddings: Tensor, attends: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        """Last hidden states [B,q,W] of ``embeddings`` [B,q,W] at ``positions`` int64 [B,q].

        ``attends`` bool [B,q,k]: which keys a query reads, those in ``cache`` first; the cache is extended.
        """
        if self.gradient_checkpointing:  # transformers does it in training mode alone; nothing else depends on the mode
            self.language_model.train(torch.is_grad_enabled() and cache is None)
        found: Tensor = self.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=attends[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return found

    def bin_logits(self, hidden: Tensor) -> Tensor:
        """Logits [...,K], float32 or wider, of the action tokens alone, by the bins that they stand for.

        ``hidden`` [...,W] are hidden states.  Bin ``i`` is token ``words - 1 - i``: the last one is the lowest action.
        """
        weight = self.language_model.lm_head.weight[self.words - self.shape.bins : self.words]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return nn.functional.linear(hidden.to(dtype), weight.to(dtype)).flip(-1)

    def bin_tokens(self, index: Tensor) -> Tensor:
        return self.words - 1 - index

    @property
    def words(self) -> int:
        """How many rows of the vocabulary are tokens."""
        return int(self.language_model.config.vocab_size) - self.shape.padding

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether a learner computes the activations of the language model's layers again in its backward pass."""
        return bool(self.language_model.model.layers[0].gradient_checkpointing)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        for layer in self.language_model.model.layers:
            layer.gradient_checkpointing = wanted
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

    def new_cache(self) -> Any:
        return transformers().DynamicCache(config=self.language_model.config)

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """What makes the actions: the language model, and OFT's reading of the state.  Vision is what is frozen."""
        return {name: item for name, item in self.named_parameters() if not name.startswith(VISION)}


def _aligned_right(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B,L] that are padded on the right, and their mask, padded on the left instead."""
    length = tokens.shape[1]
    source = torch.arange(length, device=tokens.device) - (length - mask.sum(1, keepdim=True))
    return tokens.gather(1, source.clamp_min(0)), source >= 0


def _llama(settings: Mapping[str, Any]) -> Any:
    package = transformers()
    known = {name: item for name, item in settings.items() if name not in ("model_type", "torch_dtype", "dtype")}
    return package.LlamaForCausalLM(package.LlamaConfig(**known, attn_implementation="sdpa"))


FINE_TUNED_CROP = 0.9  # the share of the area that checkpoints fine-tuned with random crops see (LIBERO)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # DINOv2's mean and std
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # SigLIP's


def openvla_pictures(images: Tensor, size: int, crop: float) -> tuple[Tensor, Tensor]:
    """uint8 [B,h,w,3] as float32 [B,3,size,size] for DINOv2 and for SigLIP.

    Resized regardless of the aspect ratio ("resize-naive") by PIL's bicubic filter, to within one level of 255.  Then
    the middle ``crop`` of the area is resized back, bilinearly as ``tf.image.crop_and_resize`` does; 1.0 crops nothing.
    Deviation: OpenVLA's own LIBERO evaluation first makes 224 pixels by JPEG and TensorFlow's lanczos3.
    """
    pictures = images.permute(0, 3, 1, 2).float()
    if pictures.shape[2:] != (size, size):
        resized = functional.interpolate(pictures, size=(size, size), mode="bicubic", antialias=True)
        pictures = resized.round().clamp(0.0, 255.0)
    if crop < 1.0:
        pictures = _middle(pictures / 255.0, crop)
    return _normalized(pictures / 255.0, *_IMAGENET), _normalized(pictures / 255.0, *_HALF)


def _middle(pictures: Tensor, area: float) -> Tensor:
    """The middle of pictures [B,3,h,w] in [0, 1], as large as they are, in levels 0 .. 255."""
    side = area**0.5
    along = [torch.linspace(-side, side, count, device=pictures.device) for count in pictures.shape[2:]]
    rows, columns = torch.meshgrid(*along, indexing="ij")
    grid = torch.stack([columns, rows], -1).expand(len(pictures), -1, -1, -1)
    middle = functional.grid_sample(pictures, grid, mode="bilinear", align_corners=True)
    return (middle.clamp(0.0, 1.0) * 255.5).floor()  # how TensorFlow makes bytes of numbers


def _normalized(pictures: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    offset, scale = (torch.tensor(item, device=pictures.device)[:, None, None] for item in (mean, std))
    return (pictures - offset) / scale
