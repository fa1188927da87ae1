"""Run by LeRobot's Python: tiny SmolVLA, pi0 and pi0.5 with relative actions, written and played by LeRobot itself.

``python relative_folders.py write FOLDER`` makes FOLDER/FAMILY for each, and FOLDER/inputs.npz; ``... play INPUTS
FOLDER...`` loads every folder as LeRobot does, whoever wrote it, and writes FOLDER/played.npy: the chunks [B,C,D] of
its own processors and class.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.modules["tests"] = ModuleType("tests")  # other packages may have one
sys.modules["tests"].__path__ = [str(Path(__file__).parents[2])]

from lerobot.configs import PreTrainedConfig  # noqa: E402
from lerobot.policies.factory import make_pre_post_processors  # noqa: E402
from lerobot.policies.smolvla import modeling_smolvla, smolvlm_with_expert  # noqa: E402
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig  # noqa: E402
from lerobot.processor import (  # noqa: E402
    AbsoluteActionsProcessorStep,
    NormalizerProcessorStep,
    RelativeActionsProcessorStep,
    tokenizer_processor,
)
from transformers import PreTrainedTokenizerFast, SmolVLMConfig  # noqa: E402

from tests.golden.vla.pi0 import write_lerobot as pi  # noqa: E402
from tests.golden.vla.smolvla.cases import VLM  # noqa: E402

NAMES = [f"{name}.pos" for name in ("pan", "lift", "elbow", "flex", "roll", "gripper")]
CAMERAS = {"front": (20, 33), "wrist": (28, 28)}  # the environment's; a third one is missing
RENAMED = {"observation.images.front": "observation.images.base_0_rgb"}
ROWS, CHUNK, STEPS, SIZE, ROOM = 3, 5, 3, 6, 7
FAMILIES: dict[str, tuple[Any, Any]] = {
    "pi0": (pi.modeling_pi0.PI0Policy, pi.PI0Config),
    "pi05": (pi.modeling_pi05.PI05Policy, pi.PI05Config),
    "smolvla": (modeling_smolvla.SmolVLAPolicy, SmolVLAConfig),
}


def patch(tokenizer: Path) -> None:
    """What comes from the hub is small and from here."""
    for family in ("pi0", "pi05"):
        pi.patch(pi.FAMILIES[family][0])
    tokens = SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=1, global_image_token_id=2))
    for name, found in (("AutoConfig", SmolVLMConfig(**VLM)), ("AutoProcessor", tokens)):
        setattr(smolvlm_with_expert, name, SimpleNamespace(from_pretrained=lambda _, found=found: found))
    words = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), pad_token="?")
    tokenizer_processor.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: words)


def made(family: str) -> tuple[Any, Any, Any]:
    """A policy of random weights with its processors."""
    kind, config_of = FAMILIES[family]
    vectors = {"observation.state": pi.FeatureType.STATE, "action": pi.FeatureType.ACTION}
    features = {name: pi.PolicyFeature(of, (SIZE,)) for name, of in vectors.items()}
    sizes = {"base_0_rgb": CAMERAS["front"], "wrist": CAMERAS["wrist"], "missing": (28, 28)}
    pictures = {
        f"observation.images.{name}": pi.PolicyFeature(pi.FeatureType.VISUAL, (3, *size))
        for name, size in sizes.items()
    }
    relative = {"use_relative_actions": True, "relative_exclude_joints": ["gripper"], "action_feature_names": NAMES}
    own = {"image_resolution": (pi.SIDE, pi.SIDE), "num_inference_steps": STEPS, **relative}
    if family == "smolvla":
        own = {"num_vlm_layers": 4, "resize_imgs_with_padding": (32, 32), "num_steps": STEPS, "tokenizer_max_length": 9}
    config = config_of(
        input_features={"observation.state": features["observation.state"], **pictures},
        output_features={"action": features["action"]},
        chunk_size=CHUNK,
        n_action_steps=CHUNK - 1,
        max_state_dim=SIZE,
        max_action_dim=ROOM,
        device="cpu",
        push_to_hub=False,
        **own,
    )
    policy = kind(config).eval()
    with torch.no_grad():
        for item in policy.parameters():
            item.normal_(std=0.15)
    draw = {name: torch.randn(4, SIZE).sort(0).values for name in features}
    stats = {n: {"q01": d[0], "mean": d[1], "std": d[2].abs() + 0.2, "q99": d[3] + 0.2} for n, d in draw.items()}
    before, after = make_pre_post_processors(config, dataset_stats=stats)
    before.steps[0].rename_map = RENAMED
    if family == "smolvla":  # LeRobot's own pipelines of this family have none, but play one
        step = RelativeActionsProcessorStep(True, ["gripper"], NAMES)
        at = next(i for i, item in enumerate(before.steps) if isinstance(item, NormalizerProcessorStep))
        before.steps.insert(at, step)
        after.steps.insert(1, AbsoluteActionsProcessorStep(True, step))
    return policy, before, after


def write(folder: Path) -> None:
    torch.manual_seed(0)
    for family in FAMILIES:
        policy, before, after = made(family)
        for item in (policy, before, after):
            item.save_pretrained(folder / family)
        (folder / family / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    pictures = {name: torch.randint(0, 256, (ROWS, *size, 3), dtype=torch.uint8) for name, size in CAMERAS.items()}
    inputs = {**pictures, "state": torch.randn(ROWS, SIZE), "noise": torch.randn(ROWS, CHUNK, ROOM)}
    np.savez(folder / "inputs.npz", **{name: item.numpy() for name, item in inputs.items()})


@torch.no_grad()
def play(folder: Path, given: dict[str, torch.Tensor]) -> None:
    config = PreTrainedConfig.from_pretrained(folder)
    policy = FAMILIES[config.type][0].from_pretrained(folder, config=config).eval()
    before, after = make_pre_post_processors(config, pretrained_path=str(folder))
    seen = {f"observation.images.{name}": given[name].permute(0, 3, 1, 2).float() / 255.0 for name in CAMERAS}
    batch = before({**seen, "observation.state": given["state"], "task": ["lift the cube"] * ROWS})
    np.save(folder / "played.npy", after(policy.predict_action_chunk(batch, noise=given["noise"])).numpy())


if __name__ == "__main__":
    does, first, *folders = sys.argv[1:]
    if does == "write":
        patch(Path(first) / "tokenizer.json")
        write(Path(first))
    else:
        patch(Path(first).parent / "tokenizer.json")
        with np.load(first) as file:
            arrays = {key: torch.from_numpy(file[key]) for key in file.files}
        for place in folders:
            play(Path(place), arrays)
