"""Imitation by flow matching recovers a known conditional distribution."""

from __future__ import annotations

import pytest
import torch

from tests.toys import FlowToy, all_shown, seeded
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.training.fit import FitConfig, ImitationConfig, imitate


def demonstrations(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States [N,1] and chunks [N,1,1]: N(0.8 s, 0.1^2), except that one in four goes to N(-1, 0.05^2)."""
    generator = seeded(1)
    state = 2 * torch.rand(count, 1, generator=generator) - 1
    noise, other = torch.randn(count, 1, generator=generator), torch.rand(count, 1, generator=generator) < 0.25
    return state, torch.where(other, -1 + 0.05 * noise, 0.8 * state + 0.1 * noise)[:, None]


@pytest.fixture(scope="module")
def learnt():
    torch.manual_seed(0)
    policy, losses = FlowToy(1, FlowSampler(Ode(), AllSteps(), 20)), []
    state, chunks = demonstrations(4000)
    config = ImitationConfig(fit=FitConfig(steps=800, batch=128, lr=5e-3))
    imitate(
        policy, all_shown({"state": state}, chunks), config, seeded(2), lambda step, info: losses.append(info["loss"])
    )
    return policy, losses


@pytest.mark.parametrize("state", [-0.2, 0.4, 0.9])
def test_both_modes_have_their_place_share_and_width(learnt, state):
    out, _ = learnt[0].act({"state": torch.full((4000, 1), state)}, {}, "eval", seeded(3))
    sample = out.sample.flatten()
    split = (0.8 * state - 1) / 2
    other, main = sample[sample < split], sample[sample >= split]
    assert len(other) / 4000 == pytest.approx(0.25, abs=0.06)
    assert main.median().item() == pytest.approx(0.8 * state, abs=0.05)
    assert other.median().item() == pytest.approx(-1, abs=0.07)
    assert 0.05 < main.std() < 0.2


def test_the_loss_falls_to_that_of_the_distribution(learnt):
    """Not to 0: noise and data cannot be distinguished at every time."""
    losses = learnt[1]
    assert sum(losses[:5]) / 5 > 1 and 0.15 < sum(losses[-100:]) / 100 < 0.6


def test_every_chunk_is_drawn_with_several_noises_and_times():
    calls = []

    class Watching(FlowToy):
        def field(self, features):
            inner = super().field(features)

            def velocity(x, t):
                calls.append((features["state"].clone(), x.clone(), t.clone()))
                return inner(x, t)

            return velocity

    state, chunks = demonstrations(64)
    config = ImitationConfig(draws=3, fit=FitConfig(steps=2, batch=16))
    imitate(Watching(1), all_shown({"state": state}, chunks), config, seeded(2))
    for given, points, times in calls:
        assert len(given) == 48 and len(given.unique()) == 16  # each of the batch three times
        assert len(points.unique()) == len(times.unique()) == 48 and times.min() >= 0 and times.max() <= 1
    assert not torch.equal(calls[0][0], calls[1][0])
