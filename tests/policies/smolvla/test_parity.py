"""SmolVLA computes what LeRobot's own computes: ``tests/golden/vla/smolvla`` holds that and the script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.vla.smolvla.cases import CAMERAS, CASES, FENCE, TIMES, VLM, inputs
from tests.golden.vla.weights import generator, weight
from vla_rl.policies.flow import AllSteps, Field, FlowSampler, Ode
from vla_rl.policies.smolvla.network import UNUSED, SmolVLANetwork
from vla_rl.policies.smolvla.shape import SmolVLAShape

EXPECTED = Path(__file__).parents[2] / "golden" / "vla" / "smolvla" / "expected.npz"
EXACT = [name for name, case in CASES.items() if not case.bfloat16]


def network_of(name: str) -> SmolVLANetwork:
    case = CASES[name]
    shape = SmolVLAShape.from_lerobot(case.config, VLM)
    if shape.picture_start:  # the real tokens are beyond the small vocabulary
        shape = replace(shape, picture_start=FENCE, picture_end=FENCE[:1])
    network = shape.build().eval().requires_grad_(False)
    for key, tensor in network.state_dict().items():
        tensor.copy_(torch.from_numpy(weight(key, tensor.shape)))
    if case.bfloat16:
        network.model["vlm_with_expert"]["vlm"].to(torch.bfloat16)
    return network


def padded(array: np.ndarray, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(torch.from_numpy(array), (0, size - array.shape[-1]))


def conditioned(name: str, network: SmolVLANetwork) -> dict[str, torch.Tensor]:
    given = inputs(name, generator(name))
    pictures = [*(torch.from_numpy(given[camera]) for camera in CAMERAS), *[None] * CASES[name].missing]
    prefix = network.encode(pictures, torch.from_numpy(given["tokens"]), torch.from_numpy(given["mask"]))
    return network.condition(prefix, padded(given["state"], network.state_size))


def computed(name: str) -> dict[str, np.ndarray]:
    network, given = network_of(name), inputs(name, generator(name))
    condition, noise = conditioned(name, network), torch.from_numpy(given["noise"])
    batch = len(noise)

    def field(x: torch.Tensor, t: torch.Tensor) -> Field:
        velocity, _ = network.velocity(condition, x.reshape(noise.shape), t.flatten())
        return Field(velocity.reshape(x.shape), torch.zeros_like(x))

    sample = FlowSampler(Ode(), AllSteps(), steps=10).deterministic(field, noise.flatten(1))
    time = torch.from_numpy(given["time"])
    action = padded(given["action"], network.action_size)
    point = time[:, None, None] * noise + (1 - time[:, None, None]) * action
    loss = (network.velocity(condition, point, time)[0] - (noise - action)).square().mean((1, 2))
    velocity = [network.velocity(condition, noise, torch.full((batch,), t))[0] for t in TIMES]
    return {
        "velocity": torch.stack(velocity).numpy(),
        "sample": sample.reshape(noise.shape).numpy(),
        "loss": loss.numpy(),
    }


@pytest.mark.parametrize("name", EXACT)
def test_velocity_sample_and_loss_are_those_of_lerobot(name: str) -> None:
    with np.load(EXPECTED) as expected:
        for key, found in computed(name).items():
            assert np.abs(found - expected[f"{name}/{key}"]).max() <= 1e-4, key


def test_in_bfloat16_the_difference_is_that_of_rounding() -> None:
    """A bfloat16 number has 8 bits: with velocities of size 1, two orders of the same sums differ by less than 0.05."""
    with np.load(EXPECTED) as expected:
        for key, found in computed("bfloat16").items():
            assert np.abs(found - expected[f"bfloat16/{key}"]).max() <= 0.05, key
    prefix = conditioned("bfloat16", network_of("bfloat16"))
    assert prefix["0.cache"].dtype == torch.float32, "the expert is exact"


def test_every_tensor_has_lerobots_name_and_shape() -> None:
    ours = [f"{name} {'x'.join(map(str, item.shape))}" for name, item in network_of("one row").state_dict().items()]
    with np.load(EXPECTED) as expected:
        theirs = [item for item in expected["tensors"].tolist() if item.split()[0] not in UNUSED]
        assert sorted(ours) == theirs and len(theirs) < len(expected["tensors"])
