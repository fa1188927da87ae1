"""pi0.5 against LeRobot's own, by golden numbers and prompts; what it shares with pi0 is tested there and with all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tests.golden.vla.pi0.cases import (
    ACTION,
    CHUNK,
    LEROBOT_CAMERAS,
    LEROBOT_MISSING,
    LEROBOT_STATES,
    LEROBOT_TASKS,
    STATE,
    TIMES,
    lerobot_inputs,
)
from tests.policies.pi0.test_policy import FOUR, LEROBOT, small_variants, write_lerobot
from tests.policies.test_tiny import observations
from tests.policies.vla.public_folders import robot_spec
from tests.policies.vla.tiny_vlas import tiny_vla
from vla_rl.contract.errors import UserError
from vla_rl.policies.pi05.policy import Pi05, StatePrompts, StateViews
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.features import Views
from vla_rl.policies.vla.inference import CudaGraph, Fused, Graphs
from vla_rl.policies.vla.options import VLAOptions

GOLDEN = np.load(LEROBOT.with_name("lerobot_pi05.npz"))
WORDS = [
    "?",
    "<pad>",
    "<bos>",
    "Task:",
    "State:",
    ";",
    "Action:",
    "\n",
    ",",
    "-",
    "lift",
    "the",
    "cube",
    "open",
    "it",
    " ",
]
CAMERAS = {camera.rpartition(".")[2]: size for camera, size in LEROBOT_CAMERAS.items()}
OPTIONS = VLAOptions(sampler=FOUR, cameras={LEROBOT_MISSING: ""})
PROCESSOR = "pi05_prepare_state_tokenizer_processor_step"
assert small_variants  # a fixture


def digits(joined: bool = False) -> Tokenizer:
    """Words, and every digit by itself as in PaliGemma's; ``joined``: two numbers beside each other are one token."""
    words = [*WORDS, *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    pairs = [pre_tokenizers.Split(Regex(r"\d+ \d+"), "isolated")] * joined
    single = [] if joined else [pre_tokenizers.Digits(individual_digits=True)]
    parts = [pre_tokenizers.Split(text, "isolated") for text in (",", ";", "\n", "-", " ")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pairs, *([] if joined else parts), *single])
    return tokenizer


def public(folder: Path, **changes: Any) -> Path:
    modes = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    given = {"type": "pi05", "normalization_mapping": modes, "tokenizer_max_length": 200, **changes}
    place = write_lerobot(folder, golden=LEROBOT.with_name("lerobot_pi05.npz"), **given)
    low, high = np.linspace(-3.0, -1.0, STATE), np.linspace(1.0, 4.0, STATE)
    ends = {
        "observation.state": {"q01": low, "q99": high},
        "action": {"q01": low[:1].repeat(ACTION), "q99": high[:1].repeat(ACTION)},
    }
    saved = {name: {key: item.tolist() for key, item in numbers.items()} for name, numbers in ends.items()}
    (place / "meta" / "stats.json").write_text(json.dumps(saved))
    digits().save(str(place / "tokenizer.json"))
    return place


@pytest.mark.parametrize("name", ["one row", "padded prompts"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_network_is_that_of_lerobot(tmp_path, small_variants, name, fused):
    """A missing camera, prompts of different length: velocities and samples; operation by operation, and as it acts."""
    policy, given = (
        Pi05.from_public(public(tmp_path / "policy"), robot_spec((STATE, ACTION), CAMERAS), OPTIONS),
        lerobot_inputs(name),
    )
    tensors = {key: torch.from_numpy(item) for key, item in given.items()}
    network = Fused(policy.network) if fused else policy.network
    with torch.no_grad():
        pictures = [tensors[camera] for camera in LEROBOT_CAMERAS]
        prefix = network.encode([*pictures, None], tensors["tokens"], tensors["mask"])
        condition = network.condition(prefix, tensors["state"])
        for time, velocity in zip(TIMES, GOLDEN[f"{name}/velocity"], strict=True):
            t = torch.full((len(velocity),), time)
            found, _ = network.velocity(condition, tensors["noise"], t)
            assert np.abs(found.numpy() - velocity).max() < 1e-4  # LeRobot's own sums, on another processor

        def field(x, t):
            return policy._field_behind(prefix, tensors["state"], network)(x, t)

        end = policy.sampler.deterministic(field, tensors["noise"].flatten(1)).reshape(-1, CHUNK, ACTION)
    assert np.abs(end.numpy() - GOLDEN[f"{name}/sample"]).max() < 1e-4


# -- prompts -----------------------------------------------------------------------------------------------------------


def opened(tmp_path: Path, **changes: Any) -> Pi05:
    spec = robot_spec((4, ACTION), CAMERAS, tasks=LEROBOT_TASKS)
    return Pi05.from_public(public(tmp_path / "policy", **changes), spec, OPTIONS)


def test_a_prompt_has_the_tokens_of_what_lerobot_writes(tmp_path):
    """Edges of bins, states beyond them, instructions that are tidied up; positions count what is not a gap."""
    tokenizer = digits()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = StatePrompts.of_tokenizer(str(tmp_path), "", 200).learn(LEROBOT_TASKS)
    (tmp_path / "tokenizer.json").unlink()  # what is known needs none
    tokens, mask = prompts.encode(LEROBOT_TASKS)
    views = StateViews(Views((), tokens, mask), prompts)
    found, shown = views.prompt({"task": torch.arange(3), "state": torch.tensor(LEROBOT_STATES)})
    for row, counted, text in zip(found, shown, GOLDEN["prompts"].tolist(), strict=True):
        expected = [tokenizer.token_to_id("<bos>"), *tokenizer.encode(text).ids]
        assert row[counted].tolist() == expected and tokenizer.token_to_id("?") not in expected
    assert found.shape[1] == tokens.shape[1] + prompts.longest(4)
    prompts.save_pretrained(tmp_path / "prompts")
    saved = StatePrompts.from_pretrained(tmp_path / "prompts")
    assert (saved.numbers, saved.tail) == (prompts.numbers, prompts.tail)
    assert torch.equal(saved.encode(LEROBOT_TASKS)[0], tokens)


def test_a_tokenizer_that_joins_numbers_is_refused(tmp_path):
    digits(joined=True).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"joins numbers of a state.*another prompt than pi0\.5 was trained on"):
        StatePrompts.of_tokenizer(str(tmp_path), "", 200)


def test_what_does_not_fit_is_one_sentence(tmp_path, small_variants):
    spec = robot_spec((STATE, ACTION), CAMERAS)
    with pytest.raises(UserError, match=r"6 numbers may take 39 tokens, but .* at most 38, so the end would be lost"):
        Pi05.from_public(public(tmp_path / "short", tokenizer_max_length=38), spec, OPTIONS)
    place = public(tmp_path / "steps")
    steps = [{"registry_name": "tokenizer_processor", "config": {}}, {"registry_name": PROCESSOR, "config": {}}]
    for given, message in ((steps, "'tokenizer_processor'"), (steps[:1], "no step.*writes no state into its prompts")):
        (place / "policy_preprocessor.json").write_text(json.dumps({"name": "x", "steps": given}))
        with pytest.raises(UserError, match=message):
            Pi05.from_public(place, spec, OPTIONS)


# -- as a policy -------------------------------------------------------------------------------------------------------


def test_the_state_is_read_in_the_prompt_alone(tmp_path, small_variants):
    """So another state changes the prefix, and one within the same bin changes nothing."""
    policy = tiny_vla(Pi05)
    obs = observations()
    policy.kept = type(policy.kept)()
    first = policy.encode(obs)
    obs.state[0] += 1e-5
    same = policy.encode(obs)
    obs.state[0] += 0.5
    other = policy.encode(obs)
    cache = [item["prefix/cache"] for item in (first, same, other)]
    assert torch.equal(cache[0], cache[1]) and not torch.equal(cache[0][0], cache[2][0])
    assert torch.equal(cache[0][1:], cache[2][1:])


@pytest.mark.parametrize("kept", ["prefix", "pictures"])
def test_it_acts_recorded_and_saved_as_it_is(tmp_path, kept):
    policy, obs = tiny_vla(Pi05, VLAOptions(sampler=FOUR, kept=kept)), observations()
    policy.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy", policy.spec)
    recorded = tiny_vla(Pi05, VLAOptions(sampler=FOUR, kept=kept, inference=CudaGraph()))
    calls = []

    def record(call):
        outputs = call()
        calls.append(call)

        def replay():
            for name, item in call().items():
                outputs[name].copy_(item)

        return replay, outputs

    recorded._acting = Graphs(Fused(recorded.network), record)
    acted = [
        one.act(one.encode(obs), {}, "sample", torch.Generator().manual_seed(3))[0] for one in (policy, again, recorded)
    ]
    assert torch.equal(acted[0].action, acted[1].action) and torch.equal(acted[0].logprob, acted[1].logprob)
    torch.testing.assert_close(acted[2].action, acted[0].action, atol=1e-5, rtol=0)
    assert len(calls) == 2  # an observation and a decision
