"""A policy whose decisions depend on its own state, such as a residual, drives an arm as it acts elsewhere."""

from __future__ import annotations

import numpy as np
import torch

from robot_drivers.record import Query
from robot_drivers.simulated import SimulatedRobot
from vla_rl.contract.env import Observation
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.residual import DeterministicResidual
from vla_rl.recipes.robots.drive import PolicyDecider

OPTIONS = {"image_size": 16}
SPEC = SimulatedRobot(options=OPTIONS).env_spec
MIDDLE = (np.asarray(SPEC.action.low) + np.asarray(SPEC.action.high)) / 2


def counting(obs: Observation) -> np.ndarray:
    """[E,3,D]: a little beside the middle, by the clock when it was chosen and the number in the chunk."""
    number = np.asarray(obs.time)[:, None] + 0.1 * np.arange(3)
    return (MIDDLE + 0.001 * number[..., None] * np.ones_like(MIDDLE)).astype(np.float32)


class OfState:
    """The features are the joints alone."""

    spec = SPEC

    def __init__(self) -> None:
        self.feature_sizes = {"state": SPEC.state.shape[0]}

    def encode(self, obs: Observation) -> dict[str, torch.Tensor]:
        return {"state": torch.as_tensor(obs.state)}


def query(time: int, consumed: int | None) -> Query:
    state = np.broadcast_to(MIDDLE, (1, *SPEC.state.shape)).astype(np.float32)
    pictures = {name: np.zeros((1, *image.shape), np.uint8) for name, image in SPEC.images.items()}
    return Query(Observation(pictures, state, np.zeros(1, np.int64), np.array([time])), time, consumed, 0)


def test_a_residual_follows_its_bases_chunk_on_an_arm() -> None:
    policy = DeterministicResidual(FunctionPolicy(SPEC, counting), OfState())  # type: ignore[arg-type]
    decide = PolicyDecider(policy, torch.Generator())
    asked = [(0, None), (1, 1), (2, 1), (3, 1), (4, None), (5, 1)]
    chunks = np.stack([decide(query(*one)).chunk for one in asked])
    assert chunks.shape == (6, 1, SPEC.action_dim)
    wanted = np.array([0, 0.1, 0.2, 3, 4, 4.1])  # the base chose at 0, 3 and, after an intervention, at 4
    np.testing.assert_allclose((chunks[:, 0] - MIDDLE) / 0.001, wanted[:, None] * np.ones_like(MIDDLE), atol=1e-2)
