"""SmolVLA computes what LeRobot's own computes: ``tests/golden/vla/smolvla`` holds that and the script."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.golden.vla.smolvla.cases import ACTION, CAMERAS, CASES, FENCE, TIMES, VLM, inputs
from tests.golden.vla.weights import generator, weight
from tests.policies.vla.public_folders import write
from vla_rl.policies.flow import AllSteps, Field, FlowSampler, Ode
from vla_rl.policies.smolvla.network import UNUSED, SmolVLANetwork
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.checkpoint import read_public

EXPECTED = Path(__file__).parents[2] / "golden" / "vla" / "smolvla" / "expected.npz"
ADAPTER = EXPECTED.parents[1] / "adapter"  # of "one row"
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


def computed(name: str, network: SmolVLANetwork | None = None) -> dict[str, np.ndarray]:
    network, given = network or network_of(name), inputs(name, generator(name))
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


def test_an_adapter_of_peft_makes_of_its_base_what_it_does_in_lerobot(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", shutil.copytree(ADAPTER, tmp_path / "adapter")
    base.mkdir()
    save_file(network_of("one row").state_dict(), base / "model.safetensors")
    config = json.loads((ADAPTER / "adapter_config.json").read_text(encoding="utf-8"))
    write(folder / "adapter_config.json", config | {"base_model_name_or_path": str(base)})
    network = SmolVLAShape.from_lerobot(read_public(folder).config, VLM).build().eval().requires_grad_(False)
    network.load_public(folder)
    found = computed("one row", network)
    with np.load(ADAPTER / "expected.npz") as expected, np.load(EXPECTED) as alone:
        assert np.abs(found["sample"][..., :ACTION] - expected["sample"]).max() <= 1e-4
        assert np.abs(found["sample"] - alone["one row/sample"]).max() > 0.1, "the adapter changes it"


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
