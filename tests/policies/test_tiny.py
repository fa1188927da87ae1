"""The small VLA: the same density when acting and when learning, faithful checkpoints, and nothing privileged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.toys import seeded
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.policies.flow import (
    AllSteps,
    FlowCps,
    FlowDdim,
    FlowNoise,
    FlowOu,
    FlowSampler,
    FlowSde,
    LastStep,
    LastStepFromNoise,
    OneRandomStep,
)
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.pretrained import CONFIG, WEIGHTS, save_folder

BATCH, HORIZON = 16, 3
CAMERA = ArraySpec((16, 16, 3), "uint8", 0, 255, frame="front")
SPEC = EnvSpec(
    name="made up",
    images={"front": CAMERA, "wrist": replace(CAMERA, frame="wrist")},
    state=ArraySpec((3,), "float32", -1.0, 1.0),
    action=ArraySpec((2,), "float32", (-0.1, 0.0), (0.1, 5.0)),
    tasks=("pick up the red cube", "push the cube"),
    control_dt=0.1,
    time_limit=20,
    max_chunk=8,
)
SCHEDULES = [FlowSde(0.5), FlowOu(0.5, 0.05), FlowDdim(0.5, 0.05), FlowCps(0.5, 0.05), FlowNoise()]
NOISE_PLACEMENTS = [AllSteps(), OneRandomStep(), LastStep(), LastStepFromNoise()]
name = lambda value: type(value).__name__  # noqa: E731


def made(sampler: FlowSampler | None = None, spec: EnvSpec = SPEC, n_obs_steps: int = 1) -> TinyVLA:
    torch.manual_seed(0)
    sizes = TinyConfig(HORIZON, queries=2, condition=16, width=32, blocks=1, n_obs_steps=n_obs_steps)
    config = replace(sizes, sampler=sampler) if sampler else sizes
    policy = TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine((0.1, 0.0, -0.1), (0.5, 1.0, 2.0)), config)
    for parameter in policy.expert.parameters():  # its noise head begins at zero
        torch.nn.init.normal_(parameter, std=0.3)
    return policy.eval()


def observations(count: int = BATCH, seed: int = 0, **extras: np.ndarray) -> Observation:
    rng = np.random.default_rng(seed)
    images = {camera: rng.integers(0, 256, (count, 16, 16, 3), np.uint8) for camera in SPEC.images}
    state = rng.uniform(-1, 1, (count, 3)).astype(np.float32)
    return Observation(images, state, rng.integers(0, 2, count), rng.integers(0, 20, count), extras)


def outputs(policy: TinyVLA, obs: Observation) -> torch.Tensor:
    return policy.act(policy.encode(obs), {}, "eval", seeded())[0].action


# -- densities --------------------------------------------------------------------------------------------------------


def test_gradients_reach_all_but_the_backbone():
    policy = made(FlowSampler(FlowNoise(), AllSteps(), 4))
    policy.backbone.requires_grad_(False)
    features = policy.encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded(1))
    policy.log_prob(features, out.sample, out.aux).logprob.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.trainable().values())
    assert all(p.grad is None for p in policy.backbone.parameters())
    assert {f"backbone.{key}" for key, _ in policy.backbone.named_parameters()} | policy.trainable().keys() == {
        key for key, _ in policy.named_parameters()
    }


def test_samples_are_raw_and_actions_physical_and_within_bounds():
    policy = made(FlowSampler(FlowSde(0.5), AllSteps(), 4))
    out, _ = policy.act(policy.encode(observations()), {}, "sample", seeded(1))
    assert out.sample.abs().max() > 1  # something had to be clipped
    physical = out.sample * torch.tensor([0.1, 2.5]) + torch.tensor([0.0, 2.5])
    low, high = torch.tensor([-0.1, 0.0]), torch.tensor([0.1, 5.0])
    torch.testing.assert_close(out.action, physical.clamp(low, high))


def test_what_is_deployed_is_the_ode_and_has_no_density():
    policy = made(FlowSampler(FlowNoise(), AllSteps(), 4))
    features = policy.encode(observations())
    out, _ = policy.act(features, {}, "eval", seeded(1))
    other, _ = policy.with_sampler(FlowSampler(FlowSde(0.9), LastStep(), 4)).act(features, {}, "eval", seeded(1))
    assert torch.equal(out.sample, other.sample) and not out.logprob.any() and not out.aux


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_temperature_is_of_the_noise_of_deployed_actions(tmp_path, temperature):
    policy = made().with_temperature(temperature)
    features, noise = policy.encode(observations()), made().initial_noise(BATCH, seeded(1))
    deployed = policy.act(features, {}, "eval", seeded(1))[0].sample
    expected = policy.sampler.deterministic(policy.field(features), temperature * noise)
    assert torch.equal(deployed.flatten(1), expected)
    policy.save_pretrained(tmp_path / "checkpoint")
    assert load_policy(tmp_path / "checkpoint", SPEC).config.sampler.temperature == temperature


def test_exploring_starts_from_all_noise_at_any_temperature():
    sampler, features = FlowSampler(FlowSde(0.5), AllSteps(), 4), made().encode(observations())
    cool = made(replace(sampler, temperature=0.0)).act(features, {}, "sample", seeded(1))[0]
    assert torch.equal(cool.sample, made(sampler).act(features, {}, "sample", seeded(1))[0].sample)


# -- what it reads ----------------------------------------------------------------------------------------------------


def test_nothing_privileged_is_read():
    policy, plain = made(), observations()
    poison = np.full((BATCH, 3), np.nan, np.float32)
    for extras in ({"privileged/cubes": poison}, {"privileged/state": poison, "force": poison}):
        assert torch.equal(outputs(policy, replace(plain, extras=extras)), outputs(policy, plain))


@pytest.mark.parametrize("part", ["front", "wrist", "state", "task"])
def test_everything_else_is_read(part):
    policy, plain = made(), observations()
    if part in plain.images:
        other = replace(plain, images={**plain.images, part: 255 - plain.images[part]})
    else:
        other = replace(plain, **{part: 1 - getattr(plain, part)})
    assert (outputs(policy, other) - outputs(policy, plain)).abs().amax((1, 2)).min() > 1e-7


def test_the_clock_is_kept_for_critics_and_not_read():
    policy, plain = made(), observations()
    later = replace(plain, time=np.full(BATCH, 20))
    assert torch.equal(outputs(policy, later), outputs(policy, plain))
    assert (policy.encode(later)["time"] == 1).all()


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    policy = made(FlowSampler(FlowOu(0.7, 0.05), OneRandomStep(), 5))
    policy.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint", policy


def test_a_checkpoint_restores_the_same_policy(saved):
    folder, policy = saved
    for restored in (TinyVLA.from_pretrained(folder), TinyVLA.from_pretrained(folder, SPEC), load_policy(folder)):
        assert torch.equal(outputs(restored, observations()), outputs(policy, observations()))
        assert (restored.config, restored.spec, restored.vocabulary) == (policy.config, policy.spec, policy.vocabulary)
        features = policy.encode(observations())
        one, two = (p.act(features, {}, "sample", seeded(3))[0] for p in (policy, restored))
        assert torch.equal(one.sample, two.sample) and torch.equal(one.logprob, two.logprob)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([CONFIG, WEIGHTS])


def test_a_new_task_of_known_words_is_welcome(saved):
    folder, policy = saved
    longer = replace(SPEC, tasks=(*SPEC.tasks, "push the red cube"))
    assert torch.equal(
        outputs(TinyVLA.from_pretrained(folder, longer), observations()), outputs(policy, observations())
    )
    with pytest.raises(ContractError, match="'blue' is not in its vocabulary"):
        TinyVLA.from_pretrained(folder, replace(SPEC, tasks=(*SPEC.tasks, "push the blue cube")))


def _edit(folder, change):
    config = json.loads((folder / CONFIG).read_text())
    change(config)
    (folder / CONFIG).write_text(json.dumps(config))


def _cut(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


BROKEN = {
    "no folder": (shutil.rmtree, "has no config.json, so it is not a checkpoint"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no model.safetensors"),
    "weights cut": (lambda f: _cut(f / WEIGHTS, 0.6), "is damaged"),
    "weights empty": (lambda f: _cut(f / WEIGHTS, 0), "is damaged"),
    "weights of no kind": (lambda f: (f / WEIGHTS).write_bytes(b"PK\x03\x04 not weights" * 9), "is damaged"),
    "config cut": (lambda f: _cut(f / CONFIG, 0.6), "is damaged"),
    "config in another encoding": (lambda f: (f / CONFIG).write_bytes(b"\xff\xfe{"), "is damaged"),
    "config of another tool": (lambda f: (f / CONFIG).write_text('{"architectures": []}'), "not written by vla-rl"),
    "config is a list": (lambda f: (f / CONFIG).write_text("[]"), "not written by vla-rl"),
    "a later contract": (
        lambda f: _edit(f, lambda c: c.update(contract_version=3)),
        "contract version 3 but this is 2",
    ),
    "no vocabulary": (lambda f: _edit(f, lambda c: c.pop("vocabulary")), "no 'vocabulary'"),
    "no spec": (lambda f: _edit(f, lambda c: c.pop("spec")), "no 'spec'"),
    "half a spec": (lambda f: _edit(f, lambda c: c["spec"].pop("action")), "spec cannot be read"),
    "an unknown field": (lambda f: _edit(f, lambda c: c["config"].update(widht=3)), "did you mean 'width'"),
    "no steps": (lambda f: _edit(f, lambda c: c["config"]["sampler"].update(steps=0)), r"FlowSampler\.steps is 0"),
    "another size": (lambda f: _edit(f, lambda c: c["config"].update(width=64)), "does not fit the model"),
    "another policy's weights": (
        lambda f: save_folder(f, json.loads((f / CONFIG).read_text()), {"x": torch.ones(1)}),
        "does not fit the model",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_is_named(saved, how):
    change, message = BROKEN[how]
    change(saved[0])
    with pytest.raises(UserError, match=message) as caught:
        TinyVLA.from_pretrained(saved[0])
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_names_no_policy_is_refused(saved):
    _edit(saved[0], lambda config: config.update(policy="vla_rl.contract.load:load"))
    with pytest.raises(UserError, match="is how earlier versions of vla-rl named a class"):
        load_policy(saved[0])
    _edit(saved[0], lambda config: config.update(policy="EnvSpec"))
    with pytest.raises(UserError, match="is not a policy class"):
        load_policy(saved[0])


def test_a_write_that_fails_keeps_the_checkpoint_before_it(saved, monkeypatch):
    folder, policy = saved
    before = outputs(policy, observations())
    with torch.no_grad():
        policy.connector[0].bias.add_(1.0)
    with monkeypatch.context() as patch:
        patch.setattr("vla_rl.pretrained.save_file", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(UserError, match=r"could not be written \(disk full\)"):
            policy.save_pretrained(folder)
    assert torch.equal(outputs(TinyVLA.from_pretrained(folder), observations()), before)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
    policy.save_pretrained(folder)
    assert torch.equal(outputs(TinyVLA.from_pretrained(folder), observations()), outputs(policy, observations()))
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_a_run_killed_between_the_two_moves_loses_nothing(saved, monkeypatch):
    folder, policy = saved
    folder.rename(folder.with_name("checkpoint.old"))  # as a kill leaves it
    monkeypatch.setattr("vla_rl.pretrained.save_file", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UserError, match="disk full"):
        policy.save_pretrained(folder)
    assert torch.equal(outputs(TinyVLA.from_pretrained(folder), observations()), outputs(policy, observations()))


def test_noise_falls_with_progress_and_is_saved_as_chosen(tmp_path):
    sampler = FlowSampler(FlowOu(0.5, 0.1), AllSteps(), 4)
    policy = made(sampler)
    features = policy.encode(observations())

    def stds() -> torch.Tensor:
        out, _ = policy.act(features, {}, "sample", seeded())
        return policy.log_prob(features, out.sample, out.aux).params["std"][0, :, 0]

    constant = stds()
    policy.set_progress(0.5)
    assert torch.equal(stds(), constant)  # without a final noise nothing falls
    policy.with_sampler(sampler, final_noise=0.4)
    assert torch.equal(stds(), constant)
    policy.set_progress(0.5)
    torch.testing.assert_close(stds()[-1], torch.tensor(0.7 * 0.1))
    policy.set_progress(1.0)
    assert (stds()[1:] < constant[1:]).all() and stds()[-1] == pytest.approx(0.04)
    policy.save_pretrained(tmp_path / "it")
    assert load_policy(tmp_path / "it").config.sampler == sampler


def test_an_empty_instruction_gives_finite_actions():
    spec = replace(SPEC, tasks=(*SPEC.tasks, ""))
    policy, obs = made(spec=spec), observations()
    with_empty = replace(obs, task=np.where(np.arange(BATCH) < 3, 2, obs.task))
    assert outputs(policy, with_empty).isfinite().all()
    torch.testing.assert_close(outputs(policy, with_empty)[3:], outputs(policy, obs)[3:])
    only = replace(obs, task=np.full(BATCH, 2))
    assert outputs(policy, only).isfinite().all()
    policy.encode_with_grad(with_empty)["image_features"].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.backbone.parameters())


def test_cameras_are_told_apart_by_name_not_by_order():
    policy, obs = made(), observations()
    backwards = replace(SPEC, images=dict(reversed(SPEC.images.items())))
    other = made(spec=backwards)
    assert list(other.spec.images) == ["wrist", "front"]
    assert torch.equal(outputs(policy, obs), outputs(other, replace(obs, images=dict(reversed(obs.images.items())))))


def test_who_may_read_the_config_may_read_the_weights(tmp_path):
    made().save_pretrained(tmp_path / "it")
    config, weights = ((tmp_path / "it" / name).stat().st_mode for name in (CONFIG, WEIGHTS))
    assert weights == config and weights & 0o044 == 0o044


# -- a backbone that learns -------------------------------------------------------------------------------------------


def test_a_backbone_that_learns_keeps_pictures_and_decides_alike():
    policy, obs = made(FlowSampler(FlowSde(0.5), AllSteps(), 4)), observations()
    before, frozen = outputs(policy, obs), policy.encode(obs)
    features = policy.with_trained_backbone().encode(obs)
    assert torch.equal(outputs(policy, obs), before)
    kept = {"picture/front", "picture/wrist", "task"}
    assert features.keys() == frozen.keys() | kept
    again = policy.encode_again(features)
    assert again.keys() == features.keys() - {"picture/front", "picture/wrist"}
    torch.testing.assert_close(again["image_features"], frozen["image_features"])
    assert policy.encode_again(frozen) is frozen


def test_a_backbone_that_learns_has_the_gradient_of_today():
    """Ratios are 1 before the first step; then the kept features are old, and what counts are the pictures."""
    policy = made(FlowSampler(FlowSde(0.5), AllSteps(), 4)).with_trained_backbone()
    features = policy.encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded(1))
    likelihood = policy.log_prob(features, out.sample, out.aux)
    torch.testing.assert_close(likelihood.logprob, out.logprob, atol=1e-3, rtol=1e-4)
    likelihood.logprob.sum().backward()
    names = {name for name, item in policy.trainable().items() if item.grad is not None and item.grad.abs().sum() > 0}
    assert any(name.startswith("backbone.") for name in names)
    assert policy.trainable().keys() == dict(policy.named_parameters()).keys()
    with torch.no_grad():
        policy.backbone.values.weight.mul_(2.0)
    assert not torch.allclose(policy.log_prob(features, out.sample, out.aux).logprob, out.logprob, atol=1e-2)
    wrong = {**features, "image_features": torch.zeros_like(features["image_features"])}
    chunks = torch.zeros(BATCH, HORIZON, 2)
    one, two = (policy.imitation_losses(given, chunks, 2, seeded(5)) for given in (features, wrong))
    assert torch.equal(one, two)
