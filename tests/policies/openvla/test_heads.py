"""OpenVLA-OFT's continuous heads: numbers of its own classes, densities, losses, folders, and who takes what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.algorithms.ppo_learners import CONFIG
from tests.golden.vla.weights import weight
from tests.policies.openvla.test_public import ONE, STATISTICS, published
from tests.policies.openvla.tiny import ACTION, SPEC, observed, oft_golden, oft_observed, oft_policy, tiny, tiny_policy
from tests.toys import rollout, seeded
from vla_rl.algorithms.dppo import DPPO, DPPOConfig
from vla_rl.algorithms.ppo import PPO
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.diffusion import DiffusionSampler
from vla_rl.policies.gaussian_around import AroundConfig, GaussianAround
from vla_rl.policies.openvla.decoding import OFT_PROCESS, OFT_REVERSE, OpenVLAOptions, Parallel
from vla_rl.policies.openvla.heads import Denoising, HeadShape, Perceptron, Regression
from vla_rl.policies.openvla.policy import OpenVLA, OpenVLADiffusion, OpenVLARegression
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.options import TrainLoRA

CLOSE = {"rtol": 0, "atol": 1e-4}
L1 = (OpenVLARegression, Regression(tiny.OFT_ENTRIES, 32), "l1.")
DIFFUSION = (OpenVLADiffusion, Denoising(tiny.OFT_ENTRIES, 32), "diffusion.")


# -- what OpenVLA-OFT's own classes compute ---------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_l1_regression_gives_what_openvla_oft_gives(rows):
    """From pictures, state and instruction to the chunk, also beside prompts of other lengths."""
    policy, expected = oft_policy(*L1), oft_golden()
    features = policy.encode(oft_observed().select(rows))
    hidden = policy.config.decoding.hidden(policy.network, policy._prefix(features), 8 * 7)
    torch.testing.assert_close(hidden, expected["hidden"][rows], **CLOSE)
    out, _ = policy.act(features, {}, "eval", None)
    assert out.action.shape == (len(rows), 8, 7)
    torch.testing.assert_close(out.sample, expected["l1"][rows], **CLOSE)
    torch.testing.assert_close(out.action, expected["l1"][rows], **CLOSE)


@torch.no_grad()
def test_diffusion_predicts_the_noise_that_openvla_oft_predicts():
    policy, expected = oft_policy(*DIFFUSION), oft_golden()
    time = torch.tensor(tiny.TIMESTEPS)[:, None] / 50
    found = policy._late_network(policy.encode(oft_observed()))(expected["noisy"].flatten(1)[:, None], time)
    torch.testing.assert_close(found[:, 0], expected["predicted"].flatten(1), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("steps", [50, 10])
def test_every_step_of_diffusion_is_openvla_ofts(steps):
    """By its scheduler, from each of its own points: see ``write_oft.py``."""
    sampler = DiffusionSampler(OFT_PROCESS, OFT_REVERSE, steps, steps)
    assert OpenVLAOptions().denoising == DiffusionSampler(OFT_PROCESS, OFT_REVERSE, 50, 50)
    policy = oft_policy(*DIFFUSION, OpenVLAOptions(denoising=sampler))
    points, quiet = oft_golden()[f"chain_{steps}"].flatten(2), replace(OFT_REVERSE, eta=0.0)
    table = replace(sampler, reverse=quiet, floor=1e-9)
    mean, _ = table.gaussians(policy._late_network(policy.encode(oft_observed())), points)
    torch.testing.assert_close(mean, points[:, 1:], **CLOSE)
    for deployed, ours in zip(sampler.deployed_table[:-1], table.table[:-1], strict=True):
        assert torch.equal(deployed, ours), "so that is what is deployed"


# -- L1 regression, and a Gaussian around it --------------------------------------------------------------------------

OPTIONS = OpenVLAOptions(decoding=Parallel(3), horizon=2)
D = tiny.ENTRIES


def regression(options: OpenVLAOptions = OPTIONS) -> OpenVLARegression:
    return tiny_policy(options, kind=OpenVLARegression, head=Regression(D, 16))


def diffusion(**changes) -> OpenVLADiffusion:
    sampler = DiffusionSampler(OFT_PROCESS, OFT_REVERSE, 5, 5)
    options = replace(OPTIONS, denoising=replace(sampler, **changes), horizon=3)
    return tiny_policy(options, kind=OpenVLADiffusion, head=Denoising(D, 16))


def test_an_l1_head_explores_nothing_and_decodes_in_parallel():
    policy = regression()
    features = policy.encode(observed())
    (deployed, _), (explored, _) = (policy.act(features, {}, mode, None) for mode in ("eval", "sample"))
    assert torch.equal(deployed.action, explored.action) and not explored.logprob.any()
    assert deployed.sample.shape == (6, 2, D) and not hasattr(policy, "log_prob")
    low, high = torch.tensor(SPEC.action.low), torch.tensor(SPEC.action.high)
    physical = deployed.sample * torch.tensor(ACTION.scale) + torch.tensor(ACTION.offset)
    torch.testing.assert_close(deployed.action, physical.clamp(low, high))
    assert regression(OpenVLAOptions()).config.decoding == Parallel(8)


def test_critics_read_what_an_l1_head_reads_where_they_are_to(tmp_path):
    policy, plain = regression(replace(OPTIONS, critics="hidden")), regression()
    policy.load_state_dict(plain.state_dict())
    read = []
    policy.network.action_head.register_forward_hook(lambda _, given, __: read.append(given[0]))
    features, others = policy.encode(observed()), plain.encode(observed())
    assert not read, "the head itself does not run for critics"
    (out, _), (without, _) = policy.act(features, {}, "eval", None), plain.act(others, {}, "eval", None)
    assert torch.equal(out.action, without.action)
    torch.testing.assert_close(features["slots"], read[0].float().mean(1))
    assert policy.feature_sizes == {**plain.feature_sizes, "slots": policy.network.width} and "slots" not in others
    policy.save_pretrained(tmp_path)
    assert load_policy(tmp_path, SPEC).config.critics == "hidden"
    for kind, head in ((OpenVLA, None), (OpenVLADiffusion, Denoising(D, 16))):
        with pytest.raises(UserError, match=r"cannot read hidden states.*leave critics at 'patches'"):
            tiny_policy(replace(OPTIONS, critics="hidden"), kind=kind, head=head)
    with pytest.raises(UserError, match="critics"):
        OpenVLAOptions(critics="everything")


def test_imitation_of_an_l1_head_is_the_absolute_error():
    policy, chunks = regression(), torch.rand(6, 3, D, generator=seeded(1)) * 2 - 1
    features = policy.imitation_features(observed())
    whole = policy._chunks(features)
    losses = policy.imitation_losses(features, chunks, 2, seeded())
    torch.testing.assert_close(losses, (whole - chunks).abs().mean(-1))
    torch.testing.assert_close(policy.imitation_losses(features, chunks[:, :2], 1, seeded()), losses[:, :2])
    optimizer = torch.optim.Adam(policy.trainable().values(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        policy.imitation_losses(features, chunks, 1, seeded()).mean().backward()
        optimizer.step()
    out, _ = policy.act(policy.encode(observed()), {}, "eval", None)
    assert (out.sample - chunks[:, :2]).abs().mean() < 0.1 * losses.mean()


def test_a_gaussian_around_it_deploys_what_it_predicts_and_learns_its_std():
    around = GaussianAround(regression(), AroundConfig(0.2, "token"))
    features = around.encode(observed())
    deployed, _ = around.act(features, {}, "eval", None)
    alone, _ = around.base.act(features, {}, "eval", None)
    assert torch.equal(deployed.action, alone.action)
    out, _ = around.act(features, {}, "sample", seeded(1))
    assert out.logprob.shape == (6, 2 * D)
    away = (out.sample - deployed.sample) / 0.2
    assert 0.7 < away.std() < 1.3 and away.abs().min() > 0
    around.log_prob(features, out.sample, {}).logprob.sum().backward()
    names = around.trainable().keys()
    assert {"log_std", "base.network.action_head.model.fc2.weight"} <= names
    assert all(around.trainable()[name].grad.any() for name in ("log_std", "base.network.action_head.model.fc2.bias"))
    assert names - {"log_std"} == {f"base.{name}" for name in around.base.trainable()}


def preferred(sample: torch.Tensor) -> torch.Tensor:
    """The reward: how low the chunk's numbers are."""
    return -sample.flatten(1).mean(1)


def learnt_from(kind: type[PPO], policy, config):
    """An update by decisions for 32 observations, those decisions, and the update's metrics."""
    features = policy.encode(observed(32))
    out, _ = policy.act(features, {}, "sample", seeded(1))
    reward, both = preferred(out.sample), {name: torch.stack([item, item]) for name, item in features.items()}
    critic = ValueCritic(policy.feature_sizes, width=16)
    learner = kind(policy, policy.trainable(), critic, config, seeded())
    return features, reward, learner.update(rollout(both, out, reward[None, :, None]))


SETTINGS = {"epochs": 2, "minibatch": 16, "lr": 3e-3, "lr_bounds": (1e-5, 1e-2), "target_kl": 1.0}


def test_an_iteration_of_ppo_goes_towards_reward():
    policy = GaussianAround(regression(), AroundConfig(0.3, "action"))
    features, reward, metrics = learnt_from(PPO, policy, replace(CONFIG, **SETTINGS))
    assert metrics["policy/logprob_gap"] <= 1e-4
    again, _ = policy.act(features, {}, "sample", seeded(1))
    assert preferred(again.sample).mean() > reward.mean() + 0.01


def test_dppo_takes_a_diffusion_head():
    policy = diffusion()
    before = policy.network.noisy_action_projector.fc1.weight.clone()
    _, _, metrics = learnt_from(DPPO, policy, DPPOConfig(**{**SETTINGS, "epochs": 1, "critic_warmup": 0}))
    assert metrics["policy/logprob_gap"] <= 1e-4
    assert not torch.equal(policy.network.noisy_action_projector.fc1.weight, before)


def test_what_an_l1_head_cannot_do_is_said_with_the_cure():
    policy = regression()
    with pytest.raises(
        UserError, match=r"log_prob and kl but OpenVLARegression .* openvla_oft.py:gaussian_ppo .*residual"
    ):
        PPO(policy, policy.trainable(), ValueCritic(policy.feature_sizes, width=16), CONFIG, seeded())
    with pytest.raises(UserError, match=r"needs a policy with predicted but OpenVLA lacks it.*L1 regression head"):
        GaussianAround(tiny_policy(OPTIONS))
    with pytest.raises(UserError, match=r"set denoising.fine_tuned to denoising.steps"):
        diffusion(fine_tuned=2)
    policy = diffusion()
    features = policy.imitation_features(observed())
    with pytest.raises(ContractError, match="denoises 3 actions together and 2 are to be imitated"):
        policy.imitation_losses(features, torch.zeros(6, 2, D), 1, seeded())
    with pytest.raises(ContractError, match="makes actions of 4 numbers and those of 'tiny' have 3"):
        tiny_policy(OPTIONS, kind=OpenVLARegression, head=Regression(4, 16))


@pytest.mark.full
def test_imitation_of_a_diffusion_head_takes_the_chunk_to_its_actions():
    policy, chunks = diffusion(), torch.rand(6, 3, D, generator=seeded(1)) * 2 - 1
    features = policy.imitation_features(observed())
    optimizer, losses = torch.optim.Adam(policy.trainable().values(), lr=3e-3), []
    for step in range(80):
        optimizer.zero_grad()
        found = policy.imitation_losses(features, chunks, 2, seeded(step))
        assert found.shape == (6, 3)
        found.mean().backward()
        optimizer.step()
        losses.append(float(found.mean()))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


# -- folders ----------------------------------------------------------------------------------------------------------


def with_parts(folder: Path, head: HeadShape, prefix: str = "module.") -> Path:
    """A published folder with OFT's files for ``head`` and the state, converted."""
    parts = {"proprio_projector": Perceptron(2, 32, 32), **head.parts(32)}
    for part, module in parts.items():
        tensors = {
            prefix + name: torch.from_numpy(weight(f"{part}.{name}", tuple(item.shape)))
            for name, item in module.state_dict().items()
        }
        save_file(tensors, folder / f"{part}--150000_checkpoint.safetensors")
    return folder


PROPRIO = {"libero": {"action": STATISTICS, "proprio": {"q01": [-1.0, -1.0], "q99": [1.0, 1.0]}}}


@pytest.fixture
def folder(tmp_path) -> Path:
    return published(tmp_path / "it", norm_stats=PROPRIO)


@pytest.mark.parametrize(
    ("head", "kind"),
    [(Regression(3, 32), OpenVLARegression), (Denoising(3, 24), OpenVLADiffusion)],
    ids=["L1", "diffusion"],
)
def test_a_folder_is_opened_by_the_head_that_it_has(folder, tmp_path, head, kind):
    """LoRA, as the config's: adapters, the head and the state's projector are what a checkpoint of ours holds."""
    with_parts(folder, head)
    sampler = DiffusionSampler(OFT_PROCESS, OFT_REVERSE, 5, 5)
    policy = load_policy(folder, ONE, OpenVLAOptions(trains=TrainLoRA(rank=2), dtype="bfloat16", denoising=sampler))
    assert type(policy) is kind and policy.network.shape.head == head and policy.horizon == 8
    saved = load_file(folder / "action_head--150000_checkpoint.safetensors")
    own = policy.network.action_head.state_dict()
    assert own.keys() == {name.removeprefix("module.") for name in saved}
    assert all(torch.equal(own[name.removeprefix("module.")], item) for name, item in saved.items())
    trained = {name.split(".")[1] for name in policy.trainable()}
    assert trained == {"language_model", "proprio_projector", *head.parts(32)}
    with torch.no_grad():
        for item in policy.trainable().values():
            item.add_(0.01 * torch.randn(item.shape, generator=seeded(1)))
    policy.save_pretrained(tmp_path / "ours")
    again = load_policy(tmp_path / "ours", ONE)
    obs = replace(observed(), task=observed().task % 2)
    one, other = (each.act(each.encode(obs), {}, "sample", seeded(2))[0] for each in (policy, again))
    assert type(again) is kind and torch.equal(one.action, other.action) and one.action.shape == (6, 8, 3)


def spoilt(name: str, tensors: dict[str, torch.Tensor]) -> Callable[[Path], object]:
    return lambda folder: save_file(tensors, folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "action_head--1_checkpoint.pt").touch(), "action_head--1_checkpoint.pt' is a pickle"),
        (lambda f: (with_parts(f, Denoising(3, 16)) / "noisy_action_projector--150000_checkpoint.safetensors").unlink(),
         "noisy_action_projector' does not hold the tensors"),
        (lambda f: spoilt("action_head--2", {"model.fc2.bias": torch.zeros(3)})(with_parts(f, Regression(3, 16))),
         "has action_head--150000_checkpoint.safetensors and action_head--2.safetensors"),
        (spoilt("action_head--1", {"model.fc9.bias": torch.zeros(3)}), "neither an L1 regression nor a diffusion head"),
        (spoilt("action_head--1", {f"model.fc{n}.bias": torch.zeros(3) for n in (1, 2)}), "not hold .* action_head"),
        (lambda f: (f / "vision_backbone--1_checkpoint.pt").touch(), r"\(FiLM, vision_backbone--1_checkpoint.pt\)"),
    ],
    ids=["pickle", "no projector", "two heads", "other head", "part of a head", "FiLM"],
)  # fmt: skip
def test_what_is_missing_or_not_supported_is_named(folder, damage, sentence):
    damage(folder)
    with pytest.raises(UserError, match=sentence):
        load_policy(folder, ONE)
