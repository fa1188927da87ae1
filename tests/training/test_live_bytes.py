"""What counts as alive: storages, once each, until nobody holds them any more."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from vla_rl.training.shapes_only import LiveBytes, bytes_of


def test_views_count_once_and_what_is_freed_counts_no_more():
    with LiveBytes() as live:
        whole = torch.zeros(1000)
        part = whole[:10].view(2, 5)
        assert live.now == 4000
        other = whole + 1.0
        assert live.now == 8000
        del whole, other
        assert live.now == 4000  # the view holds it all
        del part
        assert live.now == 0 and live.peak == 8000


def test_what_came_before_counts_from_its_first_use():
    weight, other, array = torch.zeros(500), torch.zeros(300), np.zeros(250, np.float32)
    with LiveBytes() as live:
        assert live.now == 0
        shared = torch.as_tensor(array)
        product = weight[:250] * shared
        assert live.now == 4 * (500 + 250 + 250)
        del product, shared
        assert live.now == 4 * 500
        float(other.sum())  # which is read, and no part of the result
        assert live.now == 4 * (500 + 300)


def test_activations_are_alive_until_the_backward_pass():
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(10, 1000), nn.Tanh(), nn.Linear(1000, 10)) for _ in range(5)])
    given = torch.zeros(200, 10)
    with LiveBytes() as live:
        loss = layers(given).sum()
        kept = live.now - bytes_of([*layers.parameters(), given])
        assert 5 * 200 * 1000 * 4 <= kept < 1.1 * 5 * 200 * 1000 * 4
        loss.backward()
        assert live.now == bytes_of([*layers.parameters(), *(p.grad for p in layers.parameters()), given, loss])


def test_a_watched_block_has_a_peak_of_its_own():
    notes = []
    with LiveBytes() as live:
        kept = torch.zeros(250)
        with live.watch(lambda before, peak: notes.append((before, peak))):
            torch.zeros(1000)
        with live.watch(lambda before, peak: notes.append((before, peak))):
            torch.zeros(500)
    assert notes == [(1000, 5000), (1000, 3000)] and live.peak == 5000 and len(kept)
