"""Real-time chunking: golden weights, guidance against closed forms, what the state holds, checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.policies.test_tiny import SPEC, made, observations
from tests.policies.vla.tiny_vlas import tiny_vla
from tests.toys import seeded
from vla_rl.algorithms.ppo import PPO
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Features, State
from vla_rl.policies.feed_forward import GaussianPolicy
from vla_rl.policies.flow import AllSteps, Field, FlowSampler, Ode, VelocityField
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.real_time_chunking import RealTimeChunking, RealTimeConfig, guidance_weight, prefix_weights
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.options import VLAOptions

H, D = 8, SPEC.action_dim
N = H * D
GUIDANCES = ["vjp", "identity"]


@dataclass(frozen=True)
class Steps:
    """The config of a toy: H and the sampler."""

    sampler: FlowSampler
    horizon: int = H


class Toy(FlowPolicy):
    """A flow in float64 whose velocity is a formula; ``features["state"]`` [E,N] is the mean of its chunks."""

    def __init__(self, steps: int = 4) -> None:
        config = Steps(FlowSampler(Ode(), AllSteps(), steps))
        super().__init__(SPEC, Affine.from_bounds(SPEC.action), config)
        self.double()


class Straight(Toy):
    """Velocity that does not depend on ``x``: the Jacobian of the estimated chunk is the identity."""

    def field(self, features: Features) -> VelocityField:
        # A gradient of 0 for ``x``, so that the vjp can be taken.
        return lambda x, t: Field(-features["state"].unsqueeze(1) + 0.0 * x)


class LinearGaussian(Toy):
    """Chunks of N(state, S) with neighbours that are alike: ``A_hat = m + (1-t) S C^-1 (x - (1-t) m)``."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__(steps)
        index = torch.arange(H, dtype=torch.float64)
        rows = 0.3 * 0.8 ** (index[:, None] - index).abs()
        self.covariance = torch.kron(rows, torch.eye(D, dtype=torch.float64))

    def jacobian(self, t: float) -> Tensor:
        """``J`` [N,N]."""
        of_x = (1 - t) ** 2 * self.covariance + t**2 * torch.eye(N, dtype=torch.float64)
        return (1 - t) * self.covariance @ torch.linalg.inv(of_x)

    def field(self, features: Features) -> VelocityField:
        def velocity(x: Tensor, t: Tensor) -> Field:
            mean, time = features["state"].unsqueeze(1), float(t[0, 0])
            end = mean + (x - (1 - time) * mean) @ self.jacobian(time).T
            return Field((x - end) / time)

        return velocity


def states(count: int, seed: int = 0) -> Features:
    return {"state": 0.5 * torch.randn(count, N, generator=seeded(seed), dtype=torch.float64)}


def second_chunk(policy: RealTimeChunking, consumed: list[int], delay: list[int]) -> tuple[Tensor, Tensor, State]:
    """The first and the second ``sample`` of as many environments, and the state after the first."""
    count = len(consumed)
    first, state = policy.act(states(count, 1), policy.initial_state(count), "eval", seeded(1))
    told = policy.continue_chunk(state, list(range(count)), consumed, delay)
    second, _ = policy.act(states(count, 2), told, "eval", seeded(2))
    return first.sample, second.sample, state


def test_golden_weights():
    """H=8, s=3: five actions are left.  With d=2, c = 3/4, 1/2, 1/4 after the first two."""
    left, delay = torch.tensor([5, 4, 0, 8]), torch.tensor([2, 4, 0, 0])
    decaying = [c * (math.exp(c) - 1) / (math.e - 1) for c in (0.75, 0.5, 0.25)]
    assert decaying == pytest.approx([0.487551, 0.188770, 0.041324], abs=1e-6)
    rest = [c * (math.exp(c) - 1) / (math.e - 1) for c in ((8 - i) / 9 for i in range(8))]
    expected = [[1, 1, *decaying, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0] * 8, rest]
    torch.testing.assert_close(prefix_weights(8, left, delay), torch.tensor(expected))


def test_golden_guidance_weight():
    """``(tau^2 + (1-tau)^2) / (tau (1-tau))``: 10/3 at a quarter, 2 in the middle, clipped at noise."""
    times = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.1])
    torch.testing.assert_close(guidance_weight(times, 5.0), torch.tensor([5.0, 10 / 3, 2.0, 10 / 3, 5.0]))
    assert float(guidance_weight(torch.tensor(0.75), 2.5)) == 2.5


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_with_a_straight_flow_the_error_shrinks_step_by_step(guidance):
    """Each of K steps multiplies the difference to the last chunk's rest by ``1 - c(t) W / K``."""
    base = Straight(steps=4)
    policy = RealTimeChunking(base, RealTimeConfig(guidance))
    first, second, _ = second_chunk(policy, [3], [2])
    plain = base.integrated(states(1, 2), base.initial_noise(1, seeded(2))).sample
    rest = torch.cat([first[:, 3:], torch.zeros_like(first[:, :3])], 1)
    weights = prefix_weights(H, torch.tensor([5]), torch.tensor([2])).double()[..., None]
    left = torch.ones_like(weights)
    for c in (5.0, 10 / 3, 2.0, 10 / 3):
        left *= 1 - c * weights / 4
    torch.testing.assert_close(second, rest + left * (plain - rest), atol=1e-9, rtol=1e-9)
    assert (second - plain).abs()[:, :5].min() > 1e-3  # it was guided


def test_where_the_jacobian_is_the_identity_guidances_agree():
    chunks = [second_chunk(RealTimeChunking(Straight(), RealTimeConfig(name)), [3, 4], [2, 4])[1] for name in GUIDANCES]
    torch.testing.assert_close(chunks[0], chunks[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_a_linear_gaussian_flow_is_guided_by_its_closed_form(guidance):
    """The whole chain by matrices: ``J^T`` of the closed form, or the identity."""
    base = LinearGaussian(steps=5)
    first, second, _ = second_chunk(RealTimeChunking(base, RealTimeConfig(guidance)), [2], [1])
    rest = torch.cat([first[:, 2:], torch.zeros_like(first[:, :2])], 1).flatten(1)
    weights = prefix_weights(H, torch.tensor([6]), torch.tensor([1])).double().repeat_interleave(D, 1)
    x, mean = base.initial_noise(1, seeded(2)), states(1, 2)["state"]
    for k in range(5):
        t = 1 - k / 5
        jacobian = base.jacobian(t)
        end = mean + (x - (1 - t) * mean) @ jacobian.T
        c = 5.0 if k == 0 else min(5.0, (t**2 + (1 - t) ** 2) / (t * (1 - t)))
        pull = jacobian if guidance == "vjp" else torch.eye(N, dtype=torch.float64)
        x = x - 0.2 * ((x - end) / t - c * (weights * (rest - end)) @ pull)
    torch.testing.assert_close(second.flatten(1), x, atol=1e-9, rtol=1e-9)


def test_the_guidance_of_a_network_is_that_of_its_jacobian():
    base = made().double()
    features = {name: item.double() for name, item in base.encode(observations(3)).items()}
    policy = RealTimeChunking(base)
    _, state = policy.act(features, policy.initial_state(3), "eval", seeded())
    guided = policy.guided(policy.continue_chunk(state, [0, 1, 2], [1, 1, 2], [1, 0, 1]))
    x = torch.randn(3, 1, guided.target.shape[1], generator=seeded(3), dtype=torch.float64)
    t, field = torch.full((3, 1), 0.6, dtype=torch.float64), base.field(features)
    found = guided.vjp(base.field(features))(x, t).velocity
    end = x - 0.6 * field(x, t).velocity
    whole = torch.autograd.functional.jacobian(lambda point: point - 0.6 * field(point, t).velocity, x)
    for row in range(3):
        error = guided.weights[row] * (guided.target[row] - end[row, 0])
        pulled = whole[row, 0, :, row, 0].T @ error
        expected = field(x, t).velocity[row, 0] - guidance_weight(t[row], 5.0) * pulled
        torch.testing.assert_close(found[row, 0], expected, atol=1e-9, rtol=1e-9)
    assert not found.requires_grad


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_delayed_actions_become_the_last_chunks_by_guidance(guidance):
    gaps = []
    for beta in (0.0, 2.0, 20.0, 100.0):
        config = RealTimeConfig(guidance, beta)
        first, second, _ = second_chunk(RealTimeChunking(LinearGaussian(steps=100), config), [4] * 8, [3] * 8)
        gaps.append(float((second[:, :3] - first[:, 4:7]).abs().max()))
    assert gaps[0] > 0.5 and gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.02


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_rows_are_independent(guidance):
    """Each environment has its own chunk, consumption and delay, whatever the others have."""
    config, consumed, delay = RealTimeConfig(guidance), [3, 8, 4], [1, 0, 4]
    policy = RealTimeChunking(LinearGaussian(), config)
    generators = [seeded(i) for i in range(3)]
    _, state = policy.act(states(3, 1), policy.initial_state(3), "eval", generators)
    together, _ = policy.act(
        states(3, 2), policy.continue_chunk(state, [2, 0, 1], [4, 3, 8], [4, 1, 0]), "eval", generators
    )
    for row in range(3):
        alone, own = RealTimeChunking(LinearGaussian(), config), [seeded(row)]
        features = [{"state": states(3, seed)["state"][row : row + 1]} for seed in (1, 2)]
        _, kept = alone.act(features[0], alone.initial_state(1), "eval", own)
        out, _ = alone.act(
            features[1], alone.continue_chunk(kept, [0], consumed[row : row + 1], delay[row : row + 1]), "eval", own
        )
        torch.testing.assert_close(together.sample[row], out.sample[0], atol=1e-12, rtol=0)


def test_without_anything_to_continue_it_decides_as_its_base():
    """The first chunk of an episode, one after a chunk that was executed whole, and one after a reset."""
    base = made()
    policy, features = RealTimeChunking(base), base.encode(observations(2))
    plain = [base.act(features, {}, "eval", seeded(seed))[0].action for seed in (1, 2)]
    unheard = policy.continue_chunk(policy.initial_state(2), [0, 1], [1, 1], [1, 1])
    first, state = policy.act(features, unheard, "eval", seeded(1))
    torch.testing.assert_close(first.action, plain[0], atol=0, rtol=0)
    whole, _ = policy.act(features, state, "eval", seeded(2))
    torch.testing.assert_close(whole.action, plain[1], atol=0, rtol=0)
    told = policy.continue_chunk(state, [0, 1], [1, 1], [1, 1])
    reset, after = policy.act(features, policy.reset_state(told, [1]), "eval", seeded(2))
    assert (reset.action[0] - plain[1][0]).abs().max() > 1e-3
    torch.testing.assert_close(reset.action[1], plain[1][1], atol=0, rtol=0)
    again, _ = policy.act(features, after, "eval", seeded(2))  # what was said holds for one decision
    torch.testing.assert_close(again.action, plain[1], atol=0, rtol=0)
    late = policy.continue_chunk(policy.reset_state(state, [0, 1]), [0, 1], [1, 1], [1, 1])
    torch.testing.assert_close(policy.act(features, late, "eval", seeded(2))[0].action, plain[1], atol=0, rtol=0)


def test_entries_of_a_state_can_be_written_one_by_one():
    """As callers do that decide for some environments at a time: no two entries share memory."""
    policy = RealTimeChunking(LinearGaussian())
    state = policy.initial_state(2)
    for one in (state, policy.act(states(2), state, "eval", seeded())[1]):
        before = {name: item.clone() for name, item in one.items()}
        for name, item in one.items():
            item[0] = 7
            assert all(torch.equal(one[other], kept) for other, kept in before.items() if other != name)
            item.copy_(before[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("guidance", GUIDANCES)
def test_padded_chunks_are_guided_where_they_are_executed(guidance, dtype):
    """SmolVLA, whose actions have a column of padding; everything that is kept is float32."""
    base = tiny_vla(SmolVLA, VLAOptions(horizon=2, dtype=dtype))
    policy, features = RealTimeChunking(base, RealTimeConfig(guidance)), base.encode(observations(2))
    first, state = policy.act(features, policy.initial_state(2), "eval", seeded(1))
    assert state["chunk"].dtype == first.action.dtype == torch.float32
    told = policy.continue_chunk(state, [0, 1], [1, 1], [1, 1])
    guided = policy.guided(told)
    rows, columns = base.latent_shape
    weights = guided.weights.unflatten(1, (rows, columns))
    assert columns > D and weights[:, 0, :D].eq(1).all() and weights.count_nonzero() == 2 * D
    torch.testing.assert_close(guided.target.unflatten(1, (rows, columns))[:, 0, :D], first.sample[:, 1])
    second, _ = policy.act(features, told, "eval", seeded(2))
    plain = base.act(features, {}, "eval", seeded(2))[0]
    gaps = [float((out.sample[:, 0] - first.sample[:, 1]).abs().mean()) for out in (second, plain)]
    assert gaps[0] < 0.5 * gaps[1]


def test_nothing_learns_with_it():
    policy = RealTimeChunking(made())
    features = policy.encode(observations(2))
    with pytest.raises(UserError, match=r"no likelihood.*train the flow policy inside"):
        policy.act(features, policy.initial_state(2), "sample", seeded())
    with pytest.raises(UserError, match=r"no likelihood.*train the flow policy inside"):
        policy.trainable()
    with pytest.raises(UserError, match=r"PPO needs a policy with log_prob.*RealTimeChunking lacks"):
        PPO(policy, None, {}, None, seeded())  # type: ignore[arg-type]  # refused first
    with pytest.raises(UserError, match="GaussianPolicy has no velocity field"):
        RealTimeChunking(GaussianPolicy(SPEC))  # type: ignore[arg-type]  # that is the point
    with pytest.raises(UserError, match="guidance is 'jvp'"):
        RealTimeConfig("jvp")


def test_a_checkpoint_decides_alike(tmp_path):
    policy = RealTimeChunking(made(), RealTimeConfig("identity", 3.0))
    policy.save_pretrained(tmp_path / "real-time")
    loaded = load_policy(tmp_path / "real-time", SPEC)
    assert isinstance(loaded, RealTimeChunking) and loaded.config == policy.config
    features, chunks = policy.encode(observations(2)), []
    for item in (policy, loaded):
        _, state = item.act(features, item.initial_state(2), "eval", seeded(1))
        chunks.append(item.act(features, item.continue_chunk(state, [0, 1], [1, 2], [1, 1]), "eval", seeded(2))[0])
    torch.testing.assert_close(chunks[0].action, chunks[1].action, atol=0, rtol=0)
