"""The diffusion policy: steps are those of diffusers, densities of torch, the score gradient is the true one."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sims.catalog import make
from tests.chains import SAMPLERS, compare, draw, network, weights
from tests.toys import ToyEncoder, endless, seeded
from vla_rl.contract.check import check_policy
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import LikelihoodPolicy
from vla_rl.policies.diffusion import (
    Ddim,
    Ddpm,
    DiffusionConfig,
    DiffusionPolicy,
    DiffusionSampler,
    Process,
    denoising_errors,
    step_logprob,
)
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.pretrained import WEIGHTS
from vla_rl.training.fit import FitConfig, ImitationConfig, imitate

BATCH, HORIZON = 16, 3
ENV = make("counting", num_envs=BATCH)
TERMS = HORIZON * ENV.spec.action_dim
EPSILON = Process(prediction="epsilon")
POLICIES = {
    "ddim": DiffusionSampler(),
    "ddim, last two": DiffusionSampler(Process(), Ddim(0.5), 5, 2, 0.05),
    "ddpm, last ten": DiffusionSampler(Process(), Ddpm(), 20, 10),
    "epsilon": DiffusionSampler(EPSILON, Ddim(), 5, 5),
}


def made(sampler: DiffusionSampler | None = None) -> DiffusionPolicy:
    torch.manual_seed(0)
    sizes = TinyConfig(queries=2, condition=16, width=16, blocks=1)
    encoder = TinyVLA(ENV.spec, Vocabulary.from_texts(ENV.spec.tasks), Affine.from_bounds(ENV.spec.state), sizes)
    config = DiffusionConfig(HORIZON, condition=16, width=32, blocks=1, sampler=sampler or DiffusionSampler())
    return DiffusionPolicy(encoder, config).eval()


def features(policy: DiffusionPolicy) -> dict[str, torch.Tensor]:
    return policy.encode(ENV.reset(np.arange(BATCH), np.arange(BATCH)))


# -- the steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "clip"), [(5, 0.5), (20, 100.0)])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("reverse", [Ddim(0.0), Ddim(0.6), Ddim(1.0), Ddim(0.6, False), Ddpm()], ids=str)
def test_chains_are_those_of_diffusers(reverse, prediction, clip, steps):
    """Point by point from the same noise, by diffusers' own ``step``, whose betas are only made float64 before."""
    spacing = "trailing" if reverse.use_clipped_model_output else "leading"
    process, net = Process(prediction=prediction, clip=clip, spacing=spacing), network(weights())
    noise = torch.randn(500, 2, generator=seeded(), dtype=torch.float64)
    sampler = DiffusionSampler(process, reverse, steps, steps, floor=1e-10)  # DDPM's own is 1e-10
    points, mean, std = sampler.sample(net, net, noise, seeded(1))
    scheduler, x, generator = reverse.scheduler(process), noise, seeded(1)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.set_timesteps(steps)
    first = 19 if spacing == "trailing" else 20 - 20 // steps
    assert int(scheduler.timesteps[0]) == first and len(scheduler.timesteps) == steps
    settings = {"eta", "use_clipped_model_output"} if isinstance(reverse, Ddim) else set()
    more = {name: getattr(reverse, name) for name in settings}
    for k, t in enumerate(scheduler.timesteps):
        torch.testing.assert_close(points[:, k], x, rtol=0, atol=1e-8)
        output = net(x[:, None], torch.full((500, 1), float(t) / 20, dtype=torch.float64))[:, 0]
        x = scheduler.step(output, t, x, generator=generator, **more).prev_sample
    torch.testing.assert_close(points[:, -1], x, rtol=0, atol=1e-8)
    xi = (points[:, 1:] - mean) / std
    assert xi.std(0).sub(1).abs().max() < 0.15  # that is the noise that was added


@pytest.mark.parametrize("reverse", [Ddim(1.0), Ddpm()], ids=str)
def test_what_is_deployed_has_no_noise_or_no_floor(reverse):
    sampler, net = DiffusionSampler(Process(), reverse, 5, 2, floor=0.3), network(weights())
    noise = torch.randn(500, 2, generator=seeded(), dtype=torch.float64)
    quiet = replace(sampler, floor=1e-12, reverse=Ddim(0.0) if isinstance(reverse, Ddim) else reverse)
    expected, _, _ = quiet.sample(net, net, noise, seeded(1))
    found = sampler.deployed(net, net, noise, seeded(1))
    torch.testing.assert_close(found, expected[:, -1], rtol=0, atol=1e-10)
    repeats = torch.equal(found, sampler.deployed(net, net, noise, seeded(2)))
    assert repeats == isinstance(reverse, Ddim)


def test_the_floor_lifts_every_std_and_leaves_the_means():
    for reverse in (Ddim(0.3), Ddpm()):
        low, high = (DiffusionSampler(Process(), reverse, 5, 5, floor) for floor in (1e-9, 0.3))
        assert torch.equal(high.table.std, low.table.std.clamp_min(0.3)) and high.table.std[-1] == 0.3
        assert all(torch.equal(a, b) for a, b in zip(low.table[:-1], high.table[:-1], strict=True))


def test_less_noise_scales_what_is_ours_to_choose():
    assert DiffusionSampler(floor=0.2).scaled(0.5) == DiffusionSampler(reverse=Ddim(0.5), floor=0.1)
    assert DiffusionSampler(reverse=Ddpm(), floor=0.2).scaled(0.5) == DiffusionSampler(reverse=Ddpm(), floor=0.1)
    assert from_json(json.loads(json.dumps(to_json(POLICIES["ddpm, last ten"])))) == POLICIES["ddpm, last ten"]


# -- densities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", POLICIES.values(), ids=POLICIES)
def test_fine_tuned_steps_are_recorded_and_end_in_the_sample(sampler):
    policy = made(sampler)
    out, _ = policy.act(features(policy), {}, "sample", seeded(1))
    assert out.aux["points"].shape == (BATCH, sampler.fine_tuned + 1, TERMS)
    assert torch.equal(out.sample.flatten(1), out.aux["points"][:, -1])


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_score_gradient_is_the_true_one(sampler, monkeypatch):
    drawn, theta = draw(sampler, monkeypatch), weights().requires_grad_()
    total = step_logprob(drawn.points[:, 1:], *sampler.gaussians(network(theta), drawn.points)).sum(1)
    (score,) = torch.autograd.grad((drawn.advantage * total).mean(), theta)
    cosine, norm = compare(score, drawn.gradient)
    assert cosine >= 0.999 and norm == pytest.approx(1, abs=0.02)


def test_a_noiseless_last_step_is_rejected(monkeypatch):
    """Without its part the gradient is another one: hence the floor."""
    drawn, theta = draw(SAMPLERS["ddim"], monkeypatch), weights().requires_grad_()
    steps = step_logprob(drawn.points[:, 1:], *SAMPLERS["ddim"].gaussians(network(theta), drawn.points))
    (score,) = torch.autograd.grad((drawn.advantage * steps[:, :-1].sum(1)).mean(), theta)
    assert compare(score, drawn.gradient)[1] < 0.95


# -- the policy -------------------------------------------------------------------------------------------------------


def test_it_keeps_the_contract():
    assert isinstance(made(), LikelihoodPolicy) and len(check_policy(made(), ENV, seeded())) == 3


def test_samples_are_raw_and_actions_physical_and_within_bounds():
    policy = made(DiffusionSampler(floor=2.0))
    out, _ = policy.act(features(policy), {}, "sample", seeded(1))
    assert out.action.shape == out.sample.shape == (BATCH, HORIZON, ENV.spec.action_dim)
    assert out.sample.abs().max() > 1.5
    low, high = torch.tensor(ENV.spec.action.low), torch.tensor(ENV.spec.action.high)
    expected = torch.maximum(torch.minimum(low + (out.sample + 1) / 2 * (high - low), high), low)
    torch.testing.assert_close(out.action, expected)


def test_it_acts_on_features_of_an_encoder_that_stays_frozen():
    policy = made()
    kept = features(policy)
    other = {**kept, "image_features": kept["image_features"].flip(0)}
    one, two = (policy.act(item, {}, "eval", seeded(1))[0].action for item in (kept, other))
    assert not torch.allclose(one, two)
    encoded = policy.encoder.encode_with_grad(ENV.reset([], []))
    assert all(torch.equal(value, encoded[key]) for key, value in kept.items())
    out, _ = policy.act(kept, {}, "sample", seeded(1))
    policy.log_prob(kept, out.sample, out.aux).logprob.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.trainable().values())
    assert all(p.grad is None for p in policy.encoder.parameters())
    assert policy.trainable().keys() == {
        name for name, _ in policy.named_parameters() if not name.startswith("encoder.")
    }


def test_the_first_steps_keep_the_network_of_imitation():
    policy = made().with_sampler(POLICIES["ddim, last two"])
    kept = features(policy)
    before, _ = policy.act(kept, {}, "sample", seeded(1))
    assert not any(".early." in name for name in policy.trainable())
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(3)))
    policy.with_sampler(policy.config.sampler.scaled(1.0))  # which does not copy again
    after, _ = policy.act(kept, {}, "sample", seeded(1))
    assert torch.equal(before.aux["points"][:, 0], after.aux["points"][:, 0])
    assert not torch.equal(before.aux["points"][:, 1], after.aux["points"][:, 1])
    whole = made().with_sampler(replace(POLICIES["ddim, last two"], fine_tuned=5)).act(kept, {}, "sample", seeded(1))[0]
    torch.testing.assert_close(whole.sample, before.sample)  # nothing else changes


def test_deployed_first_steps_are_those_of_imitation():
    sampler = replace(POLICIES["ddim, last two"], floor=1e-9, reverse=Ddim(0.0))  # explores without noise, too
    policy = made().with_sampler(sampler)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(3)))
    kept = features(policy)
    deployed, explored = (policy.act(kept, {}, mode, seeded(1))[0].sample for mode in ("eval", "sample"))
    torch.testing.assert_close(deployed, explored)
    policy.heads["early"] = policy.heads["late"]
    assert not torch.allclose(deployed, policy.act(kept, {}, "eval", seeded(1))[0].sample)


def test_noise_falls_with_the_progress_of_the_run():
    sampler = DiffusionSampler(floor=0.2)
    policy = made(sampler).with_sampler(sampler, final_noise=0.5)
    assert policy.sampler == sampler
    policy.set_progress(0.5)
    assert policy.sampler == sampler.scaled(0.75) and policy.config.sampler == sampler
    kept = features(policy)
    out, _ = policy.act(kept, {}, "sample", seeded(1))
    assert policy.log_prob(kept, out.sample, out.aux).params["std"].min() == pytest.approx(0.15)


def test_a_checkpoint_holds_no_encoder_and_another_may_have_more_tasks(tmp_path):
    policy = made(DiffusionSampler(fine_tuned=5)).with_sampler(POLICIES["ddim, last two"])
    policy.save_pretrained(tmp_path / "it")
    assert not any("encoder" in name for name in load_file(tmp_path / "it" / WEIGHTS))
    assert EnvSpec.from_json(read_config(tmp_path / "it")["spec"]) == ENV.spec  # what inspect shows
    kept = features(policy)
    for restored in (load_policy(tmp_path / "it"), copy.deepcopy(policy)):
        one, two = (p.act(kept, {}, "eval", seeded(3))[0] for p in (policy, restored))
        assert torch.equal(one.action, two.action)
    grown = replace(ENV.spec, tasks=(*ENV.spec.tasks, ENV.spec.tasks[0]))
    assert DiffusionPolicy.from_pretrained(tmp_path / "it", grown).spec == grown


# -- imitation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_loss_is_that_of_the_cosine_schedule_by_hand(prediction):
    """Its alphas are products of 1 - beta, beta = 1 - f(i+1)/f(i), f(i) = cos^2((i/20 + .008) / 1.008 * pi/2)."""
    process = Process(prediction=prediction)
    f = [math.cos((i / 20 + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(21)]
    x0, noise = (torch.randn(19, 4, generator=seeded(i), dtype=torch.float64) for i in (0, 1))
    alpha = torch.tensor(f[1:20], dtype=torch.float64)[:, None] / f[0]  # the last timestep's beta is capped
    calls = []

    def net(x, t):
        calls.append((x, t))
        return torch.zeros_like(x)

    scheduler = Ddim().scheduler(process)
    loss = denoising_errors(process, net, x0, noise, torch.arange(19), scheduler)
    wanted = noise if prediction == "epsilon" else alpha.sqrt() * noise - (1 - alpha).sqrt() * x0
    torch.testing.assert_close(loss, wanted.square(), rtol=1e-4, atol=0)
    torch.testing.assert_close(calls[0][0][:, 0], alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise, rtol=0, atol=1e-4)
    torch.testing.assert_close(calls[0][1][:, 0], torch.arange(19, dtype=torch.float64) / 20)


def test_every_chunk_has_several_noises_and_all_timesteps():
    torch.manual_seed(0)
    policy, calls = DiffusionPolicy(ToyEncoder(), DiffusionConfig(1, condition=8, width=8, blocks=1)), []
    policy._late_network = lambda given: lambda x, t: (calls.append((given["state"], x, t)), torch.zeros_like(x))[1]
    state = torch.randn(50, 1, generator=seeded())
    policy.imitation_losses({"state": state}, torch.zeros(50, 1, 2), 8, seeded(1))
    given, points, times = calls[0]
    assert torch.equal(given, state.repeat(8, 1)) and len(points.unique()) == 800
    assert sorted({round(20 * t) for t in times.flatten().tolist()}) == list(range(20))


def demonstrations(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States [N,1] and chunks [N,1,2]: (.6 s, .1 wide) and (-.8 or .8, .05 wide)."""
    state, noise = 2 * torch.rand(count, 1, generator=seeded(1)) - 1, torch.randn(count, 2, generator=seeded(2))
    side = torch.where(torch.rand(count, 1, generator=seeded(3)) < 0.25, -0.8, 0.8)
    return state, torch.cat([0.6 * state + 0.1 * noise[:, :1], side + 0.05 * noise[:, 1:]], 1)[:, None]


@pytest.mark.full
def test_imitation_recovers_a_known_distribution():
    torch.manual_seed(0)
    policy = DiffusionPolicy(ToyEncoder(), DiffusionConfig(1, condition=16, width=64, blocks=2))
    state, chunks = demonstrations(4000)
    config = ImitationConfig(fit=FitConfig(steps=600, batch=128, lr=5e-3))
    imitate(policy, endless({"state": state}, chunks), config, seeded(2))
    policy.with_sampler(DiffusionSampler(Process(), Ddpm(), 20, 20))
    for position in (-0.7, 0.5):
        out, _ = policy.act({"state": torch.full((4000, 1), position)}, {}, "eval", seeded(3))
        first, second = out.sample[:, 0].unbind(1)
        assert first.mean().item() == pytest.approx(0.6 * position, abs=0.04) and 0.06 < first.std() < 0.15
        assert (second < 0).float().mean().item() == pytest.approx(0.25, abs=0.06)
        for side in (-0.8, 0.8):
            mode = second[second.sign() == math.copysign(1, side)]
            assert mode.median().item() == pytest.approx(side, abs=0.06) and mode.std() < 0.15


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_it", "why"),
    [
        (lambda: DiffusionSampler(fine_tuned=6), "6 of 5 denoising steps"),
        (lambda: DiffusionSampler(fine_tuned=0), "0 of 5 denoising steps"),
        (lambda: DiffusionSampler(steps=6), "6 steps do not divide the 20 timesteps"),
        (lambda: DiffusionSampler(steps=40), "40 steps do not divide"),
        (lambda: DiffusionSampler(floor=0.0), "set it above 0"),
        (lambda: Ddim(1.5), "eta is 1.5"),
        (
            lambda: DiffusionPolicy(FunctionPolicy(ENV.spec, lambda obs: obs.state)),
            "FunctionPolicy has no feature_sizes",
        ),
        (lambda: made().with_sampler(POLICIES["epsilon"]), "keep the process"),
        (lambda: made(POLICIES["ddim, last two"]).with_sampler(DiffusionSampler()), "last 2 of 5 steps"),
        (
            lambda: made(POLICIES["ddim, last two"]).imitation_losses({}, torch.zeros(1, 3, 1), 1, seeded()),
            "imitation would not change those",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make_it, why):
    with pytest.raises(UserError, match=why) as caught:
        make_it()
    assert str(caught.value).count(". ") == 0
