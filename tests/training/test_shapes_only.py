"""Code that runs for its shapes alone: masks and indices have values, and nothing large takes memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from vla_rl.training.shapes_only import META, shapes_only


def test_masks_and_indices_select_what_they_select():
    mask = np.array([[True, False, True], [False, False, True]])
    with shapes_only():
        values = torch.zeros(2, 3, 7, device=META)
        chosen = torch.as_tensor(mask, device=META)
        assert values[chosen].shape == (3, 7) and values[~chosen].shape == (3, 7)
        assert chosen.nonzero().tolist() == [[0, 0], [0, 2], [1, 2]]
        assert values[chosen.T.any(1).nonzero().flatten()[:1], 0].shape == (1, 7)
        counted = chosen.sum(-1)
        counted[0] += 5
        assert counted.tolist() == [7, 1] and int(counted.max()) == 7
        assert torch.tensor([3, 4], device=META).flip(0).cpu().numpy().tolist() == [4, 3]


def test_small_floats_of_known_numbers_are_known_and_others_are_zero():
    with shapes_only():
        reward = torch.as_tensor(np.array([1.0, 3.0], np.float32), device=META)
        assert float(reward.mean()) == 2.0 and (reward > 1.5).tolist() == [False, True]
        assert torch.where(reward > 1.5, reward, 0.0).tolist() == [0.0, 3.0]
        unknown = torch.empty(2, device=META).uniform_() * reward
        assert float(unknown.sum()) == 0.0 and unknown.isfinite().all()
        assert not (unknown != unknown).any()


def test_a_network_that_fits_no_machine_learns():
    with shapes_only():
        with torch.device(META):
            network = nn.Linear(2**20, 2**22)  # 17 TB
        optimizer = torch.optim.Adam(network.parameters())
        loss = network(torch.zeros(8, 2**20, device=META)).square().mean()
        loss.backward()
        optimizer.step()
        assert optimizer.state[network.weight]["exp_avg"].shape == network.weight.shape
        assert float(loss) == 0.0
