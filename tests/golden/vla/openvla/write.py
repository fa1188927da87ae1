"""Write the golden data: tensor names and shapes of openvla-7b, and a tiny OpenVLA's outputs by timm and transformers.

    python -m venv other && other/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
    other/bin/pip install --no-deps timm==1.0.31 torchvision==0.28.0   # torchvision only so that timm can be imported
    other/bin/python tests/golden/vla/openvla/write.py

Nothing of vla_rl is imported.  The arithmetic is that of OpenVLA's modeling_prismatic.py (openvla/openvla and
moojink/openvla-oft): features of the last block but one, a three-layer projector, pictures after the first token, one
row at a time without padding; OpenVLA-OFT's attention is bidirectional everywhere (moojink/openvla-oft#27, #89).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import library

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import tiny  # noqa: E402

_SHIM = library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _SHIM.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

PUBLISHED = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")  # its timm_model_ids
PUBLISHED_SIZES = 982, 7_541_237_184  # tensors and parameters of openvla/openvla-7b (15,082,474,368 bytes of bfloat16)
STOP = 2


def vision(**sizes: dict[str, Any]) -> dict[str, nn.Module]:
    names = ("vision_backbone.featurizer", "vision_backbone.fused_featurizer")
    made = zip(names, PUBLISHED, (sizes.get("dino", {}), sizes.get("siglip", {})), strict=True)
    return {name: timm.create_model(kind, pretrained=False, num_classes=0, **size) for name, kind, size in made}


def projector(features: int, width: int) -> nn.Module:
    layers = {"fc1": nn.Linear(features, 4 * features), "fc2": nn.Linear(4 * features, width)}
    return nn.ModuleDict({**layers, "fc3": nn.Linear(width, width)})


def tensors(parts: dict[str, nn.Module]) -> dict[str, Tensor]:
    """By their names in a checkpoint: transformers renames "gamma", so the checkpoints say "scale_factor"."""
    return {
        f"{part}.{name.replace('gamma', 'scale_factor')}": item
        for part, module in parts.items()
        for name, item in module.state_dict().items()
    }


def write_names() -> None:
    with torch.device("meta"):
        parts = vision(dino={"img_size": 224}, siglip={"img_size": 224})
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32064, pad_token_id=32000))
        parts |= {"projector": projector(1024 + 1152, 4096), "language_model": llama}
    found = tensors(parts)
    lines = [f"{name} {' '.join(map(str, item.shape))}\n" for name, item in sorted(found.items())]
    (HERE / "openvla-7b.names.txt").write_text("".join(lines), encoding="utf-8")
    sizes = len(found), sum(item.numel() for item in found.values())
    if sizes != PUBLISHED_SIZES:
        raise RuntimeError(f"{sizes} tensors and parameters, but openvla-7b has {PUBLISHED_SIZES}")


class Tiny:
    def __init__(self) -> None:
        size = {"img_size": tiny.SIDE, "num_heads": tiny.HEADS}
        self.parts: dict[str, Any] = vision(dino=size | tiny.DINO, siglip=size | tiny.SIGLIP)
        features = tiny.DINO["embed_dim"] + tiny.SIGLIP["embed_dim"]
        self.parts["projector"] = projector(features, tiny.LLAMA["hidden_size"])
        config = transformers.LlamaConfig(**tiny.LLAMA, attn_implementation="eager")
        self.parts["language_model"] = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for name, item in tensors(self.parts).items():
                item.copy_(torch.from_numpy(tiny.weight(name, tuple(item.shape))))
        for part in self.parts.values():
            part.eval()

    def features(self, pictures: Tensor) -> Tensor:
        """[B,P,F] of uint8 [B,h,w,3] at the size of the model."""
        x = pictures.permute(0, 3, 1, 2).float() / 255.0
        found = []
        for name, mean, std in (
            ("vision_backbone.featurizer", timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD),
            ("vision_backbone.fused_featurizer", (0.5,) * 3, (0.5,) * 3),
        ):
            normalized = (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
            vit: Any = self.parts[name]
            found.append(vit.get_intermediate_layers(normalized, n={len(vit.blocks) - 2})[0])
        return torch.cat(found, -1)

    def projected(self, features: Tensor) -> Tensor:
        layer = self.parts["projector"]
        return layer["fc3"](nn.functional.gelu(layer["fc2"](nn.functional.gelu(layer["fc1"](features)))))

    def logits(self, embeddings: Tensor, bidirectional: bool) -> Tensor:
        """[S,256] of one row [S,W], in the order of the bins."""
        length = embeddings.shape[0]
        mask = torch.zeros(1, 1, length, length)
        if not bidirectional:
            mask = mask.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        found = self.parts["language_model"](inputs_embeds=embeddings[None], attention_mask=mask).logits[0]
        last = tiny.LLAMA["vocab_size"] - tiny.PADDING - 1
        return torch.stack([found[:, last - i] for i in range(tiny.BINS)], -1)

    def embed(self, ids: list[int]) -> Tensor:
        return self.parts["language_model"].model.embed_tokens(torch.tensor(ids))

    def prefix(self, patches: Tensor, prompt: tuple[int, ...]) -> Tensor:
        return torch.cat([self.embed([prompt[0]]), patches, self.embed(list(prompt[1:]))])

    def greedy(self, patches: Tensor, prompt: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
        """Logits [count,256] and bins [count], token after token, everything computed anew for each."""
        sequence, found, chosen = self.prefix(patches, prompt), [], []
        for _ in range(count):
            found.append(self.logits(sequence, bidirectional=False)[-1])
            chosen.append(int(found[-1].argmax()))
            token = tiny.LLAMA["vocab_size"] - tiny.PADDING - 1 - chosen[-1]
            sequence = torch.cat([sequence, self.embed([token])])
        return torch.stack(found), torch.tensor(chosen)

    def parallel(self, patches: Tensor, prompt: tuple[int, ...], count: int) -> Tensor:
        """Logits [count,256]: of the last token of the prompt and of all placeholders but the last."""
        before = self.prefix(patches, prompt)
        slots = torch.zeros(count, before.shape[1])
        found = self.logits(torch.cat([before, slots, self.embed([STOP])]), bidirectional=True)
        return found[len(before) - 1 : len(before) - 1 + count]


@torch.no_grad()
def write_outputs() -> None:
    model, seen = Tiny(), torch.from_numpy(tiny.pictures(len(tiny.PROMPTS)))
    features = [model.features(camera) for camera in seen]
    one, both = model.projected(features[0]), torch.cat([model.projected(item) for item in features], 1)
    greedy = [model.greedy(one[k], prompt, tiny.ENTRIES) for k, prompt in enumerate(tiny.PROMPTS)]
    count = tiny.ENTRIES * tiny.ACTIONS
    parallel = [model.parallel(both[k], prompt, count) for k, prompt in enumerate(tiny.PROMPTS)]
    found = {
        "features": torch.stack(features),
        "projected": both,
        "autoregressive": torch.stack([item[0] for item in greedy]),
        "greedy": torch.stack([item[1] for item in greedy]),
        "parallel": torch.stack(parallel),
    }
    save_file({name: item.contiguous() for name, item in found.items()}, HERE / "outputs.safetensors")


if __name__ == "__main__":
    write_names()
    write_outputs()
    versions = {item.__name__: item.__version__ for item in (torch, timm, transformers)}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")
