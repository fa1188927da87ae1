"""A residual that hands over little by little: where the correction acts, how large it may be, and that it travels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.residuals import POINT, SMALL, StateEncoder, biased_base
from vla_rl.algorithms.residual_td3 import ResidualTD3, ResidualTD3Config
from vla_rl.contract.errors import UserError
from vla_rl.experience.replay import Replay
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.residual import BlendConfig, DeterministicResidual, GaussianResidual
from vla_rl.training.loop import InProcessPolicyStore


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(noise: float = 0.2, **blend) -> DeterministicResidual:
    torch.manual_seed(1)
    config = replace(SMALL, noise=noise, blend=BlendConfig(**blend))
    policy = DeterministicResidual(biased_base(), StateEncoder(POINT), config)
    torch.nn.init.normal_(policy.delta.last.weight, std=0.5)
    return policy


def features(num_envs: int) -> dict[str, torch.Tensor]:
    state = torch.randn(num_envs, POINT.state.shape[0], generator=seeded(2))
    base = 0.4 * torch.rand(num_envs, 2, generator=seeded(3))
    return {"state": state, "base_action": base, "base_plan": torch.zeros(num_envs, 4)}


def acting(policy: DeterministicResidual, num_envs: int, steps: int) -> tuple[np.ndarray, list]:
    """Where the correction acts, bool [T,E], and the outputs; all episodes begin at the first step."""
    state, generator, found = policy.initial_state(num_envs), seeded(4), []
    state = policy.reset_state(state, np.arange(num_envs))
    for _ in range(steps):
        out, state = policy.act(features(num_envs), state, "sample", generator)
        found.append(out)
    return np.stack([out.aux["corrected"].numpy() for out in found]), found


@pytest.mark.parametrize(("released", "probability"), [(0, 0.2), (500, 0.6), (1000, 1.0), (5000, 1.0)])
def test_the_probability_grows_with_the_decisions(released, probability):
    policy = made(decisions=1000, start=0.2)
    policy.set_released(released)
    acts, _ = acting(policy, 400, 10)
    assert acts.mean() == pytest.approx(probability, abs=0.03)  # four standard errors
    if probability < 1:
        assert acts.mean(0).min() > 0 or acts.mean(0).max() < 1, "every step draws anew"
        assert (acts.any(0) & ~acts.all(0)).mean() > 0.8


def test_a_probability_of_episodes_is_drawn_once_in_each():
    policy = made(start=0.3, per="episode")
    acts, _ = acting(policy, 1000, 6)
    assert (acts == acts[0]).all() and acts[0].mean() == pytest.approx(0.3, abs=0.06)
    state = policy.reset_state(policy.initial_state(1000), np.arange(1000))
    one, state = policy.act(features(1000), state, "sample", seeded(4))
    again = policy.reset_state(state, np.arange(500))
    two, _ = policy.act(features(1000), again, "sample", seeded(5))
    same = (one.aux["corrected"] == two.aux["corrected"]).numpy()
    assert same[500:].all() and 0.4 < same[:500].mean() < 0.8


def test_the_base_plays_a_random_number_of_steps_first():
    """Up to half of the point mass's time limit, uniformly; then the correction acts to the end."""
    policy, limit = made(start=1.0, delay=0.5), POINT.time_limit
    acts, _ = acting(policy, 2000, limit)
    begin = acts.argmax(0)
    assert (np.diff(acts.astype(int), axis=0) >= 0).all() and acts[-1].all()
    counts = np.bincount(begin, minlength=limit)
    half = limit // 2
    assert counts[half:].sum() == 0 and (counts[:half] > 0.6 * 2000 / half).all()


def test_where_the_correction_does_not_act_it_is_the_base_without_noise():
    policy, given = made(start=0.5), features(200)
    acts, outs = acting(policy, 200, 1)
    base = policy.action_scale.unnormalize(given["base_action"])
    unchanged = (outs[0].action[:, 0] - base).abs().amax(1) < 1e-6
    assert (unchanged.numpy() == ~acts[0]).all() and 50 < acts.sum() < 150
    explained = policy.critic_action(given, outs[0].sample, outs[0].action)
    assert float(explained[~torch.from_numpy(acts[0])].abs().max()) < 1e-5


def test_the_size_caps_the_correction_for_critics_and_when_deployed():
    policy, given = made(noise=0.0, decisions=1000, size=0.1, start=1.0), features(300)
    u = policy.delta(given)
    for released, size in ((0, 0.1), (500, 0.55), (1000, 1.0)):
        policy.set_released(released)
        torch.testing.assert_close(policy.rsample(given, seeded()).action, size * u, atol=2e-5, rtol=1e-4)
        for mode in ("eval", "sample"):
            state = policy.reset_state(policy.initial_state(300), np.arange(300))
            out, _ = policy.act(given, state, mode, seeded())
            moved = policy.action_scale.normalize(out.action[:, 0]) - given["base_action"]
            torch.testing.assert_close(moved, 0.5 * size * u, atol=2e-5, rtol=1e-4)


def test_a_deployed_policy_is_never_blended():
    policy, given = made(start=0.0, delay=1.0), features(50)
    state = policy.reset_state(policy.initial_state(50), np.arange(50))
    out, after = policy.act(given, state, "eval", seeded())
    torch.testing.assert_close(policy.critic_action(given, out.sample, out.action), policy.delta(given))
    assert not out.aux and (after["blend_steps"] == 0).all()


def test_what_is_released_is_published_and_saved_with_the_weights(tmp_path):
    policy = made(decisions=1000, start=0.2, size=0.4)
    assert not policy.released.requires_grad
    policy.set_released(500)
    _, weights = InProcessPolicyStore(policy).latest()
    assert weights["released"].tolist() == pytest.approx([0.6, 0.7])
    policy.save_pretrained(tmp_path / "policy")
    loaded = DeterministicResidual.from_pretrained(tmp_path / "policy", POINT)
    assert loaded.released.tolist() == pytest.approx([0.6, 0.7]) and loaded.config == policy.config
    assert "released" not in DeterministicResidual(biased_base(), StateEncoder(POINT), SMALL).trainable()


def test_a_learner_moves_the_schedule_with_its_decisions():
    policy = made(decisions=1000, start=0.2)
    critic = QEnsemble(policy.feature_sizes, 2, 2, SMALL.head)
    td3 = ResidualTD3(policy, policy.trainable(), critic, Replay(100, 0.9), ResidualTD3Config(), seeded())
    td3.guard.released = 250
    nothing = torch.zeros(1, 3, 1, dtype=torch.bool)
    idle = type("Idle", (), {"valid": nothing})()
    td3.replay.add = lambda rollout: 0
    td3.update(idle)
    assert float(policy.released[0]) == pytest.approx(0.4)


def test_a_gaussian_residual_and_shares_above_one_are_refused():
    with pytest.raises(UserError, match=r"cannot be blended with the base; leave ResidualConfig.blend out"):
        GaussianResidual(biased_base(), StateEncoder(POINT), replace(SMALL, blend=BlendConfig()))
    for wrong in ({"start": 1.5}, {"size": -0.1}, {"delay": 2.0}, {"decisions": 0}):
        with pytest.raises(UserError):
            BlendConfig(**wrong)
