"""pi0 as a policy: public folders are opened as they are, and one from nothing keeps every promise of a policy."""

from __future__ import annotations

import json
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.golden.vla.pi0.cases import (
    ACTION,
    CHUNK,
    LEROBOT_CAMERAS,
    LEROBOT_EXPERT,
    LEROBOT_MISSING,
    LEROBOT_TEXT,
    LEROBOT_TIED,
    LEROBOT_VISION,
    SIDE,
    STATE,
    TIMES,
    lerobot_inputs,
)
from tests.golden.vla.weights import weight
from tests.policies.pi0.test_network import CASES, GOLDEN, inputs
from tests.policies.test_tiny import observations
from tests.policies.vla.public_folders import lerobot_features, robot_spec, word_tokenizer
from tests.policies.vla.tiny_vlas import tiny_vla
from tests.policies.vla.toy_network import ToyNetwork, ToyShape
from tests.toys import seeded
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde, Ode
from vla_rl.policies.pi0 import policy as pi0_public
from vla_rl.policies.pi0.network import Gemma, Pi0Network, Siglip
from vla_rl.policies.pi0.policy import Pi0
from vla_rl.policies.vla.network import TransformersLetterbox
from vla_rl.policies.vla.options import TrainAll, TrainExpert, Trains, VLAOptions, checkpoint_gradients

FOUR = FlowSampler(Ode(), AllSteps(), steps=4)
MEAN, STD = np.linspace(-0.5, 0.5, STATE), np.linspace(0.5, 2.0, STATE)  # of the state
A_MEAN, A_STD = np.linspace(0.1, 0.4, ACTION), np.linspace(0.3, 0.6, ACTION)  # of the action
WORDS = ("?", "<pad>", "<bos>", "lift", "the", "cube", "open", "it", "\n")
spec_of = partial(robot_spec, (STATE, ACTION))
LEROBOT = Path(__file__).parents[2] / "golden/vla/pi0/lerobot.npz"


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: item.contiguous() for name, item in tensors.items()}, folder / "model.safetensors")
    word_tokenizer(WORDS, lines=True).save(str(folder / "tokenizer.json"))
    return folder


# -- transformers -----------------------------------------------------------------------------------------------------

TWO = {"front": (SIDE, SIDE), "wrist": (SIDE, SIDE)}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What PI0ForConditionalGeneration.save_pretrained writes, with the processor's statistics and a tokenizer."""
    from tests.golden.vla.pi0 import theirs

    made = tmp_path_factory.mktemp("made")
    theirs.model().save_pretrained(made)
    config = json.loads((made / "config.json").read_text())
    folder = write(tmp_path_factory.mktemp("public") / "policy", config, load_file(made / "model.safetensors"))
    numbers = {"state_mean": MEAN, "state_std": STD, "actions_mean": A_MEAN, "actions_std": A_STD}
    saved = {name: item.tolist() for name, item in numbers.items()}
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "PI0Processor", **saved}))
    return folder


def test_a_folder_of_transformers_acts_as_its_model(theirs):
    """Names of tensors, sizes, statistics: the sample from the golden noise is the golden one, un-normalised."""
    name = "padded prompts"
    policy = Pi0.from_public(theirs, spec_of(TWO), VLAOptions(sampler=FOUR))
    given = inputs(CASES[name])
    policy.tokens, policy.token_mask = torch.from_numpy(given["tokens"]), torch.from_numpy(given["mask"])
    images = dict(zip(TWO, given["pictures"], strict=True))
    end = sample_of(policy, images, given["state"], given["noise"])
    expected = GOLDEN[f"{name}/sample"]
    assert np.abs(end - expected).max() < 5e-4
    assert policy.horizon == 4 and policy.network.shape.pictures == TransformersLetterbox()


def sample_of(policy: Pi0, images: dict[str, np.ndarray], state: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The end of the chain from ``noise``; ``state`` is normalised.  The executed action is compared on the way."""
    batch = len(state)
    physical = (state * STD + MEAN).astype(np.float32)
    features = policy.encode(Observation(images, physical, np.arange(batch), np.zeros(batch, np.int64), {}))
    with torch.no_grad():
        end = policy.sampler.deterministic(policy.field(features), torch.from_numpy(noise).flatten(1))
    chunk = end.reshape(batch, CHUNK, ACTION).numpy()
    action = policy.executed(end, {})["action"].numpy()
    assert np.abs(action - (chunk[:, :4] * A_STD + A_MEAN).clip(-9, 9)).max() < 1e-4
    return chunk


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        (("vlm_config", "text_config"), "rms_norm_eps", 1e-5),
        (("vlm_config", "vision_config"), "hidden_act", "relu"),
        (("dit_config",), "rope_parameters", {"rope_theta": 500.0, "rope_type": "default"}),
        (("dit_config",), "num_attention_heads", 2),
    ],
)
def test_a_network_that_computes_otherwise_is_refused_by_name(theirs, tmp_path, part, name, value):
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    reduce(lambda whole, key: whole[key], part, config)[name] = value
    with pytest.raises(UserError, match=rf"sets {'.'.join(part)}\.{name} to "):
        pi0_public.shape_of(tmp_path, config)


def test_the_prompt_is_bos_the_instruction_and_a_newline(theirs):
    policy = Pi0.from_public(theirs, spec_of(TWO))
    assert policy.tokens.tolist() == [[2, 3, 4, 5, 8], [2, 6, 7, 8, 0]]
    assert policy.token_mask.tolist() == [[True] * 5, [True] * 4 + [False]]


def test_names_of_every_library_mean_the_same_tensor():
    public_name, mine = Pi0Network.public_name, "model.vlm.language_model.layers.3.mlp.up_proj.weight"
    theirs = "paligemma_with_expert.paligemma.model.language_model.layers.3.mlp.up_proj.weight"
    older = "paligemma_with_expert.paligemma.language_model.model.layers.3.mlp.up_proj.weight"
    newer = "paligemma_with_expert.paligemma.model.language_model.model.layers.3.mlp.up_proj.weight"
    for name in (mine, theirs, older, newer, f"model.{theirs}", f"model.{older}"):
        assert public_name(name) == mine
    eye = "paligemma_with_expert.paligemma.model.vision_tower.vision_model.post_layernorm.bias"
    assert public_name(eye) == "model.vlm.vision_tower.post_layernorm.bias"
    assert public_name("model.state_proj.bias") == "embed_action_time.state_proj.bias"
    assert public_name("model.action_out_proj.bias") == "action_out_proj.bias"
    words = "model.paligemma_with_expert.paligemma.lm_head.weight"
    assert public_name(words) == "model.vlm.language_model.embed_tokens.weight"
    assert public_name("model.paligemma_with_expert.gemma_expert.lm_head.weight") is None


# -- LeRobot ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_variants(monkeypatch):
    """Sizes that LeRobot's config.json has no words for."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}
    monkeypatch.setitem(pi0_public.VARIANTS, "gemma_2b", Gemma(**LEROBOT_TEXT, **heads))
    monkeypatch.setitem(pi0_public.VARIANTS, "gemma_300m", Gemma(**{**LEROBOT_TEXT, **LEROBOT_EXPERT}, **heads))
    sizes = {name: value for name, value in LEROBOT_VISION.items() if name != "projection_dim"}
    monkeypatch.setattr(pi0_public, "SO400M", Siglip(**sizes, num_attention_heads=16, patch_size=14))


def write_lerobot(folder: Path, left_out: str = "", golden: Path = LEROBOT, **changes: Any) -> Path:
    """A folder as LeRobot writes it: tensors by the ``golden`` list, statistics with the processors."""
    config = {
        "type": "pi0",
        **lerobot_features({**LEROBOT_CAMERAS, LEROBOT_MISSING: (SIDE, SIDE)}, STATE, ACTION),
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "chunk_size": CHUNK,
        "n_action_steps": CHUNK,
        "max_state_dim": STATE,
        "max_action_dim": ACTION,
        "min_period": 4e-3,
        "max_period": 4.0,
        "image_resolution": [SIDE, SIDE],
        "tokenizer_max_length": 48,
        **changes,
    }
    listed = [line.split() for line in np.load(golden)["tensors"]]
    absent = (left_out, LEROBOT_TIED)  # of two tied tensors safetensors keeps one
    shapes = {name: [int(size) for size in shape.split("x")] for name, shape in listed if name not in absent}
    place = write(folder, config, {name: torch.from_numpy(weight(name, shape)) for name, shape in shapes.items()})
    stats = {"observation.state": {"mean": MEAN, "std": STD}, "action": {"mean": A_MEAN, "std": A_STD}}
    saved = {name: {key: item.tolist() for key, item in numbers.items()} for name, numbers in stats.items()}
    (place / "meta").mkdir()
    (place / "meta" / "stats.json").write_text(json.dumps(saved))
    return place


@pytest.mark.parametrize("name", ["one row", "padded prompts"])
def test_a_folder_of_lerobot_acts_as_its_policy(tmp_path, small_variants, name):
    """From pictures of another shape, a missing camera and prompts of different length to velocities and sample."""
    seen = {camera.rpartition(".")[2]: size for camera, size in LEROBOT_CAMERAS.items()}
    options = VLAOptions(sampler=FOUR, cameras={LEROBOT_MISSING: ""})
    policy, given = Pi0.from_public(write_lerobot(tmp_path / "policy"), spec_of(seen), options), lerobot_inputs(name)
    policy.tokens, policy.token_mask = torch.from_numpy(given["tokens"]), torch.from_numpy(given["mask"])
    images = {camera.rpartition(".")[2]: given[camera] for camera in LEROBOT_CAMERAS}
    expected = np.load(LEROBOT)
    first = policy.network.shape.pictures(torch.from_numpy(given["observation.images.base_0_rgb"]), SIDE)
    np.testing.assert_allclose(first, expected[f"{name}/pixels"], atol=1e-5)
    tensors = {key: torch.from_numpy(item) for key, item in given.items()}
    with torch.no_grad():
        pictures = [tensors[camera] for camera in LEROBOT_CAMERAS]
        prefix = policy.network.encode([*pictures, None], tensors["tokens"], tensors["mask"])
        condition = policy.network.condition(prefix, tensors["state"])
        for time, velocity in zip(TIMES, expected[f"{name}/velocity"], strict=True):
            t = torch.full((len(velocity),), time)
            found, _ = policy.network.velocity(condition, tensors["noise"], t)
            assert np.abs(found.numpy() - velocity).max() < 1e-4  # LeRobot's own sums, on another processor
    end = sample_of(policy, images, given["state"], given["noise"])
    assert np.abs(end - expected[f"{name}/sample"]).max() < 5e-4  # the state was rounded in physical units


def test_what_does_not_fit_is_one_sentence(tmp_path, small_variants):
    cameras = {camera.rpartition(".")[2]: size for camera, size in LEROBOT_CAMERAS.items()}
    fits, options = spec_of(cameras), VLAOptions(cameras={LEROBOT_MISSING: ""})

    def refused(message: str, spec: EnvSpec = fits, chosen: VLAOptions = options, left_out: str = "", **changes: Any):
        place = write_lerobot(tmp_path / f"policy{len(list(tmp_path.iterdir()))}", left_out, **changes)
        with pytest.raises(UserError, match=message):
            Pi0.from_public(place, spec, chosen)

    refused("names the variant 'gemma_3b'.*did you mean 'gemma_2b'", paligemma_variant="gemma_3b")
    refused("nothing is known for 'right_wrist_0_rgb'", chosen=VLAOptions())
    refused("1 tensors of the model are not in its files.*state_proj.bias", left_out="model.state_proj.bias")
    small = spec_of(cameras, state=ArraySpec((3,), "float32", -1.0, 1.0))
    refused("6 state entries but the environment has 3", small)
    refused("have another shape.*action_out_proj", max_action_dim=ACTION + 1)
    with pytest.raises(UserError, match=r"a LeRobot before 0\.4"):
        pi0_public.shape_of(tmp_path, {"type": "pi0", "chunk_size": CHUNK})


# -- from nothing -----------------------------------------------------------------------------------------------------

made = partial(tiny_vla, Pi0)


def test_gradient_checkpointing_changes_no_number():
    """Nor any gradient, of the expert behind a kept prefix and of everything in front of it."""

    def gradients(again: bool, trains: Trains) -> dict[str, torch.Tensor]:
        sampler = FlowSampler(FlowSde(0.5), AllSteps(), 3)
        policy = made(VLAOptions(sampler=sampler, trains=trains, gradient_checkpointing=again))
        assert policy.network.gradient_checkpointing == again
        features = policy.encode(observations())
        out, _ = policy.act(features, {}, "sample", seeded())
        policy.log_prob(features, out.sample, out.aux).logprob.sum().backward()
        return {name: item.grad for name, item in policy.named_parameters() if item.grad is not None}

    for trains, reached in ((TrainExpert(), False), (TrainAll(), True)):
        kept, again = gradients(False, trains), gradients(True, trains)
        assert kept.keys() == again.keys() and all(torch.equal(item, again[name]) for name, item in kept.items())
        assert any(name.startswith("network.model.vlm.vision_tower.") for name in kept) == reached


def test_a_network_that_cannot_compute_activations_again_says_so():
    with pytest.raises(UserError, match=r"ToyNetwork cannot compute activations again.*lower micro_batch"):
        checkpoint_gradients(ToyNetwork(ToyShape()), True)
