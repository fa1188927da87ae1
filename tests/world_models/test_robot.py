"""State dynamics: modes, and how they are learnt and chosen."""

from __future__ import annotations

import math

import pytest
import torch

from vla_rl.training.fit import FitConfig, fit
from world_models.robot import (
    ModePrediction,
    StateDynamics,
    mixture_nll,
    sample_modes,
    select_modes,
    training_nll,
)


def test_modes_are_sampled_by_the_cumulative_normal():
    """Half of a standard normal is below 0; the second entry has the odds the other way round."""
    odds = torch.tensor([[0.5, 0.25], [0.25, 0.25], [0.25, 0.5]]).log().expand(4, 3, 2)
    noise = torch.tensor([-0.1, 0.1, 0.7, 9.0])[:, None].expand(4, 2)
    assert sample_modes(torch.zeros(4, 3, 1, 2), odds, noise).tolist() == [[0, 1], [1, 2], [2, 2], [2, 2]]


def test_every_entry_has_its_own_mode():
    """The first entry of the second candidate, the second one of the first, at both control steps."""
    modes = torch.arange(8.0).view(1, 2, 2, 2)
    assert select_modes(modes, torch.tensor([[1, 0]])).tolist() == [[[4.0, 1.0], [6.0, 3.0]]]


def test_the_likelihood_of_a_mixture_by_hand():
    """One entry, two modes at 0 and 1, standard deviation 0.5, odds 3 to 1; an entry that did not happen."""
    modes = torch.tensor([[[[0.0], [5.0]], [[1.0], [9.0]]]])
    odds = torch.tensor([[[0.75], [0.25]]]).log()
    found = mixture_nll(modes, odds, torch.zeros(1, 2, 1), torch.tensor([[1.0, 0.0]]), 0.5)
    by_hand = -math.log(0.75 + 0.25 * math.exp(-0.5 * (1.0 / 0.5) ** 2)) / 2
    torch.testing.assert_close(found, torch.tensor([by_hand]))


def test_the_likelihood_is_the_mean_over_entries():
    """As much as two robots of one entry each, on average."""
    generator = torch.Generator().manual_seed(0)
    modes, wanted = torch.randn(5, 3, 4, 2, generator=generator), torch.randn(5, 4, 2, generator=generator)
    odds, counts = torch.randn(5, 3, 2, generator=generator).log_softmax(1), torch.ones(5, 4)
    alone = [mixture_nll(modes[..., i : i + 1], odds[..., i : i + 1], wanted[..., i : i + 1], counts) for i in (0, 1)]
    torch.testing.assert_close(mixture_nll(modes, odds, wanted, counts), (alone[0] + alone[1]) / 2)


@pytest.mark.parametrize("seed", range(3))
def test_modes_are_the_two_recorded_outcomes_and_not_their_mean(seed):
    """A finger goes to 1 or stops at 0.5, a coin's toss: two modes, half and half."""
    torch.manual_seed(seed)
    motion, generator = StateDynamics(1, 1, 1, modes=2, width=32), torch.Generator().manual_seed(1)

    def coins():
        while True:
            end = 0.5 + 0.5 * torch.randint(0, 2, (64, 1, 1), generator=generator)
            yield end

    def loss(end):
        value = training_nll(*motion(torch.zeros(64, 1), torch.ones(64, 1)), end, torch.ones(64, 1)).mean()
        return value, {}

    fit(dict(motion.named_parameters()), loss, coins(), FitConfig(steps=300, lr=1e-2))
    modes, odds = motion(torch.zeros(1, 1), torch.ones(1, 1))
    torch.testing.assert_close(modes.flatten().sort().values, torch.tensor([0.5, 1.0]), atol=0.02, rtol=0.0)
    torch.testing.assert_close(odds.exp(), torch.full((1, 2, 1), 0.5), atol=0.1, rtol=0.0)


def test_the_crop_is_at_the_mean_predicted_position():
    """Two modes, three control steps of which two are known; odds 3 to 1."""
    modes = torch.tensor([[[[0.0], [4.0], [9.0]], [[0.0], [8.0], [9.0]]]])
    prediction = ModePrediction.of(modes, torch.tensor([[[0.75], [0.25]]]).log(), torch.tensor([2]))
    torch.testing.assert_close(prediction.expected_end, torch.tensor([[5.0]]))
