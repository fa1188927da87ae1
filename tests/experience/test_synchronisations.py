"""How often the host waits for a device while it collects: counted on a device that is not the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests import elsewhere as another
from tests.elsewhere import ELSEWHERE, elsewhere
from tests.visual_point_mass import VisualPointMass
from vla_rl.contract.env import on_host
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.gaussian import GaussianConfig, GaussianPolicy

ENVS, DECISIONS = 4, 6


class There:
    """A simulator whose arrays are on the device; ``reads`` counts what its own steps take to the host."""

    def __init__(self, counts: Counter[str]) -> None:
        self.env, self.counts = VisualPointMass(ENVS), counts
        self.spec, self.num_envs, self.close = replace(self.env.spec, device="meta"), ENVS, self.env.close

    def reset(self, env_ids, seeds):
        return self._obs(self.env.reset(env_ids, seeds))

    def step(self, chunk, observe="last"):
        before = self.counts["reads"]
        host = on_host(chunk)
        self.counts["reads"] = before  # the simulator's, not the loop's
        step = self.env.step(host, observe).mapped(_to_device)
        return replace(step, obs=self._obs(step.obs))

    def _obs(self, obs):
        images = {name: _to_device(image) for name, image in obs.images.items()}
        return replace(obs, images=images, state=_to_device(obs.state), task=_to_device(obs.task))


def _to_device(array):
    return torch.as_tensor(array, device=ELSEWHERE)


@pytest.fixture
def counts(monkeypatch):
    """``reads``: how often values went from the device to the host, each of which makes the host wait."""
    found: Counter[str] = Counter()
    real = another._run

    def counted(func, args, kwargs):
        name = func._overloadpacket.__name__
        away = bool(args) and isinstance(args[0], another._Away)
        copied = name == "_to_copy" and (kwargs or {}).get("device") == torch.device("cpu")
        if away and (copied or name in ("_local_scalar_dense", "is_nonzero")):
            found["reads"] += 1
        return real(func, args, kwargs)

    monkeypatch.setattr(another, "_run", counted)
    return found


def test_a_decision_in_which_no_episode_ends_waits_for_the_device_three_times(counts):
    """For the actions, for whether all is finite, and for who has ended; none for the rollout itself."""
    torch.manual_seed(0)
    with elsewhere() as device:
        env = There(counts)
        policy = GaussianPolicy(env.spec, config=GaussianConfig(horizon=1, width=8)).to(device)
        source = RolloutSource(env, policy, DECISIONS, SeedStream(0, 999), torch.Generator().manual_seed(0))
        source.start()
        for _ in range(DECISIONS - 1):
            before = counts["reads"]
            source._keep(source.driver.step(), source._window)
            assert not on_host(source._window.decisions[-1].step.done.inner).any()
            assert counts["reads"] - before == 3
