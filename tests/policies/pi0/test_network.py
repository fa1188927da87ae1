"""pi0's network against transformers' own, in this process and by golden numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.vla.pi0.cases import ACTION, CASES, CHUNK, SIDE, STATE, STEPS, TIMES, VOCABULARY, inputs
from tests.golden.vla.weights import weight
from vla_rl.policies.flow import AllSteps, Field, FlowSampler, Ode, flow_matching_errors
from vla_rl.policies.pi0.network import Gemma, Pi0Network, Pi0Shape, Siglip

SHAPE = Pi0Shape(
    vision=Siglip(24, 40, 2, 2, patch_size=14, image_size=SIDE),
    language=Gemma(32, 48, 2, 4, 1, head_dim=16, vocab_size=VOCABULARY),
    expert_hidden_size=24,
    expert_intermediate_size=40,
    chunk=CHUNK,
    action_size=ACTION,
    state_size=STATE,
    time_dtype="float32",
)
GOLDEN = np.load(Path(__file__).parents[2] / "golden/vla/pi0/expected.npz")
PADDED = "padded prompts and a missing camera"
ONE_CASE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != PADDED)) for name in CASES]
)


@pytest.fixture
def network() -> Pi0Network:
    return made()


def made() -> Pi0Network:
    built = SHAPE.build().eval()
    with torch.no_grad():
        for name, item in built.named_parameters():
            item.copy_(torch.from_numpy(weight(name, item.shape)))
    return built


def tensors(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(item) for key, item in inputs(CASES[name]).items()}


def seen(network: Pi0Network, name: str, rows: slice = slice(None), length: int | None = None):
    """The prefix of a case, of some of its rows, with prompts cut after ``length`` tokens."""
    given, case = tensors(name), CASES[name]
    pairs = zip(case.cameras, given["pictures"], strict=True)
    pictures = [picture[rows] if there else None for there, picture in pairs]
    return network.encode(pictures, given["tokens"][rows, :length], given["mask"][rows, :length])


def field_of(network: Pi0Network, name: str):
    """The velocity field that a sampler integrates, with the case's prefix and state."""
    condition = network.condition(seen(network, name), tensors(name)["state"])

    def field(x: torch.Tensor, t: torch.Tensor) -> Field:
        found, _ = network.velocity(condition, x.reshape(-1, CHUNK, ACTION), t.flatten())
        return Field(found.reshape(x.shape), torch.zeros(()))

    return field


@torch.no_grad()
def outputs(name: str, network: Pi0Network) -> dict[str, torch.Tensor]:
    given, field = tensors(name), field_of(network, name)
    noise, shape = given["noise"].flatten(1), given["noise"].shape
    sampler = FlowSampler(Ode(), AllSteps(), steps=STEPS)
    velocity = [field(noise, torch.full((len(noise),), time)).velocity.reshape(shape) for time in TIMES]
    return {
        "sample": sampler.deterministic(field, noise).reshape(shape),
        "velocity": torch.stack(velocity),
        "loss": flow_matching_errors(field, given["actions"].flatten(1), noise, given["time"]).mean(),
    }


@pytest.mark.parametrize("name", CASES)
def test_samples_velocities_and_losses_are_the_golden_ones(network, name):
    """Within 5e-4: the kernels of another processor round differently, by 1e-4 in a sample."""
    for key, found in outputs(name, network).items():
        np.testing.assert_allclose(found, GOLDEN[f"{name}/{key}"], atol=5e-4, rtol=0, err_msg=key)


@ONE_CASE
def test_they_are_those_of_the_installed_transformers(network, name):
    """Within 3e-4 of samples near 5: AVX2 kernels sum padded rows in another order, and steps enlarge that to 7e-5."""
    from tests.golden.vla.pi0 import theirs

    expected = theirs.outputs(name, theirs.model())
    for key, found in outputs(name, network).items():
        torch.testing.assert_close(found, expected[key], atol=3e-4, rtol=0, msg=lambda text, key=key: f"{key}: {text}")


def test_names_and_shapes_are_transformers_own(network):
    from tests.golden.vla.pi0 import theirs

    expected = {name: item.shape for name, item in theirs.model().state_dict().items()}
    assert expected.pop("model.dit.embed_tokens.weight")
    assert {name: item.shape for name, item in network.state_dict().items()} == expected


def test_a_frozen_model_in_bfloat16_leaves_the_expert_exact(network):
    """Only the prefix is rounded: the velocity is that of a float32 network behind the same prefix."""
    for name, item in network.named_parameters():
        if name not in network.expert_parameters():
            item.data = item.data.bfloat16()
    given = tensors(PADDED)
    prefix = seen(network, PADDED)
    found, _ = network.velocity(network.condition(prefix, given["state"]), given["noise"], given["time"])
    same = {name: item if item.dtype == torch.bool else item.float() for name, item in prefix.items()}
    expected, _ = made().velocity(network.condition(same, given["state"]), given["noise"], given["time"])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert found.dtype == torch.float32


def test_a_step_leaves_the_condition_as_it_is(network):
    given = tensors(PADDED)
    condition = network.condition(seen(network, PADDED), given["state"])
    before = {name: item.clone() for name, item in condition.items()}
    first, second = (network.velocity(condition, given["noise"], given["time"])[0] for _ in range(2))
    assert torch.equal(first, second) and condition.keys() == before.keys()
    assert all(torch.equal(item, condition[name]) for name, item in before.items())


def test_pooled_is_the_mean_of_the_valid_last_hidden_states(network):
    from tests.golden.vla.pi0 import theirs

    given, model = theirs.given(PADDED), theirs.model().model
    embedded = model.embed_prefix(given["input_ids"], given["pixel_values"], given["pixel_attention_mask"])
    mask = given["attention_mask"]
    hidden = model.vlm(
        inputs_embeds=embedded,
        attention_mask=mask,
        position_ids=mask.cumsum(-1) - 1,
        token_type_ids=torch.zeros_like(mask),
    ).last_hidden_state
    expected = torch.stack([item[valid.bool()].mean(0) for item, valid in zip(hidden, mask, strict=True)])
    torch.testing.assert_close(seen(network, PADDED)["pooled"], expected, atol=1e-5, rtol=0)


def test_activations_are_computed_again_where_that_is_asked_for(network):
    given, calls = tensors(PADDED), []
    with torch.no_grad():
        condition = network.condition(seen(network, PADDED), given["state"])
    network.model.dit.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    for network.gradient_checkpointing, expected in ((False, 1), (True, 2)):
        calls.clear()
        network.velocity(condition, given["noise"], given["time"])[0].sum().backward()
        assert len(calls) == expected


def test_the_default_sizes_are_those_of_the_public_checkpoints():
    """Without data: 3.2 billion numbers, of which 315 million are the expert's; a prefix of 816 tokens takes 30 MB."""
    with torch.device("meta"):
        network = Pi0Shape().build()
    expert = sum(item.numel() for item in network.expert_parameters().values())
    everything = sum(item.numel() for item in network.parameters())
    assert (everything, expert, network.prefix_bytes(("a", "b", "c"), 48)) == (3_238_048_528, 314_713_120, 30_090_032)
