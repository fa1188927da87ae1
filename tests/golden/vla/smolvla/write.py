"""Writes ``expected.npz`` beside this file with LeRobot's own SmolVLA.

Made with lerobot 0.4.4, transformers 4.57.6, torch 2.13.0 (cpu) and numpy 2.2.6 in the environment of
``tests/golden/lerobot/requirements.txt`` plus transformers, by ``python tests/golden/vla/smolvla/write.py``.

One thing is corrected: the vision tower of transformers 4.57 numbers patches 0, 0, 1, 2... in float32, because
``h / n * (1 - 1e-6)`` falls below the boundary of its bucket.  In bfloat16, in which LeRobot runs published weights,
that rounds to 0, 1, 2, 3..., which they were trained with and which transformers 5 computes in any precision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import library

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # other packages may be called "tests"
# torchvision's compiled part does not fit a torch without CUDA; lerobot imports it but uses nothing of it here.
if torch.version.cuda is None:
    _LIBRARY = library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from cases import ACTION, CAMERAS, CASES, FENCE, MISSING, STATE, TIMES, VLM, Case, inputs  # noqa: E402
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.smolvla import smolvlm_with_expert  # noqa: E402
from lerobot.policies.smolvla.modeling_smolvla import (  # noqa: E402
    SmolVLAConfig,
    SmolVLAPolicy,
    make_att_2d_masks,
)
from transformers import SmolVLMConfig  # noqa: E402
from weights import generator, weight  # noqa: E402


def embedded_patches(self: Any, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor) -> torch.Tensor:
    """The embeddings of whole pictures, with patches numbered in order."""
    patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    return patches + self.position_embedding.weight


def policy_of(case: Case) -> SmolVLAPolicy:
    """LeRobot's policy with the weights of the rule; the vision-language model's files are given, not downloaded."""
    tokenizer = SimpleNamespace(fake_image_token_id=FENCE[0], global_image_token_id=FENCE[1])
    local: dict[str, Any] = {"AutoConfig": SmolVLMConfig(**VLM), "AutoProcessor": SimpleNamespace(tokenizer=tokenizer)}
    for name, found in local.items():
        setattr(smolvlm_with_expert, name, SimpleNamespace(from_pretrained=lambda _, found=found: found))
    features = {"observation.state": PolicyFeature(FeatureType.STATE, (STATE,))}
    cameras = {**CAMERAS, **dict.fromkeys(MISSING[: case.missing], (32, 32))}
    features |= {name: PolicyFeature(FeatureType.VISUAL, (3, *size)) for name, size in cameras.items()}
    settings = {**case.config, "empty_cameras": 0}  # LeRobot would add cameras of its own names to these features
    config = SmolVLAConfig(
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        device="cpu",
        **settings,
    )
    policy = SmolVLAPolicy(config).eval()
    config.empty_cameras = case.missing
    with torch.no_grad():
        for name, tensor in policy.state_dict().items():
            tensor.copy_(torch.from_numpy(weight(name, tensor.shape)))
    embeddings = policy.model.vlm_with_expert.vlm.model.vision_model.embeddings
    if not case.bfloat16:
        embeddings.forward = MethodType(embedded_patches, embeddings)
    else:
        policy.model.vlm_with_expert.vlm.to(torch.bfloat16)
    return policy


def batch_of(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The inputs, and what LeRobot's policy is given of them."""
    given = {key: torch.from_numpy(item) for key, item in inputs(name, generator(name)).items()}
    batch = {camera: given[camera].permute(0, 3, 1, 2).float() / 255.0 for camera in CAMERAS}
    batch |= {
        "observation.state": given["state"],
        "action": given["action"],
        "observation.language.tokens": given["tokens"],
        "observation.language.attention_mask": given["mask"],
    }
    return given, batch


@torch.no_grad()
def outputs(name: str) -> dict[str, np.ndarray]:
    """Velocities [times,B,C,A] at the noise, the sample of 10 steps from it [B,C,A], and the training loss [B]."""
    policy, (given, batch) = policy_of(CASES[name]), batch_of(name)
    model, (images, present) = policy.model, policy.prepare_images(batch)
    seen = (images, present, given["tokens"], given["mask"])
    state = policy.prepare_state(batch)
    embedded, mask, blocks = model.embed_prefix(*seen, state=state)
    _, cache = model.vlm_with_expert.forward(
        attention_mask=make_att_2d_masks(mask, blocks),
        position_ids=mask.cumsum(1) - 1,
        inputs_embeds=[embedded, None],
        use_cache=True,
        fill_kv_cache=True,
    )
    velocity = [
        model.denoise_step(mask, cache, given["noise"], torch.full((len(state),), time, dtype=torch.float32))
        for time in TIMES
    ]
    return {
        "velocity": torch.stack(velocity).numpy(),
        "sample": model.sample_actions(*seen, state, noise=given["noise"]).numpy(),
        "loss": policy.forward(batch, given["noise"], given["time"], reduction="none")[0].numpy(),
    }


def tensors() -> np.ndarray:
    """``name shape`` of every tensor of LeRobot's state dict, sorted."""
    found = policy_of(CASES["one row"]).state_dict()
    return np.array(sorted(f"{name} {'x'.join(map(str, item.shape))}" for name, item in found.items()))


if __name__ == "__main__":
    made = {f"{name}/{key}": item for name in CASES for key, item in outputs(name).items()}
    np.savez_compressed(HERE / "expected.npz", tensors=tensors(), **made)
    for key, item in made.items():
        print(f"{key:55} {item.shape!s:15} std {item.std():.3f}")
