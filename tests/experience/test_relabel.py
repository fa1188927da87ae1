"""Recorded episodes as experience: what a policy would have decided on, and how each episode ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import episode_length
from tests.auditing import AuditingPolicy
from tests.experience.makers import recorded
from tests.experience.replays import GAMMA, audit
from tests.experience.test_demonstrations import count
from tests.residuals import COUNTING, SMALL, PacingBase, StateEncoder, stepping_base
from tests.toys import seeded
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.experience.collect import collect_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.relabel import INTERVENTION, relabelled
from vla_rl.experience.replay import Interventions, Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.residual import DeterministicResidual

SEEDS = range(300, 316)


@pytest.fixture(scope="module")
def successes() -> Demonstrations:
    return collect_demonstrations(make("counting", num_envs=3), count, list(SEEDS))


def everything(flags: str = "next.success") -> Demonstrations:
    """Odd episodes as well, which are truncated and not successes; ``flags`` says which of the ends were recorded."""
    env, parts = make("counting", num_envs=1), []
    for seed in SEEDS:
        obs, kept, rewards = env.reset([0], [seed]), [], []
        while True:
            action = count(obs)
            kept.append((obs, action[0, 0]))
            step = env.step(action)
            obs, rewards = step.obs, [*rewards, float(step.reward[0, 0])]
            if step.done[0]:
                break
        length = len(kept)
        ends = (np.arange(length) == length - 1) & bool(step.success[0])
        part = recorded(
            np.stack([action for _, action in kept]),
            images={"audit": np.concatenate([item.images["audit"] for item, _ in kept])},
            state=np.concatenate([item.state for item, _ in kept]),
            task=np.concatenate([item.task for item, _ in kept]),
            seed=np.full(length, seed),
            tasks=env.spec.tasks,
            extras={"next.reward": np.array(rewards, np.float32), flags: ends},
        )
        parts.append(part)
    return Demonstrations.joined(parts)


@pytest.mark.parametrize(("horizon", "n_step"), [(1, 3), (4, 2)])
def test_relabelled_successes_equal_the_original_decisions(successes, horizon, n_step):
    """Read by the rules of the counting environment, as if a policy had played them."""
    replay = Replay(500, GAMMA, n_step)
    policy, lengths = AuditingPolicy(horizon), episode_length(np.array(SEEDS)[::2])
    for rollout in relabelled(successes, policy, COUNTING, horizon, seeded()):
        assert not rollout.sample.any() and not rollout.intervened.any() and bool(rollout.success[-1])
        over = rollout.executed[~rollout.valid]
        assert torch.equal(over, rollout.executed[rollout.valid][-1:].expand_as(over))  # the last action again
        whole = torch.stack(
            [
                rollout.features["counters"][:-1, :, 1, None] + 1 + torch.arange(horizon),
                rollout.seeds[..., None].expand(-1, -1, horizon),
            ],
            -1,
        ).float()
        assert torch.equal(rollout.executed[rollout.valid], whole[rollout.valid])
        replay.add(replace(rollout, sample=whole, executed=whole))
    assert len(replay) == (-(-lengths // horizon)).sum()
    audit(replay.transitions(replay.decisions()), horizon, n_step)


@pytest.mark.parametrize("flags", ["next.success", "next.done"])
def test_an_unfinished_recording_is_truncated_at_its_end(flags):
    """Its last action, whose outcome was not recorded, is left out."""
    for seed, rollout in zip(
        SEEDS, relabelled(everything(flags), AuditingPolicy(4), COUNTING, 4, seeded()), strict=True
    ):
        length = int(episode_length(np.array(seed)))
        known = length - seed % 2
        assert rollout.valid.sum() == known and rollout.seeds.unique().tolist() == [seed]
        assert rollout.reward.sum() == known * (known + 1) / 2
        assert bool(rollout.truncated[-1]) == seed % 2 != bool(rollout.terminated[-1])
        assert not (rollout.terminated | rollout.truncated)[:-1].any()
        if seed % 2:
            assert rollout.final_features["counters"].tolist() == [[seed, length - 1]]
            assert rollout.final_index.tolist() == [[len(rollout.reward) - 1, 0]]
        else:
            assert not len(rollout.final_index) and not len(rollout.final_features["counters"])


def test_without_flags_every_episode_is_truncated(successes):
    bare = replace(successes, extras={"next.reward": successes.extras["next.reward"]})
    found = list(relabelled(bare, AuditingPolicy(4), COUNTING, 4, seeded()))
    assert all(rollout.truncated[-1] and not rollout.terminated.any() for rollout in found)


def test_corrections_stay_marked(successes):
    """Whoever fills a replay buffer from a folder still finds the actions of a person, and the robot and task."""
    acted = successes.time % 7 == 3
    task = successes.time // 4 % 2
    episodes = replace(successes, robot="arm", task=task, extras={**successes.extras, INTERVENTION: acted})
    replay = Replay(500, GAMMA)
    for rollout in relabelled(episodes, AuditingPolicy(4), COUNTING, 4, seeded()):
        step = rollout.features["counters"][:-1, :, 1, None] + torch.arange(4)
        assert torch.equal(rollout.intervened, rollout.valid & (step % 7 == 3)) and (rollout.version == -1).all()
        replay.add(rollout)
    assert 10 < len(Interventions(replay)) < len(replay) and replay.robots == ["arm"]
    found = replay.transitions(replay.decisions())
    assert torch.equal(found.task, found.features["counters"][:, 1] // 4 % 2)


def test_every_offset_begins_a_decision(successes):
    """With as many offsets as a chunk has actions, a chunk begins at every step; also in the shortest episode."""
    for horizon in (4, 8):
        found = list(relabelled(successes, AuditingPolicy(horizon), COUNTING, horizon, seeded(), horizon))
        first_steps = [line for item in found for line in item.features["counters"][:-1, 0].tolist()]
        steps = [[int(seed), int(time)] for seed, time in zip(successes.seed, successes.time, strict=True)]
        assert sorted(first_steps) == sorted(steps) and min(np.bincount(successes.episode)) < 8
        assert all(
            int(item.valid.sum())
            == item.features["counters"][0, 0, 1].neg() + episode_length(np.array(int(item.seeds[0, 0])))
            for item in found
        )


def as_recorded(rollout: Rollout) -> tuple[Demonstrations, list[list[int]]]:
    """The ended episodes of a rollout with one action a decision, as if recorded, and (row, decisions) of each."""
    parts, sources = [], []
    for row in range(rollout.reward.shape[1]):
        begin = 0
        for t in (rollout.terminated | rollout.truncated)[:, row].nonzero().flatten().tolist():
            span, length = slice(begin, t + 1), t + 1 - begin
            extras = {
                "next.reward": rollout.reward[span, row, 0].numpy(),
                "next.success": rollout.terminated[span, row].numpy(),
            }
            parts.append(
                recorded(
                    rollout.executed[span, row, 0].numpy(),
                    images={"audit": np.zeros((length, 4, 4, 3), np.uint8)},
                    state=rollout.features["state"][span, row].numpy(),
                    seed=np.full(length, int(rollout.seeds[t, row])),
                    tasks=COUNTING.tasks,
                    extras=extras,
                )
            )
            sources.append([row, *range(begin, t + 1)])
            begin = t + 1
    return Demonstrations.joined(parts), sources


@pytest.mark.parametrize("base", [stepping_base, lambda: PacingBase(COUNTING)], ids=["function", "own state"])
def test_the_base_acts_as_in_a_live_rollout(base):
    policy = DeterministicResidual(base(), StateEncoder(COUNTING), SMALL)
    live = RolloutSource(make("counting", num_envs=4), policy, 60, SeedStream(300, 10**9), seeded()).next()
    episodes, sources = as_recorded(live)
    assert len(sources) > 10
    for rollout, (row, *times) in zip(relabelled(episodes, policy, COUNTING, 1, seeded()), sources, strict=True):
        ended = bool(rollout.terminated[-1])
        for name in ("base_action", "base_plan", "state", "time"):
            assert torch.equal(rollout.features[name][: len(times), 0], live.features[name][times, row]), name
        assert ended == bool(live.terminated[times[-1], row])
        kept = times if ended else times[:-1]
        assert torch.equal(rollout.executed[:, 0], live.executed[kept, row])
        assert torch.equal(rollout.reward[:, 0], live.reward[kept, row])


def test_episodes_that_do_not_fit_are_refused(successes):
    def first(episodes: Demonstrations) -> Rollout:
        return next(relabelled(episodes, AuditingPolicy(4), COUNTING, 4, seeded()))

    with pytest.raises(ContractError, match=r"have no 'next.reward' but \['next.done', 'next.success'\]"):
        first(replace(successes, extras={k: v for k, v in successes.extras.items() if k != "next.reward"}))
    with pytest.raises(ContractError, match="actions have 1 entries but 'counting' has 2"):
        first(replace(successes, action=successes.action[:, :1]))
    action = successes.action.copy()
    action[5, 0] = 65.0
    with pytest.raises(
        ContractError, match=r"entry 0 .* is 65 at step 5, outside the bounds \[-64, 64\] of 'counting'"
    ):
        first(replace(successes, action=action))
    with pytest.raises(ContractError, match="the task 'count the odd one'"):
        first(replace(successes, tasks=("count the odd one", "count the odd episode")))
