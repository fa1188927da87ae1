"""The counting environment through ``RolloutSource``: nothing lost, doubled or reordered, and every seed in order."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import count, islice, pairwise

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import episode_length, expected_reward
from tests.auditing import AuditingPolicy, PrivilegedEnv
from tests.experience.makers import LuckyEnv, NanPolicy, equal_rollouts
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import NonFiniteError
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream

NUM_ENVS, START = 5, 300
CASES = [(1, 24), (4, 9), (8, 7)]  # (horizon, decisions)


def source(horizon=4, decisions=9, num_envs=NUM_ENVS, policy=None, env=None):
    policy = policy or AuditingPolicy(horizon)
    env = env or make("counting", num_envs=num_envs)
    return RolloutSource(env, policy, decisions, SeedStream(START, 10**9), torch.Generator())


def windows(horizon, decisions, number=4, **options):
    maker = source(horizon, decisions, **options)
    return [maker.next() for _ in range(number)]


def join(parts: list[Rollout]) -> Rollout:
    """One rollout out of consecutive windows; entry ``T`` of ``features`` is that of the last one."""
    last, length = parts[-1], len(parts[0].reward)
    joined = {}
    for field in fields(Rollout):
        values = [getattr(part, field.name) for part in parts]
        if field.name == "features":
            joined["features"] = {
                n: torch.cat([v[n][:-1] for v in values] + [last.features[n][-1:]]) for n in last.features
            }
        elif field.name in ("aux", "final_features"):
            joined[field.name] = {n: torch.cat([v[n] for v in values]) for n in values[0]}
        elif field.name == "final_index":
            joined["final_index"] = torch.cat([v + torch.tensor([i * length, 0]) for i, v in enumerate(values)])
        elif field.name not in ("info", "robot", "stream", "spans"):
            joined[field.name] = torch.cat(values)
    return Rollout(**joined, robot=last.robot)


def expected(horizon, decisions, num_envs=NUM_ENVS):
    """What must come out, recomputed from the rules of the counting environment alone: (t, e, seed, steps before)."""
    queue, lines = count(START), []
    playing, steps = [next(queue) for _ in range(num_envs)], [0] * num_envs
    for t in range(decisions):
        lines += [(t, e, playing[e], steps[e]) for e in range(num_envs)]
        for e in range(num_envs):
            steps[e] += horizon
            if steps[e] >= episode_length(np.array(playing[e])):
                playing[e], steps[e] = next(queue), 0
    return lines


@pytest.mark.parametrize(("horizon", "decisions"), CASES)
def test_every_number_can_be_recomputed(horizon, decisions):
    rollout = join(windows(horizon, decisions))
    lines = expected(horizon, 4 * decisions)
    assert rollout.reward.shape == (4 * decisions, NUM_ENVS, horizon)
    seeds, steps = np.array(lines)[:, 2:].T.reshape(2, -1, NUM_ENVS)
    number, length = steps[..., None] + np.arange(1, horizon + 1), episode_length(seeds)
    valid, over, even = number <= length[..., None], steps + horizon >= length, seeds % 2 == 0
    wanted = {
        "seeds": seeds,
        "valid": valid,
        "reward": np.where(valid, expected_reward(number), 0),
        "terminated": over & even,
        "success": over & even,
        "truncated": over & ~even,
        "logprob": -steps,
    }
    for name, values in wanted.items():
        assert np.array_equal(getattr(rollout, name), values), name
    assert np.array_equal(rollout.features["counters"][:-1], np.stack([seeds, steps], -1))
    assert np.array_equal(rollout.sample[..., 0], number) and not rollout.intervened.any()
    assert (rollout.aux["row"] == torch.arange(NUM_ENVS)).all()
    truncated = np.argwhere(over & ~even)
    assert len(truncated) > 5 and np.array_equal(rollout.final_index, truncated)
    final = np.stack([seeds, length], -1)[over & ~even]
    assert np.array_equal(rollout.final_features["counters"], final)


@pytest.mark.parametrize(("horizon", "decisions"), CASES)
def test_windows_join_without_loss(horizon, decisions):
    parts = windows(horizon, decisions)
    for one, next_features in pairwise(parts):
        assert all(torch.equal(one.features[name][-1], next_features.features[name][0]) for name in one.features)
    assert equal_rollouts(join(parts), windows(horizon, 4 * decisions, 1)[0])


def test_every_reset_environment_is_reset_in_the_policy_too():
    policy = AuditingPolicy(4)
    rollout = join(windows(4, 9, policy=policy))
    ended = [e for t in range(36) for e in range(NUM_ENVS) if rollout.terminated[t, e] or rollout.truncated[t, e]]
    assert policy.resets == [*range(NUM_ENVS), *ended]
    assert rollout.terminated.any() and rollout.truncated.any()


def test_counters_and_seconds_are_those_of_the_window():
    for rollout in windows(4, 9):
        ended = rollout.terminated | rollout.truncated
        assert rollout.info["env/steps"] == rollout.valid.sum() and rollout.info["rollout/episodes"] == ended.sum()
        assert rollout.info["rollout/successes"] == rollout.success.sum()
        assert all(rollout.info[name] > 0 for name in ("time/env_s", "time/encode_s", "time/act_s"))


def test_the_version_is_that_of_the_policy_that_acted():
    maker = source()
    for version in (0, 0, 3):
        maker.policy.version = version
        assert (maker.next().version == version).all()


def test_nothing_privileged_is_shown_to_the_policy():
    """The auditing policy asserts it, at resets, after steps and at truncations; other extras do arrive."""
    maker = source(env=PrivilegedEnv(NUM_ENVS))
    assert len(maker.next().final_index) > 0 and all(names == {"force"} for names in maker.policy.extras)


def test_a_nan_is_refused_before_anything_moves():
    env = make("counting", num_envs=NUM_ENVS)
    maker = source(4, 6, policy=NanPolicy(4), env=env)
    parts, snapshots = [maker.next()], []
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"version 0.*environment 2.*nothing was executed"):
            maker.next()
        snapshots.append(env.snapshot(np.arange(NUM_ENVS)))
    assert maker.policy.calls == 9  # the seventh was executed, the eighth and its repetition were not
    assert all(np.array_equal(snapshots[0][name], snapshots[1][name]) for name in snapshots[0])
    maker.policy.mended = True
    parts += [maker.next() for _ in range(3)]
    whole = windows(4, 24, 1)[0]
    assert torch.equal(join(parts).reward, whole.reward) and torch.equal(join(parts).seeds, whole.seeds)


def test_a_full_window_waits_until_it_is_delivered():
    maker = source(4, 6)
    parts = []
    for _ in range(2):
        assert [maker.advance() for _ in range(8)] == [False] * 5 + [True] * 3
        parts.append(maker.deliver())
    whole = windows(4, 12, 1)[0]
    assert torch.equal(join(parts).reward, whole.reward) and torch.equal(join(parts).seeds, whole.seeds)


def test_seeds_come_once_each_before_they_repeat():
    assert list(islice(SeedStream(3, 6), 7)) == [3, 4, 5, 3, 4, 5, 3]


# -- the audit itself can fail ----------------------------------------------------------------------------------------


class Tampered:
    """The counting environment, of whose actions or shown observations something is changed."""

    def __init__(self, shown=lambda obs: obs, chosen=lambda chunk: chunk) -> None:
        self.env, self.shown, self.chosen = make("counting", num_envs=NUM_ENVS), shown, chosen
        self.spec, self.num_envs, self.reset = self.env.spec, NUM_ENVS, self.env.reset

    def step(self, chunk, observe="last"):
        step = self.env.step(self.chosen(chunk), observe)
        return replace(step, obs=self.shown(step.obs))


@pytest.mark.parametrize(
    "changes",
    [
        {"shown": lambda obs: obs.select(np.array([1, 0, 2, 3, 4]))},  # rows swapped
        {"shown": lambda obs: replace(obs, time=obs.time - 1)},  # an old observation
        {"shown": lambda obs: replace(obs, images={"audit": obs.images["audit"] + 1})},
        {"chosen": lambda chunk: chunk[::-1].copy()},  # actions of another row
    ],
)
def test_the_audit_notices(changes):
    with pytest.raises(AssertionError):
        source(env=Tampered(**changes)).next()


def test_the_audit_notices_a_policy_that_is_not_reset():
    maker = source()
    reset, maker.policy.reset_state = maker.policy.reset_state, lambda state, num_envs: state
    maker.driver.state = reset(maker.driver.state, np.arange(NUM_ENVS))
    with pytest.raises(AssertionError, match="jumped"):
        maker.next()


# -- executed actions, and the context of policies that have one -------------------------------------------------------


class Supervised:
    """The counting environment with a person who replaces every third action by its negative."""

    def __init__(self) -> None:
        self.env = make("counting", num_envs=NUM_ENVS)
        self.spec, self.num_envs, self.reset = self.env.spec, NUM_ENVS, self.env.reset

    def step(self, chunk, observe="last"):
        step = self.env.step(chunk, observe)
        acted = step.valid & (step.executed[..., 0].astype(int) % 3 == 0)
        executed = np.where(acted[..., None], -step.executed, step.executed)
        return replace(step, executed=executed, intervened=acted)


def test_executed_holds_chosen_actions_after_an_end():
    """So its features do not reveal the end of the episode to a critic."""
    sources = [
        RolloutSource(Supervised(), AuditingPolicy(4), 20, SeedStream(300, 10**9), torch.Generator()),
        GroupConfig(2, 3, 1, 20).build(Supervised(), AuditingPolicy(4), SeedStream(300, 400), torch.Generator()),
    ]
    for rollout in (source.next() for source in sources):
        acting = rollout.valid.any(-1)
        chosen = rollout.sample[acting]
        changed = (rollout.valid & (rollout.sample[..., 0] % 3 == 0))[acting]
        assert torch.equal(rollout.intervened[acting], changed) and 20 < changed.sum() < changed.numel() / 2
        assert torch.equal(rollout.executed[acting], torch.where(changed[..., None], -chosen, chosen))
        assert (~rollout.valid)[acting].sum() > 5


class Contextual(AuditingPolicy):
    """Its features hold the state of each environment: seed and step that are due, and whether it was just reset."""

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.encoded = 0

    def context(self, features, state, generator):
        self.encoded += len(features["counters"])
        return {**features, "context": torch.stack([state["seed"], state["steps"], state["fresh"].long()], 1)}, state


def test_every_observation_gets_the_context_of_its_own_episode():
    policy = Contextual(4)
    rollout = RolloutSource(
        make("counting", num_envs=NUM_ENVS), policy, 30, SeedStream(300, 10**9), torch.Generator()
    ).next()
    counters, context = rollout.features["counters"], rollout.features["context"]
    fresh = context[..., 2] == 1
    assert torch.equal(context[~fresh][:, :2], counters[~fresh]) and not counters[fresh][:, 1].any()
    ended = rollout.terminated | rollout.truncated
    assert torch.equal(fresh[1:], ended) and fresh[0].all()
    finals = torch.cat([rollout.final_features["counters"], torch.zeros(len(rollout.final_index), 1)], 1)
    assert len(finals) > 5 and torch.equal(rollout.final_features["context"], finals.long())
    assert policy.encoded == 31 * NUM_ENVS + len(finals)


def test_a_truncated_member_has_its_own_environments_context():
    policy = Contextual(4)
    config = GroupConfig(groups=6, size=4, ahead=2, limit=40)
    source = config.build(LuckyEnv(9), policy, SeedStream(300, 9000), torch.Generator())
    rollouts = [source.next() for _ in range(4)]
    finals = [(part.final_features["counters"], part.final_features["context"]) for part in rollouts]
    assert sum(len(counters) for counters, _ in finals) > 20
    for counters, context in finals:
        assert torch.equal(context, torch.cat([counters, torch.zeros(len(counters), 1, dtype=torch.long)], 1))
    for part in rollouts:
        assert torch.equal(part.final_features["counters"][:, 0], part.seeds[tuple(part.final_index.T)])
        played, fresh = part.valid.any(-1), part.features["context"][:-1, ..., 2] == 1
        same = (part.features["context"][:-1, ..., :2] == part.features["counters"][:-1]).all(-1)
        assert (same | fresh)[played].all() and torch.equal(fresh[0], played[0])


class Stopping(AuditingPolicy):
    """Fails at its fourth decision, so that a test can inspect the collected data."""

    calls = 0

    def act(self, features, state, mode, generator):
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("stopped")
        return super().act(features, state, mode, generator)


def test_sources_keep_no_pictures_beside_the_features():
    """The policy decides whether pictures are kept; those of the environment are freed at once."""
    windows = RolloutSource(
        make("counting", num_envs=NUM_ENVS), Stopping(4), 9, SeedStream(300, 10**9), torch.Generator()
    )
    groups = GroupConfig(2, 3, 1, 20).build(LuckyEnv(5), Stopping(4), SeedStream(300, 400), torch.Generator())
    for source in (windows, groups):
        with pytest.raises(RuntimeError, match="stopped"):
            source.next()
    for decision in [*windows._window.decisions, *groups._decisions]:
        assert not decision.obs.images and not decision.step.obs.images and not decision.step.frames
    assert len(windows._window.decisions) == len(groups._decisions) == 3
