"""How often the host waits for a device while it collects: counted on a device that is not the host."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from tests.elsewhere import ELSEWHERE, elsewhere
from tests.visual_point_mass import VisualPointMass, tiny_vla
from tests.waiting import counted_waits
from vla_rl.contract.env import on_host
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.evaluation.run import play
from vla_rl.experience.driver import Driver
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies import normalization
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.policies.flow import FlowSampler, FlowSde, OneRandomStep

ENVS, DECISIONS = 4, 22


class There:
    """Somebody's simulator whose arrays are on the device; what its own calls wait for does not count."""

    def __init__(self, waits):
        self.env, self.waits = VisualPointMass(ENVS), waits
        self.spec, self.num_envs, self.close = replace(self.env.spec, device="meta"), ENVS, self.env.close

    def reset(self, env_ids, seeds):
        with self._own():
            return self._obs(self.env.reset(env_ids, seeds))

    def step(self, chunk, observe="last"):
        with self._own():
            step = self.env.step(on_host(chunk), observe)
            ended = {"terminated": np.zeros(ENVS, bool), "truncated": step.done}  # so that last observations are kept
            return replace(replace(step, **ended).mapped(_to_device), obs=self._obs(step.obs))

    @contextmanager
    def _own(self):
        before = dict(self.waits)
        yield
        self.waits.clear()
        self.waits.update(before)

    def _obs(self, obs):
        images = {name: _to_device(image) for name, image in obs.images.items()}
        return replace(
            obs, images=images, **{name: _to_device(getattr(obs, name)) for name in ("state", "task", "time")}
        )


def _to_device(array):
    return torch.as_tensor(array, device=ELSEWHERE)


POLICIES = {
    "gaussian": lambda spec: GaussianPolicy(spec, config=GaussianConfig(horizon=1, width=8)),
    "flow": lambda spec: tiny_vla(spec, sampler=FlowSampler(FlowSde(0.5), OneRandomStep(), 3)),
}
# A flow's table of coefficients, for each of 3 steps: "meta" alone does not keep it.
ONCE = {"gaussian": {"read": 1}, "flow": {"read": 1, "write": 3}}


@pytest.fixture(params=POLICIES)
def there(request, monkeypatch):
    """The environment, a policy, both on the device, what the host waits for, and what that is for a decision."""
    monkeypatch.setattr(normalization, "_constants", lru_cache(normalization._make_constants))  # as on a real device
    torch.manual_seed(0)
    with elsewhere() as device, counted_waits() as waits:
        env = There(waits)
        yield env, POLICIES[request.param](env.spec).to(device), waits, ONCE[request.param]


def test_a_decision_waits_for_the_device_once(there):
    """For who has ended and whether all is finite together; not for the actions before, nor for the next episodes."""
    env, policy, waits, once = there
    source = RolloutSource(env, policy, DECISIONS, SeedStream(0, 999), torch.Generator().manual_seed(0))
    source.start()
    source._keep(source.driver.step(), source._window)  # constants come to the device once
    ended = []
    for _ in range(DECISIONS - 2):
        waits.clear()
        decision = source.driver.step()
        source._keep(decision, source._window)
        ended.append(int(decision.host.done.sum()))
        assert waits == once
    assert 0 in ended and sum(ended) >= ENVS and source._window.final_features


def test_a_decision_of_groups_waits_once(there):
    env, policy, waits, once = there
    source = GroupConfig(2, 2, 0, 2, ENVS).build(env, policy, SeedStream(0, 999), torch.Generator().manual_seed(0))
    source._fill()
    source._decide()
    for _ in range(3):
        waits.clear()
        source._decide()
        assert len(source._running) == ENVS and waits == once


def test_a_decision_of_an_evaluation_waits_once(there):
    env, policy, waits, once = there
    seen = []
    next(play(env, policy, np.arange(ENVS), watch=lambda decision: seen.append(waits["read"])))
    assert len(seen) > 2 and set(np.diff(seen)) == {once["read"]}


@pytest.mark.parametrize("there", ["gaussian"], indirect=True)
def test_a_nan_that_the_device_finds_moves_nothing(there):
    env, policy, *_ = there
    driver = Driver(env, policy, torch.Generator().manual_seed(0))
    driver.start([1, 2, 3, 4])
    driver.step()
    kept = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    for parameter in policy.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"the policy \(version 0\) chose a non-finite action in environment 0"):
        driver.step()
    for name, parameter in policy.named_parameters():
        parameter.data.copy_(kept[name])
    assert on_host(driver.step().step.obs.time).tolist() == [2] * ENVS


@pytest.mark.parametrize("there", ["gaussian"], indirect=True)
def test_a_nan_of_a_reset_on_the_device_is_the_environment_s(there):
    """It is known with the next decision, or before the window is learnt from."""
    env, policy, *_ = there
    real, resets = env._obs, []

    def reset(env_ids, seeds):
        resets.append(env_ids)
        obs = real(env.env.reset(env_ids, seeds))
        bad = obs.state.clone()
        bad[1] = float("nan")
        return replace(obs, state=bad) if len(resets) == wrong else obs

    env.reset, wrong = reset, 1
    driver = Driver(env, policy, torch.Generator().manual_seed(0))
    driver.start([7, 8, 9, 10])
    with pytest.raises(ContractError, match=r"a state that is not finite in environment 1 \(seed 8, time step 0\)"):
        driver.step()
    resets.clear()
    wrong, decisions = 2, next(i for i in range(1, 99) if _ends_at(env.env, i))
    source = RolloutSource(env, policy, decisions, SeedStream(0, 999), torch.Generator().manual_seed(0))
    with pytest.raises(ContractError, match="a state that is not finite in environment 1"):
        source.next()
    assert len(resets) == 2


def _ends_at(env, decisions):
    env.reset(np.arange(ENVS), np.arange(ENVS))
    return [env.step(np.zeros((ENVS, 1, 2), np.float32)) for _ in range(decisions)][-1].done.any()
