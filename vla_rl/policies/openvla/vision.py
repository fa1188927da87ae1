"""The vision half of OpenVLA: DINOv2 and SigLIP side by side, and the projector into the language model.

Architecture and tensor names are those of timm's ``vit_large_patch14_reg4_dinov2`` and
``vit_so400m_patch14_siglip_224``, as the published checkpoints hold them (OpenVLA, Kim et al. 2024, arXiv 2406.09246,
section 3.1).  timm is not needed.
Shape letters: ``B`` batch, ``P`` patches of a picture, ``F`` width of a vision transformer, ``W`` of the language
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
        found: Tensor = self.fc3(gelu(self.fc2(gelu(self.fc1(features)))))
        return found


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
        self.mlp = _Perceptron(shape.width, shape.hidden)
        scaled = shape.classes
        self.ls1, self.ls2 = (_LayerScale(shape.width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        found: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return found


class _Attention(nn.Module):
    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        found: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return found


class _Perceptron(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return found


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
        self.mlp = _Perceptron(shape.width, shape.hidden)
