"""LeRobot's own SmolVLA as a process that decides when asked; ``vla_inference.py`` starts it with LeRobot's packages.

``python lerobot_smolvla.py CONFIG VLM`` (both JSON) reads paths of inputs line by line, predicts a chunk for each, and
answers with a line.  The first chunk [B,C,D] for a path is written beside it.  Weights are those of the rule in
``tests/golden/vla/weights.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import library

sys.path[0] = str(Path(__file__).parents[1] / "golden" / "vla")  # not this folder, whose names other packages may have
# torchvision's compiled part does not fit a torch without CUDA; lerobot imports it but uses nothing of it here.
_LIBRARY = library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.smolvla import smolvlm_with_expert  # noqa: E402
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAConfig, SmolVLAPolicy  # noqa: E402
from transformers import SmolVLMConfig  # noqa: E402
from weights import weight  # noqa: E402


def embedded_patches(self: Any, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor) -> torch.Tensor:
    """The embeddings of whole pictures, patches in order: in float32 transformers 4.57 numbers them 0, 0, 1, 2..."""
    patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    return patches + self.position_embedding.weight


def policy_of(config: dict[str, Any], vlm: dict[str, Any]) -> SmolVLAPolicy:
    """The policy; the files of its vision-language model are given, not downloaded."""
    tokenizer = SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    local: dict[str, Any] = {"AutoConfig": SmolVLMConfig(**vlm), "AutoProcessor": SimpleNamespace(tokenizer=tokenizer)}
    for name, found in local.items():
        setattr(smolvlm_with_expert, name, SimpleNamespace(from_pretrained=lambda _, found=found: found))
    kinds = {"state": FeatureType.STATE, "action": FeatureType.ACTION, "visual": FeatureType.VISUAL}
    inputs, outputs = (
        {name: PolicyFeature(kinds[kind], tuple(size)) for name, (kind, size) in config.pop(part).items()}
        for part in ("input_features", "output_features")
    )
    policy = SmolVLAPolicy(SmolVLAConfig(input_features=inputs, output_features=outputs, device="cpu", **config)).eval()
    with torch.no_grad():
        for name, tensor in policy.state_dict().items():
            tensor.copy_(torch.from_numpy(weight(name, tensor.shape)))
    embeddings = policy.model.vlm_with_expert.vlm.model.vision_model.embeddings
    embeddings.forward = MethodType(embedded_patches, embeddings)
    return policy


def batch_of(path: Path) -> dict[str, torch.Tensor]:
    """What LeRobot's processors hand to the policy, and ``noise``."""
    with np.load(path) as given:
        items = {name: torch.from_numpy(given[name]) for name in given.files}
    named = {"state": "observation.state", "tokens": "observation.language.tokens"}
    named |= {"mask": "observation.language.attention_mask", "noise": "noise"}
    batch = {named[name]: items.pop(name) for name in named}
    return batch | {name: item.permute(0, 3, 1, 2).float() / 255.0 for name, item in items.items()}


def main(config: str, vlm: str) -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # LeRobot prints
    policy, batches = policy_of(json.loads(config), json.loads(vlm)), {}
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        path = Path(line.strip())
        first = path not in batches
        if first:
            batches[path] = batch_of(path)
        batch = dict(batches[path])
        chunk = policy.predict_action_chunk(batch, noise=batch.pop("noise"))
        if first:
            np.save(path.with_suffix(".npy"), chunk.numpy())
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
