"""OpenVLA as a policy: exact densities of its tokens, what it keeps, what it executes, what it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from tests.algorithms.ppo_learners import CONFIG
from tests.elsewhere import elsewhere
from tests.policies.openvla.tiny import SPEC, observed, tiny, tiny_policy
from tests.toys import rollout, seeded
from vla_rl.algorithms.ppo import PPO
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.openvla.decoding import Autoregressive, OpenVLAOptions, Parallel
from vla_rl.policies.openvla.policy import OpenVLA
from vla_rl.policies.vla.options import TrainAll, TrainExpert

ROWS, D = 6, tiny.ENTRIES
IN_TURN, AT_ONCE = OpenVLAOptions(decoding=Autoregressive(2)), OpenVLAOptions(decoding=Parallel(3), horizon=2)
BOTH = pytest.mark.parametrize("options", [IN_TURN, AT_ONCE], ids=["autoregressive", "parallel"])


def rows(features, index):
    return {name: item[index] for name, item in features.items()}


def wide(features):
    return {name: item.double() if item.is_floating_point() else item for name, item in features.items()}


# -- densities --------------------------------------------------------------------------------------------------------


@BOTH
def test_parts_of_the_likelihood_sum_to_the_chunk(options):
    whole, parts = (
        tiny_policy(options),
        {per: tiny_policy(replace(options, logprob_per=per)) for per in ("action", "token")},
    )
    features = whole.encode(observed())
    out, _ = whole.act(features, {}, "sample", seeded(1))
    for per, size in (("action", 2), ("token", 2 * D)):
        acted, _ = parts[per].act(features, {}, "sample", seeded(1))
        learnt = parts[per].log_prob(features, out.sample, {}).logprob
        assert acted.logprob.shape == learnt.shape == (ROWS, size) and torch.equal(acted.sample, out.sample)
        torch.testing.assert_close(learnt, acted.logprob, rtol=0, atol=1e-5)
        torch.testing.assert_close(learnt.sum(1), out.logprob, rtol=0, atol=1e-5)


def few_bins(options: OpenVLAOptions) -> OpenVLA:
    """A policy with two entries of three bins: nine chunks in all, of one action."""
    policy = tiny_policy(replace(options, horizon=1))
    policy.network.shape = replace(policy.network.shape, bins=3)
    policy.spec = replace(SPEC, action=replace(SPEC.action, shape=(2,), low=-1, high=1))
    policy.action_scale = type(policy.action_scale)((0.0, 0.0), (1.0, 1.0))
    policy.action_low, policy.action_high = -torch.ones(2), torch.ones(2)
    return policy.double()


CHUNKS = torch.cartesian_prod(torch.arange(3), torch.arange(3))


def by_hand(policy: OpenVLA, features, row: int) -> torch.Tensor:
    """The probability of each of the nine chunks for one observation, by the whole language model without any cache."""
    prefix, model = policy._prefix(rows(features, [row])), policy.network.language_model
    words, found = prefix.embeddings[0][prefix.mask[0]], []
    last = policy.network.words - 1
    for first, second in CHUNKS.tolist():
        if isinstance(policy.config.decoding, Autoregressive):
            logits = model(
                inputs_embeds=torch.cat([words, policy.network.embed(torch.tensor([last - first]))])[None]
            ).logits
            pair = logits[0, -2:]
        else:
            count = policy.config.decoding.actions * 2
            ends = torch.cat([words, torch.zeros(count, 32), policy.network.embed(torch.tensor([2]))])[None]
            everything = torch.zeros(1, 1, ends.shape[1], ends.shape[1], dtype=ends.dtype)
            pair = model(inputs_embeds=ends, attention_mask=everything).logits[0, len(words) - 1 : len(words) + 1]
        law = (pair[:, [last, last - 1, last - 2]] / policy.config.temperature).softmax(-1)
        found.append(law[0, first] * law[1, second])
    return torch.stack(found)


@BOTH
def test_probabilities_and_score_gradient_are_those_enumerated(options):
    policy = few_bins(replace(options, temperature=0.7))
    features, reward = wide(policy.encode(observed(2))), torch.linspace(-1, 2, 9).double() ** 2
    weights = [
        policy.network.language_model.lm_head.weight,
        policy.network.language_model.model.layers[0].mlp.up_proj.weight,
    ]
    for row in range(2):
        each = rows(features, [row] * 9)
        logprob = policy.log_prob(each, CHUNKS[:, None], {}).logprob
        expected = by_hand(policy, features, row)
        torch.testing.assert_close(expected.sum(), torch.ones((), dtype=torch.float64))
        torch.testing.assert_close(logprob.exp(), expected)
        score = torch.autograd.grad((expected.detach() * reward * logprob).sum(), weights)
        true = torch.autograd.grad((expected * reward).sum(), weights)
        for one, other in zip(score, true, strict=True):
            assert other.norm() > 1e-4
            assert torch.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.999
            assert one.norm() / other.norm() == pytest.approx(1, abs=0.02)


# -- decisions --------------------------------------------------------------------------------------------------------


@BOTH
def test_what_is_deployed_is_greedy_token_by_token(options):
    policy = tiny_policy(options)
    features = policy.encode(observed())
    out, _ = policy.act(features, {}, "eval", None)
    params = policy.log_prob(features, out.sample, {}).params
    assert torch.equal(params["log_probs"].argmax(-1), out.sample.flatten(1)) and not out.logprob.any()


def test_bins_are_openvlas():
    """256 edges, 255 middles: bin i is [edge_i, edge_i+1), and the highest action is the highest bin, 255."""
    policy, edges = tiny_policy(IN_TURN), np.linspace(-1, 1, 256)
    values = torch.tensor([-1.5, -1.0, -0.9999, 0.0, 0.3, 0.9999, 1.0, 2.0])
    expected = np.digitize(np.clip(values.numpy(), -1, 1), edges) - 1
    assert policy.bins(values).tolist() == expected.tolist() and expected[-1] == 255
    index = torch.tensor([0, 1, 127, 254, 255]).repeat(tiny.ENTRIES, 1).T
    middles = (edges[:-1] + edges[1:]) / 2
    normalized = torch.tensor(middles[[0, 1, 127, 254, 254]], dtype=torch.float32)
    unbounded = replace(SPEC, action=replace(SPEC.action, low=-100, high=100))
    wide_open = tiny_policy(IN_TURN, action=unbounded.action)
    physical = normalized[:, None] * torch.tensor([0.5, 1.0, 3.0]) + torch.tensor([0.1, 2.0, 0.0])
    torch.testing.assert_close(wide_open.actions(index), physical)
    assert policy.actions(index)[0].tolist() == [pytest.approx(-0.398, abs=1e-3), pytest.approx(1.004, abs=1e-3), -2.0]


def test_it_keeps_patches_or_pictures_whichever_are_smaller():
    patches, pictures = tiny_policy(IN_TURN), tiny_policy(replace(IN_TURN, kept="pictures"))
    a, b = patches.encode(observed()), pictures.encode(observed())
    assert a.keys() == {"prefix/patches", "pooled", "task", "state", "time"}
    assert b.keys() == {"picture/front", "pooled", "task", "state", "time"}
    assert a["pooled"].shape == (ROWS, patches.feature_sizes["pooled"]) and torch.equal(a["pooled"], b["pooled"])
    calls: list[int] = []
    pictures.network.vision_backbone.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(*(p.act(f, {}, "eval", None)[0].action for p, f in ((patches, a), (pictures, b))))
    assert not calls, "what was encoded is acted on"
    assert torch.equal(pictures.act(b, {}, "eval", None)[0].action, pictures.act(b, {}, "eval", None)[0].action)
    assert len(calls) == 2, "a decision takes it away"
    assert patches.network.prefix_bytes(("front",), 7) == 4 * 32 * 4 < tiny.SIDE**2 * 3
    small = {"front": replace(SPEC.images["front"], shape=(8, 8, 3))}  # 192 bytes
    assert "KeepPictures" in repr(tiny_policy(IN_TURN, images=small).kept)
    assert "KeepPictures" in repr(tiny_policy(replace(IN_TURN, trains=TrainAll())).kept)
    with pytest.raises(UserError, match="TrainAll changes the vision model, so kept patches"):
        tiny_policy(replace(IN_TURN, trains=TrainAll(), kept="prefix"))


@BOTH
def test_gradients_reach_what_is_trained(options):
    for trains, everything in ((TrainExpert(), False), (TrainAll(), True)):
        policy = tiny_policy(replace(options, trains=trains))
        features = policy.encode(observed())
        out, _ = policy.act(features, {}, "sample", seeded(1))
        policy.log_prob(features, out.sample, {}).logprob.sum().backward()
        reached = {name for name, item in policy.named_parameters() if item.grad is not None and item.grad.any()}
        assert reached <= policy.trainable().keys()
        assert any(name.startswith("network.language_model.model.layers.0.") for name in reached)
        assert any(name.startswith("network.vision_backbone.featurizer.blocks.0.") for name in reached) == everything


@BOTH
def test_computing_layers_again_changes_no_number(options):
    found = {}
    for again in (False, True):
        policy, runs = tiny_policy(replace(options, gradient_checkpointing=again)), []
        assert policy.network.gradient_checkpointing == again
        layer = policy.network.language_model.model.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        features = policy.encode(observed())
        out, _ = policy.act(features, {}, "sample", seeded(1))
        runs.clear()
        policy.log_prob(features, out.sample, {}).logprob.sum().backward()
        found[again] = out.sample, layer.mlp.up_proj.weight.grad
        assert len(runs) == 1 + again
    for one, other in zip(found[False], found[True], strict=True):
        assert torch.equal(one, other)


def test_every_task_has_its_own_prompt_and_every_camera_is_seen():
    policy, obs = tiny_policy(AT_ONCE, ("front", "wrist")), observed()
    first, _ = policy.act(policy.encode(obs), {}, "eval", None)
    other, _ = policy.act(policy.encode(replace(obs, task=(obs.task + 1) % 3)), {}, "eval", None)
    dark = replace(obs, images={**obs.images, "wrist": 0 * obs.images["wrist"]})
    blind, _ = policy.act(policy.encode(dark), {}, "eval", None)
    for changed in (other, blind):
        assert (changed.sample != first.sample).any()


# -- learning ---------------------------------------------------------------------------------------------------------


@BOTH
def test_imitation_is_the_cross_entropy_of_the_bins(options):
    policy = tiny_policy(replace(options, temperature=2.0))
    features = policy.imitation_features(observed())
    chunks = torch.rand(ROWS, policy.chunk_length, D, generator=seeded(1)) * 2 - 1
    bins = policy.bins(chunks).flatten(1)
    logits = policy.config.decoding.logits(policy.network, policy._prefix(features), bins, D)
    loss = policy.imitation_losses(features, chunks, 2, seeded()).mean()
    torch.testing.assert_close(loss, -Categorical(logits=logits).log_prob(bins).mean())
    optimizer = torch.optim.Adam(policy.trainable().values(), lr=2e-2)
    for _ in range(30):
        optimizer.zero_grad()
        policy.imitation_losses(features, chunks, 1, seeded()).mean().backward()
        optimizer.step()
    out, _ = policy.act(policy.encode(observed()), {}, "eval", None)
    target = policy.bins(chunks)[:, : policy.horizon]
    assert ((out.sample - target).abs() <= 1).float().mean() > 0.9


def test_imitation_takes_a_dataset_on_the_host_to_the_weights():
    chunks = torch.rand(ROWS, 2, D, generator=seeded(1)) * 2 - 1
    here, there = tiny_policy(IN_TURN), tiny_policy(IN_TURN)
    expected = here.imitation_losses(here.imitation_features(observed()), chunks, 1, seeded()).mean()
    with elsewhere() as device:
        there.to(device)
        found = there.imitation_losses(there.imitation_features(observed()), chunks.to(device), 1, seeded()).mean()
        assert found.device == device
        torch.testing.assert_close(found.cpu(), expected)


def preferred(bins: torch.Tensor) -> torch.Tensor:
    """The reward: how low the chunk's bins are."""
    return 1.0 - bins.flatten(1).float().mean(1) / 255


@pytest.mark.parametrize(("options", "per"), [(IN_TURN, "token"), (AT_ONCE, "action")], ids=["in-turn", "at-once"])
def test_an_iteration_of_ppo_goes_towards_reward(options, per):
    policy = tiny_policy(replace(options, logprob_per=per))
    features = policy.encode(observed(32))
    out, _ = policy.act(features, {}, "sample", seeded(1))
    reward = preferred(out.sample)
    both = {name: torch.stack([item, item]) for name, item in features.items()}
    settings = {"epochs": 2, "minibatch": 16, "lr": 3e-3, "lr_bounds": (1e-5, 1e-2), "target_kl": 1.0}
    critic = ValueCritic(policy.feature_sizes, width=16)
    learner = PPO(policy, policy.trainable(), critic, replace(CONFIG, **settings), seeded())
    metrics = learner.update(rollout(both, out, reward[None, :, None]))
    assert metrics["policy/logprob_gap"] <= 1e-5 * math.sqrt(2 * D)
    again, _ = policy.act(features, {}, "sample", seeded(1))
    assert preferred(again.sample).mean() > reward.mean() + 0.01


# -- checkpoints and errors -------------------------------------------------------------------------------------------


def test_the_state_is_read_where_there_is_a_projector_for_it():
    network = tiny_policy(AT_ONCE).network
    assert not hasattr(network, "proprio_projector")
    reading = type(network)(replace(network.shape, state=2)).eval()
    assert {name for name in reading.state_dict() if "proprio" in name} == {
        f"proprio_projector.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")
    }
    tokens, mask = torch.tensor([[1, 5]]), torch.ones(1, 2, dtype=torch.bool)
    patches, state = torch.zeros(1, 4, 32), torch.ones(1, 2)
    prefix = reading.prefix(patches, tokens, mask, state)
    layers = reading.proprio_projector
    expected = layers.fc2(torch.nn.functional.gelu(layers.fc1(state)))
    torch.testing.assert_close(prefix.embeddings[:, 5], expected)
    with pytest.raises(ContractError, match="reads the state, which is missing"):
        reading.prefix(patches, tokens, mask)
