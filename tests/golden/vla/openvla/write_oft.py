"""Write ``oft.safetensors``: what OpenVLA-OFT's own classes compute, tiny and with weights that follow from names.

    python -m venv other && other/bin/pip install torch==2.13.0 "numpy<2" safetensors tokenizers==0.19.1
    other/bin/pip install "huggingface_hub<1" regex pyyaml requests importlib_metadata pillow
    other/bin/pip install --no-deps timm==0.9.10 torchvision==0.28.0 diffusers==0.31.0
    PYTHONPATH=OFT:FORK/src other/bin/python tests/golden/vla/openvla/write_oft.py

OFT is a checkout of github.com/moojink/openvla-oft at 213c5ff, and FORK one of its transformers,
github.com/moojink/transformers-openvla-oft at bc339d9, whose Llama attends to everything.  Nothing of vla_rl is
imported.  Its classes run as they are; only the sizes of timm's vision transformers are set from here, and no
``__init__`` of its packages runs, which would import TensorFlow.  Its constants are LIBERO's: chunks of eight actions
of seven entries.

Of a diffusion all points of its chains are kept: a network that was never trained multiplies a rounding error a million
times along fifty steps.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, library, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import tiny  # noqa: E402
from weights import weight  # noqa: E402

_SHIM = library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _SHIM.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm  # noqa: E402

STEPS = (50, 10)  # of 50, of the deployed chain
IGNORED, ACTION_LABEL, STOP = -100, 31744, 2  # labels: of the prompt, of an action token, of the end


def real(name: str) -> Any:
    """A module of OpenVLA-OFT."""
    for package in ("prismatic", "prismatic.models", "prismatic.training", "prismatic.vla"):
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            place = next(Path(item) for item in sys.path if (Path(item) / "prismatic").is_dir())
            sys.modules[package].__path__ = [str(place.joinpath(*package.split(".")))]
    return importlib.import_module(f"prismatic.{name}")


HEADS, PROJECTORS = real("models.action_heads"), real("models.projectors")
CONSTANTS = real("vla.constants")
ACTIONS, ENTRIES, STATE = CONSTANTS.NUM_ACTIONS_CHUNK, CONSTANTS.ACTION_DIM, CONSTANTS.PROPRIO_DIM


def made_model() -> Any:
    """``OpenVLAForActionPrediction`` of the tiny sizes."""
    config = real("extern.hf.configuration_prismatic").OpenVLAConfig(
        vision_backbone_id="dinosiglip-vit-so-224px",
        llm_backbone_id="llama2-7b-pure",
        text_config=tiny.OFT_LLAMA,
        pad_token_id=tiny.OFT_LLAMA["pad_token_id"],
        image_resize_strategy="resize-naive",
        norm_stats={"here": {"action": {"q01": [-1.0] * ENTRIES, "q99": [1.0] * ENTRIES}}},
    )
    config.image_sizes = [tiny.SIDE] * 2
    sizes = dict(zip(config.timm_model_ids, (tiny.DINO, tiny.SIGLIP), strict=True))
    whole = timm.create_model
    timm.create_model = lambda model_id, **given: whole(model_id, **given, **sizes[model_id], num_heads=tiny.HEADS)
    model = real("extern.hf.modeling_prismatic").OpenVLAForActionPrediction(config)
    timm.create_model = whole
    if type(model.language_model.model.layers[0].self_attn).__name__ != "LlamaSdpaAttention":
        raise RuntimeError("only this attention of the fork is bidirectional")
    fill(model, "", tiny.weight)
    model.vision_backbone.set_num_images_in_input(tiny.CAMERAS)
    return model.eval()


def fill(module: nn.Module, prefix: str, rule: Any = weight) -> Any:
    with torch.no_grad():
        for name, item in module.state_dict().items():
            item.copy_(torch.from_numpy(rule(prefix + name, tuple(item.shape))))
    return module.eval()


def pixels(row: int) -> Tensor:
    """[1,6*CAMERAS,h,w]: every camera normalised for DINOv2 and for SigLIP."""
    found = []
    for camera in tiny.pictures(len(tiny.PROMPTS)):
        picture = torch.from_numpy(camera[row]).permute(2, 0, 1).float() / 255.0
        for mean, std in ((timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD), ((0.5,) * 3, (0.5,) * 3)):
            found.append((picture - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])
    return torch.cat(found)[None]


class Oft:
    def __init__(self) -> None:
        width = tiny.OFT_LLAMA["hidden_size"]
        self.model = made_model()
        self.l1 = fill(HEADS.L1RegressionActionHead(width, width, ENTRIES), "l1.")
        self.diffusion = fill(HEADS.DiffusionActionHead(width, width, ENTRIES), "diffusion.")
        self.state = fill(PROJECTORS.ProprioProjector(width, STATE), "proprio_projector.", tiny.weight)
        self.noisy = fill(PROJECTORS.NoisyActionProjector(width), "noisy_action_projector.")

    def inputs(self, row: int) -> dict[str, Any]:
        tokens = torch.tensor([tiny.OFT_PROMPTS[row]])
        state = {"proprio": torch.from_numpy(tiny.states()[row]), "proprio_projector": self.state}
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": pixels(row), **state}

    def regressed(self, row: int) -> tuple[Tensor, Tensor]:
        """The actions [8,7] of the L1 head and the hidden states [56,W] that it reads."""
        actions, hidden = self.model.predict_action(**self.inputs(row), unnorm_key="here", action_head=self.l1)
        return torch.as_tensor(actions), hidden[0]

    def denoised(self, row: int, steps: int) -> Tensor:
        """The points [steps+1,8,7] of a chain, from noise to the actions."""
        scheduler, points = self.diffusion.noise_scheduler, list[Tensor]()
        scheduler.set_timesteps(steps)
        heads = {"action_head": self.diffusion, "noisy_action_projector": self.noisy}
        step = scheduler.step

        def recorded(noise: Tensor, t: int, point: Tensor) -> Any:
            points.append(point[0])
            return step(noise, t, point)

        scheduler.step = recorded
        torch.manual_seed(row)
        actions, _ = self.model.predict_action(**self.inputs(row), unnorm_key="here", **heads)
        scheduler.step = step
        return torch.stack([*points, torch.as_tensor(actions).to(points[0])])

    def predicted(self, row: int, timestep: int) -> tuple[Tensor, Tensor]:
        """As in training: ``tiny.chunks`` with noise of a timestep, and the noise that is predicted."""
        given, drawn = self.inputs(row), torch.randint
        torch.randint = lambda **kwargs: torch.tensor([timestep])
        torch.manual_seed(row)
        noisy = self.diffusion.sample_noisy_actions(torch.from_numpy(tiny.chunks()[row : row + 1]))
        torch.randint = drawn
        count = ACTIONS * ENTRIES
        prompt, ends = given["input_ids"], torch.tensor([[1] * count + [STOP]])
        labels = torch.cat([torch.full_like(prompt, IGNORED), torch.tensor([[ACTION_LABEL] * count + [STOP]])], 1)
        ids = torch.cat([prompt, ends], 1)
        output = self.model.forward(
            **{**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)},
            labels=labels,
            output_hidden_states=True,
            noisy_actions=noisy["noisy_actions"],
            noisy_action_projector=self.noisy,
            diffusion_timestep_embeddings=noisy["diffusion_timestep_embeddings"],
        )
        hidden = output.hidden_states[-1][:, -count - 2 : -2]  # each is read where the token before it stands
        return noisy["noisy_actions"][0], self.diffusion.predict_noise(hidden)[0]


@torch.no_grad()
def write() -> None:
    model, rows = Oft(), range(len(tiny.OFT_PROMPTS))
    parts = {("l1", "hidden"): [model.regressed(row) for row in rows]}
    parts[("noisy", "predicted")] = [model.predicted(row, tiny.TIMESTEPS[row]) for row in rows]
    found = {f"chain_{steps}": torch.stack([model.denoised(row, steps) for row in rows]) for steps in STEPS}
    for names, each in parts.items():
        for name, items in zip(names, zip(*each, strict=True), strict=True):
            found[name] = torch.stack(items).float()
    save_file(found, HERE / "oft.safetensors")


if __name__ == "__main__":
    write()
