"""What a network is given: instructions as numbers, physical units as normalised ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sims.catalog import make
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError
from vla_rl.policies.normalization import Affine, action_limits, check_same_env
from vla_rl.policies.tokens import Vocabulary

TEXTS = ("pick up the red cube", "Put the cube down!")


def test_words_are_numbered_in_order_and_zero_is_padding():
    vocabulary = Vocabulary.from_texts(TEXTS, length=6)
    assert vocabulary.words == ("cube", "down", "pick", "put", "red", "the", "up")
    assert vocabulary.encode(TEXTS).tolist() == [[3, 7, 6, 5, 1, 0], [4, 6, 1, 2, 0, 0]]
    assert Vocabulary.from_texts(reversed(TEXTS), length=6) == vocabulary


@pytest.mark.parametrize(("text", "why"), [("pick up the green cube", "'green'"), ("cube " * 7, "too long")])
def test_what_cannot_be_read_is_refused(text, why):
    with pytest.raises(ContractError, match=why):
        Vocabulary.from_texts(TEXTS, length=6).encode([text])


def test_the_longest_instruction_decides_the_length():
    vocabulary = Vocabulary.from_texts(["the " * 30 + "cube"], length=6)
    assert vocabulary.length == 31 and vocabulary.encode(["cube"]).shape == (1, 31)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hebe den ROTEN Würfel auf!", ("auf", "den", "hebe", "roten", "würfel")),
        ("подними красный куб", ("красный", "куб", "подними")),
        ("拿起红色方块", ("块", "拿", "方", "红", "色", "起")),
        ("ブロックを取る", ("を", "ク", "ッ", "ブ", "ロ", "取", "る")),
        ("लाल घन उठाओ", ("उठाओ", "घन", "लाल")),
        ("pick_up the ２nd-cube", ("2nd", "cube", "pick", "the", "up")),
        ("", ()),
    ],
)
def test_instructions_of_any_script_are_read(text, words):
    vocabulary = Vocabulary.from_texts([text])
    assert sorted(vocabulary.words) == sorted(words)
    assert (vocabulary.encode([text]) > 0).sum() == len(words)


def test_bounds_become_one():
    affine = Affine.from_bounds(ArraySpec((2,), "float32", (-0.03, 0.0), (0.03, 4.0)))
    bounds = torch.tensor([[-0.03, 0.0], [0.0, 2.0], [0.03, 4.0]])
    torch.testing.assert_close(affine.normalize(bounds), torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]]))
    torch.testing.assert_close(affine.unnormalize(affine.normalize(bounds)), bounds)
    with pytest.raises(ContractError, match="entry 1"):
        Affine.from_bounds(ArraySpec((2,), "float32", 0.0, (1.0, 0.0)))


def test_data_becomes_standard_and_a_constant_stays_finite():
    values = torch.randn(500, 4, 3, generator=torch.Generator().manual_seed(0)) * 7 + 100
    values[..., 2] = 5.0
    normalized = Affine.from_data(values).normalize(values).reshape(-1, 3)
    torch.testing.assert_close(normalized.mean(0), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(normalized.std(0), torch.tensor([1.0, 1.0, 0.0]), rtol=0, atol=1e-4)


def test_a_policy_is_refused_another_environment():
    spec = make("counting", num_envs=1).spec
    check_same_env(spec, replace(spec, tasks=(*spec.tasks, "a later one"), name="renamed", time_limit=99))
    slower = replace(spec, control_dt=0.2)
    wider = replace(spec, action=replace(spec.action, high=(65.0, 7.0)))
    mixed = replace(spec, tasks=spec.tasks[::-1])
    for given, part in [
        (slower, "control_dt"),
        (wider, "action"),
        (mixed, "task table"),
        (replace(spec, images={}), "images"),
    ]:
        with pytest.raises(ContractError, match=part):
            check_same_env(spec, given)
    low, high = action_limits(spec)
    assert low.tolist() == [-64, 0] and high.tolist() == [64, 2**20]
