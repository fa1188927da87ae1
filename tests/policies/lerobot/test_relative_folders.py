"""Folders with relative actions: what the real LeRobot writes acts here as there, and LeRobot acts as what we write."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.golden.vla.pi0.cases import LEROBOT_EXPERT, LEROBOT_TEXT, LEROBOT_VISION, SIDE
from tests.golden.vla.smolvla.cases import VLM
from tests.policies.vla.public_folders import robot_spec, write
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.policies.lerobot.policy import POLICIES
from vla_rl.policies.pi0.network import Gemma, Siglip
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.lerobot_folder import save_lerobot
from vla_rl.policies.vla.options import VLAOptions

INSTALLED = POLICIES.one("lerobot").state()
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(INSTALLED != "ready", reason=f"LeRobot is {INSTALLED}: vla-rl policies install lerobot"),
]
FAMILIES = ("pi0", "pi05", "smolvla")
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}
SIZES = {"num_hidden_layers": 2, **HEADS, "vocab_size": LEROBOT_TEXT["vocab_size"]}
WIDTHS = ("hidden_size", "intermediate_size")
TINY: dict[str, Any] = {
    "VARIANTS": {
        name: Gemma(**{width: of[width] for width in WIDTHS}, **SIZES)
        for name, of in (("gemma_2b", LEROBOT_TEXT), ("gemma_300m", LEROBOT_EXPERT))
    },
    "SO400M": Siglip(
        LEROBOT_VISION["hidden_size"], LEROBOT_VISION["intermediate_size"], 2, 16, patch_size=14, image_size=SIDE
    ),
}


def lerobot(*arguments: object) -> None:
    """Run the script beside this file by LeRobot's own Python."""
    script = Path(__file__).with_name("relative_folders.py")
    command = [str(POLICIES.find("lerobot").python), str(script), *map(str, arguments)]
    variables = {**POLICIES.child_environment("lerobot"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def tokenizer(words: Sequence[str]) -> Tokenizer:
    """Words and single digits, as PaliGemma's."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What LeRobot writes, and plays."""
    folder = tmp_path_factory.mktemp("lerobot")
    words = ("?", "<bos>", "lift", "the", "cube", "Task", ":", "State", ",", "-", ";", "Action", *"0123456789")
    tokenizer(words).save(str(folder / "tokenizer.json"))
    lerobot("write", folder)
    write(folder / "smolvla" / "vlm" / "config.json", VLM)
    lerobot("play", folder / "inputs.npz", *(folder / family for family in FAMILIES))
    return folder


def spec() -> EnvSpec:
    images: dict[str, tuple[int, int]] = {"front": (20, 33), "wrist": (28, 28)}
    return robot_spec((6, 6), images, tasks=("lift the cube",))


def played(policy: Any, folder: Path) -> np.ndarray:
    """The actions of ``policy`` for the inputs in ``folder``."""
    with np.load(folder / "inputs.npz") as file:
        given = {name: file[name] for name in file.files}
    zeros = np.zeros(len(given["state"]), np.int64)
    obs = Observation({name: given[name] for name in ("front", "wrist")}, given["state"], zeros, zeros)
    rows = policy.latent_shape[0]
    noise = torch.as_tensor(given["noise"])[:, :rows].flatten(1)
    found: np.ndarray = policy.integrated(policy.encode(obs), noise).action.numpy()
    return found


def opened(folder: Path) -> Any:
    with mock.patch.multiple("vla_rl.policies.pi0.policy", **TINY):
        return load_policy(folder, spec(), VLAOptions(cameras={"base_0_rgb": "front", "wrist": "wrist", "missing": ""}))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_lerobot_writes_acts_here_as_there(folders, family):
    policy = opened(folders / family)
    assert policy.relative == (True,) * 5 + (False,) and policy.horizon == 4
    wanted = np.load(folders / family / "played.npy")[:, :4]
    np.testing.assert_allclose(played(policy, folders), np.clip(wanted, -9, 9), atol=1e-4)
    assert np.abs(wanted).max() > 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_lerobot_acts_as_what_we_write(folders, family, tmp_path):
    """Trained on, with other statistics: LeRobot's own class and processors do what the policy does here."""
    policy, before = opened(folders / family), np.load(folders / family / "played.npy")[:, :4]
    torch.manual_seed(1)
    with torch.no_grad():
        for item in policy.trainable().values():
            item.add_(torch.randn_like(item), alpha=0.05)
    save_lerobot(policy, tmp_path / "made")
    lerobot("play", folders / "inputs.npz", tmp_path / "made")
    wanted = played(policy, folders)
    there = np.load(tmp_path / "made" / "played.npy")[:, : policy.horizon]
    np.testing.assert_allclose(np.clip(there, -9, 9), wanted, atol=1e-4)
    assert np.abs(there - before).max() > 0.05
    again = opened(tmp_path / "made")
    np.testing.assert_allclose(played(again, folders), wanted, atol=1e-4)
    assert again.relative == policy.relative
    saved = json.loads((tmp_path / "made" / "config.json").read_text(encoding="utf-8"))
    assert (saved["n_action_steps"], saved["type"]) == (4, family)


def test_lerobots_own_loop_is_not_asked_for_relative_chunks(folders):
    with pytest.raises(UserError, match="LeRobot's loop adds that of every later step"):
        load_policy(f"lerobot:{folders / 'pi0'}", spec())
