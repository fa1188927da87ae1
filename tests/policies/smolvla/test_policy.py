"""SmolVLA as a policy: a LeRobot folder is opened as it is, and one from nothing keeps every promise of a policy."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.golden.vla.smolvla.cases import CAMERAS, CASES, VLM, inputs
from tests.golden.vla.weights import generator, weight
from tests.policies.smolvla.test_parity import EXPECTED
from tests.policies.vla.public_folders import lerobot_features, robot_spec, word_tokenizer
from vla_rl.contract.env import ArraySpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.options import VLAOptions

CASE = "padded prompts and a missing camera"
MEAN, STD = np.linspace(-0.5, 0.5, 5), np.linspace(0.5, 2.0, 5)  # of the state
A_MEAN, A_STD = np.linspace(0.1, 0.4, 4), np.linspace(0.3, 0.6, 4)  # of the action
spec_of = partial(robot_spec, (5, 4), {name.rpartition(".")[2]: size for name, size in CAMERAS.items()})


def write_folder(folder: Path, compiled: bool = False, **changes: Any) -> Path:
    """A folder as LeRobot wrote it before its processors: statistics among the weights."""
    (folder / "vlm").mkdir(parents=True)
    config = {
        "type": "smolvla",
        **CASES[CASE].config,
        **lerobot_features({**CAMERAS, "observation.images.empty_camera_0": (480, 640)}, 5, 4),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vlm" / "config.json").write_text(json.dumps(VLM))
    shapes = SmolVLAShape.from_lerobot(CASES[CASE].config, VLM).build().state_dict()
    tensors = {name: torch.from_numpy(weight(name, item.shape)) for name, item in shapes.items()}
    tensors["model.vlm_with_expert.vlm.lm_head.weight"] = torch.zeros(64, 48)
    if compiled:
        tensors = {name.replace("model.", "model._orig_mod.", 1): item for name, item in tensors.items()}
    for name, numbers in (
        ("normalize_inputs.buffer_observation_state.mean", MEAN),
        ("normalize_inputs.buffer_observation_state.std", STD),
        ("normalize_targets.buffer_action.mean", A_MEAN),
        ("normalize_targets.buffer_action.std", A_STD),
        ("unnormalize_outputs.buffer_action.mean", A_MEAN),
        ("unnormalize_outputs.buffer_action.std", A_STD),
    ):
        tensors[name] = torch.from_numpy(numbers.astype(np.float32))
    save_file(tensors, folder / "model.safetensors")
    words = ("?", "lift", "the", "cube", "open", "it", "\n")
    word_tokenizer(words, lines=True).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("public") / "policy")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_lerobot_folder_acts_as_lerobots_policy(folder: Path, tmp_path: Path, compiled: bool) -> None:
    """Pictures, normalized state and the sample of ten steps are those of the golden file."""
    place = write_folder(tmp_path / "policy", compiled=True) if compiled else folder
    policy, given = SmolVLA.from_public(place, spec_of()), inputs(CASE, generator(CASE))
    assert policy.cameras == ("top", "wrist", None) and policy.horizon == 4
    policy.tokens, policy.token_mask = torch.from_numpy(given["tokens"]), torch.from_numpy(given["mask"])
    images = {name.rpartition(".")[2]: given[name] for name in CAMERAS}
    state = (given["state"] * STD + MEAN).astype(np.float32)
    features = policy.encode(Observation(images, state, np.arange(3), np.zeros(3, np.int64), {}))
    with torch.no_grad():
        noise = torch.from_numpy(given["noise"])[:, :4]  # what is not executed is not computed
        end = policy.sampler.deterministic(policy.field(features), noise.flatten(1))
    with np.load(EXPECTED) as expected:
        sample = expected[f"{CASE}/sample"][:, :4]
    assert policy.latent_shape == (4, 7) and policy.chunk_length == 6
    assert np.abs(end.reshape(sample.shape).numpy() - sample).max() < 1e-4
    action = policy.executed(end, {})["action"].numpy()
    assert np.abs(action - (sample[..., :4] * A_STD + A_MEAN).clip(-9, 9)).max() < 1e-4


def test_the_prompt_is_the_instruction_and_a_newline(folder: Path) -> None:
    policy = SmolVLA.from_public(folder, spec_of())
    assert policy.tokens.tolist() == [[1, 2, 3, 6], [4, 5, 6, 0]]
    assert policy.token_mask.tolist() == [[True] * 4, [True] * 3 + [False]]


def test_chains_have_the_folders_steps_or_the_chosen_ones(tmp_path: Path) -> None:
    place = write_folder(tmp_path / "policy", num_steps=4)
    assert SmolVLA.from_public(place, spec_of()).sampler.steps == 4
    chosen = VLAOptions(sampler=FlowSampler(FlowSde(0.5), LastStep(), 3))
    assert SmolVLA.from_public(place, spec_of(), chosen).sampler.steps == 3


@pytest.mark.parametrize(
    ("changes", "spec", "message"),
    [
        ({"adapt_to_pi_aloha": True}, {}, "adapt_to_pi_aloha.*use a checkpoint without it"),
        ({"n_obs_steps": 2}, {}, "n_obs_steps to 2"),
        ({}, {"state": ArraySpec((3,), "float32", -1.0, 1.0)}, "5 state entries but the environment has 3"),
        ({}, {"images": {"front": ArraySpec((8, 8, 3), "uint8", 0, 255)}}, "top, wrist.*has front.*--vla.cameras"),
        ({"chunk_size": 50, "num_vlm_layers": 5}, {}, "layers.4.*not in its files|tensors of the model are not"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, changes: Any, spec: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SmolVLA.from_public(write_folder(tmp_path / "policy", **changes), spec_of(**spec))
