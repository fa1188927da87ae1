"""Imagined rollouts on the device of their model equal those of the host and mix no devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from tests.elsewhere import ELSEWHERE, elsewhere
from tests.waiting import counted_waits
from tests.world_models.pushing import played as recorded
from tests.world_models.small_models import SMALL, initial_states, model, spec
from tests.world_models.test_backbones import built, call, every, numbers
from vla_rl.contract.env import Step, on_host
from vla_rl.contract.errors import NonFiniteError
from vla_rl.contract.tracker import read_step
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies import normalization
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.training.fit import FitConfig
from vla_rl.training.world_model import WorldModelFit, fit_world_model, statistics
from world_models.config import ImaginationConfig, Limits, WorldModelConfig
from world_models.env import ImaginedEnv
from world_models.model import WorldModel
from world_models.replay import replay

CONFIG = ImaginationConfig(horizon=12, batch_size=4, success_threshold=0.5, resamples=1)
EVERY = np.arange(5)


@pytest.fixture(autouse=True)
def elsewhere_device() -> Iterator[torch.device]:
    with elsewhere() as device:
        yield device


def imagined(device: torch.device | str) -> ImaginedEnv:
    made = model(("front", "wrist"))
    return ImaginedEnv(made.to(device), initial_states(made), len(EVERY), Limits((0.8,) * 4), CONFIG)


def played(env: ImaginedEnv) -> list[Step]:
    env.reset(EVERY, EVERY)
    chooser = np.random.default_rng(0)
    chunks = [chooser.uniform(-0.5, 0.5, (len(EVERY), n, 2)).astype(np.float32) for n in (2, 3, 1, 4, 2)]
    on_device = env.spec.device != "cpu"
    return [env.step(torch.from_numpy(chunk).to(env.spec.device) if on_device else chunk, "all") for chunk in chunks]


def test_imagined_rollouts_on_a_device_are_those_of_the_host():
    env = imagined(ELSEWHERE)
    assert env.spec.device == "meta"
    for host, device in zip(played(imagined("cpu")), played(env), strict=True):
        assert host.cause == device.cause
        for name in ("reward", "valid", "terminated", "truncated", "success", "executed", "intervened"):
            given = getattr(device, name)
            assert given.device == ELSEWHERE and np.array_equal(on_host(given), getattr(host, name))
        for one, other in zip(host.frames, device.frames, strict=True):
            pairs = [(one.images[name], other.images[name]) for name in ("front", "wrist")]
            pairs += [(getattr(one, name), getattr(other, name)) for name in ("state", "task", "time")]
            assert all(two.device == ELSEWHERE and np.array_equal(on_host(two), first) for first, two in pairs)


@pytest.mark.full
def test_replays_on_another_device_are_those_of_the_host():
    made = model()
    chooser = np.random.default_rng(1)
    actions = [chooser.uniform(-0.5, 0.5, (length, 2)).astype(np.float32) for length in (4, 7, 6)]
    first = initial_states(made, 3).first
    host = replay(made, first, actions, CONFIG)
    device = replay(made.to(ELSEWHERE), first, actions, CONFIG)
    for name in ("step", "success", "uncertainty", "pictures", "state"):
        assert np.array_equal(getattr(host, name), getattr(device, name), equal_nan=True)


@pytest.mark.full
def test_training_on_another_device_gives_the_hosts_weights():
    trajectories, fitted = recorded(12, seed=1), WorldModelFit(*[FitConfig(steps=2, batch=4)] * 4)
    learnt, reported = [], []
    for device in ("cpu", ELSEWHERE):
        torch.manual_seed(0)
        made = WorldModel(spec(), WorldModelConfig(3, 3, backbone=SMALL), *statistics(trajectories)).to(device)
        # As found: the registration uses Fourier transforms, whose rounding depends on the memory layout.
        made.robot_position.weight.fill_(0.1)
        losses: list[dict[str, float]] = []
        fit_world_model(
            made, trajectories, fitted, torch.Generator().manual_seed(1), lambda step, info, to=losses: to.append(info)
        )
        reported.append(losses)
        learnt.append({name: item.detach().cpu() for name, item in made.state_dict().items()})
    host, device = learnt
    assert reported[0] == reported[1] and len(reported[0]) == fitted.steps
    assert all(torch.equal(item, device[name]) for name, item in host.items())
    assert all(item.isfinite().all() for item in device.values())


@every
def test_backbones_predict_on_a_device_what_they_do_on_the_host(config):
    video, given = built(config), numbers(built(config))
    host = call(video, given).clean
    device = call(video.to(ELSEWHERE), {name: item.to(ELSEWHERE) for name, item in given.items()}).clean
    assert device.device == ELSEWHERE and torch.allclose(device.cpu(), host, atol=1e-5)


def test_two_devices_do_not_mix():
    """So the tests here can fail."""
    device, host, first = torch.zeros(3, device=ELSEWHERE), torch.ones(3), np.arange(2)
    wrong = (
        lambda: device + host,
        lambda: torch.stack([host, device]),
        lambda: host[first.size * torch.ones(1, dtype=torch.long, device=ELSEWHERE)],
        lambda: device.index_put_((torch.from_numpy(first),), host[:2]),
    )
    for mixed in wrong:
        with pytest.raises(RuntimeError, match="two devices"):
            mixed()
    with pytest.raises(RuntimeError, match="numpy"):
        device.numpy()
    device[first] = host.to(ELSEWHERE)[first]
    assert device.cpu().tolist() == [1.0, 1.0, 0.0] and device[first].device == ELSEWHERE


@pytest.fixture
def undecided(elsewhere_device: torch.device) -> ImaginedEnv:
    """Rollouts on the device that end at the horizon alone."""
    made, config = model(("front", "wrist")), replace(CONFIG, success_threshold=2.0, failure_threshold=2.0)
    return ImaginedEnv(made.to(elsewhere_device), initial_states(made), len(EVERY), None, config)


@pytest.mark.full
def test_the_host_waits_once_for_every_call_of_the_model(undecided: ImaginedEnv) -> None:
    frames, given = undecided.model.config.frames, torch.zeros(len(EVERY), 1, 2)
    with counted_waits() as waits:
        for seeds in (EVERY, EVERY + 9):
            obs = undecided.reset(EVERY, seeds)
            for calls in (1, 2):  # the first time, constants come to the device
                chunk = given.expand(-1, calls * frames, -1).to(ELSEWHERE)
                waits.clear()
                told = read_step(undecided.step(chunk), obs)
                assert told.finite and waits["read"] == calls
        assert waits == {"read": 2}


def test_a_decision_in_imagination_waits_once(undecided: ImaginedEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalization, "_constants", lru_cache(normalization._make_constants))  # as on a real device
    horizon = undecided.model.config.frames
    policy = GaussianPolicy(undecided.spec, config=GaussianConfig(horizon=horizon, width=8)).to(ELSEWHERE)
    source = RolloutSource(undecided, policy, 9, SeedStream(0, 99), torch.Generator().manual_seed(0))
    source.start()
    ended = 0
    with counted_waits() as waits:
        for _ in range(5):
            waits.clear()
            decision = source.driver.step()
            assert waits["read"] == 1
            source._keep(decision, source._window)
            ended += int(decision.host.done.sum())
    assert ended >= len(EVERY)


def test_an_action_that_is_not_finite_changes_nothing_imagined(undecided: ImaginedEnv) -> None:
    undecided.reset(EVERY, EVERY)
    undecided.step(torch.full((len(EVERY), 1, 2), 0.1).to(ELSEWHERE))
    before = {name: on_host(item).copy() for name, item in undecided.snapshot(EVERY).items()}
    bad = torch.full((len(EVERY), 4, 2), 0.1)
    bad[2, 3, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=r"action\[2,3,1\] is nan \(environment 2 at control step 4\)"):
        undecided.step(bad.to(ELSEWHERE), "all")
    after = {name: on_host(item) for name, item in undecided.snapshot(EVERY).items()}
    assert all(np.array_equal(before[name], after[name]) for name in before)
