"""Both decodings: numbers of transformers, padding that changes nothing, a cache that changes nothing."""

from __future__ import annotations

import pytest
import torch

from tests.policies.openvla.tiny import golden_outputs, pictures, prompts, tiny, tiny_network
from vla_rl.contract.errors import UserError
from vla_rl.policies.openvla.decoding import Autoregressive, Parallel

ROWS, D = len(tiny.PROMPTS), tiny.ENTRIES


def greedy(logits, index):
    return logits.argmax(-1)


def prefixes(network, cameras, rows):
    tokens, mask = (item[rows] for item in prompts())
    return network.prefix(network.patches([item[rows] for item in pictures()[:cameras]]), tokens, mask)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_token_after_token_gives_what_transformers_gives_without_padding(rows):
    network, expected = tiny_network(), golden_outputs()
    bins, logits = Autoregressive().decode(network, prefixes(network, 1, rows), (D, D), greedy)
    assert torch.equal(bins, expected["greedy"][rows])
    torch.testing.assert_close(logits, expected["autoregressive"][rows], rtol=0, atol=1e-5)
    again = Autoregressive().logits(network, prefixes(network, 1, rows), bins, D)
    torch.testing.assert_close(again, expected["autoregressive"][rows], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_all_at_once_gives_what_transformers_gives_without_padding(rows):
    network, expected = tiny_network(), golden_outputs()["parallel"][rows]
    decoding = Parallel(tiny.ACTIONS)
    bins, logits = decoding.decode(network, prefixes(network, 2, rows), (D * tiny.ACTIONS, D), greedy)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert torch.equal(bins, expected.argmax(-1))
    executed = decoding.logits(network, prefixes(network, 2, rows), bins[:, :D], D)
    torch.testing.assert_close(executed, expected[:, :D], rtol=0, atol=1e-5)


@torch.no_grad()
def test_later_tokens_depend_on_earlier_ones_only_where_they_should():
    network = tiny_network()
    one, other = torch.tensor([[3, 4, 5]] * ROWS), torch.tensor([[3, 200, 5]] * ROWS)
    for decoding, changes in ((Autoregressive(), [False, False, True]), (Parallel(1), [False] * 3)):
        pair = [decoding.logits(network, prefixes(network, 1, [0, 1, 2]), bins, D) for bins in (one, other)]
        assert [bool((pair[0][:, k] != pair[1][:, k]).any()) for k in range(3)] == changes


def test_a_decoding_has_actions():
    for kind in (Autoregressive, Parallel):
        with pytest.raises(UserError, match="actions is 0"):
            kind(0)
