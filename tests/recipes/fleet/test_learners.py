"""Learners of a fleet: what robots sent is learnt from as the simulation had it; off-policy ones resume exactly."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.recipes.fleet import configs
from tests.recipes.fleet.conftest import Start
from vla_rl.algorithms.chunks import DEMONSTRATED, chunks_of
from vla_rl.algorithms.guard import ReleaseConfig
from vla_rl.algorithms.offline import WSRLConfig
from vla_rl.algorithms.recap import outcomes_of
from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.intervention import PersonConfig
from vla_rl.experience.replay import Replay
from vla_rl.fleet.episodes import FleetEpisode
from vla_rl.fleet.payloads import EpisodeEnd, FleetStep
from vla_rl.fleet.record import Sender
from vla_rl.fleet.sampler import AdaptiveSampler, SamplerConfig
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.residual import DeterministicResidual, ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.fleet.learners import (
    BalancedChunks,
    LearnByReplay,
    ReplayLearner,
    recorded_rollout,
    relabelled_episode,
)
from vla_rl.recipes.fleet.simulate import Corrects, FleetTimes, Timeline, VirtualReleases, VirtualRobot, micros
from vla_rl.recipes.policies import SACLatent
from vla_rl.recipes.trainers import AdaptiveReplay

TIMES = FleetTimes(decision=0.02, reset=0.3, upload=0.1)
METHOD = configs.REPLAY


class Recorded:
    """``env`` that notes what a robot would record of every episode (``VecEnv``)."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.spec, self.num_envs = env, env.spec, env.num_envs
        self.steps: list[list[FleetStep]] = []
        self.people: list[list[bool]] = []

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        self.obs = self.env.reset(env_ids, seeds)
        self.steps.append([])
        self.people.append([])
        return self.obs

    def step(self, chunk: Any, observe: Any = "last") -> Any:
        obs, step = self.obs, self.env.step(chunk, observe)
        images = {name: np.array(item[0]) for name, item in obs.images.items()}
        action, time = np.array(step.executed[0, 0], np.float32), len(self.steps[-1])
        self.steps[-1].append(FleetStep(images, np.array(obs.state[0]), time, action, {}))
        self.people[-1].append(bool(step.intervened[0, 0]))
        self.task = int(obs.task[0])
        self.obs = step.obs
        return step

    def close(self) -> None:
        self.env.close()


def sways(obs: Observation) -> np.ndarray:
    """[E,3,D]: the first entries follow the clock and the arm's position."""
    chunk = np.zeros((len(obs.time), 3, SPEC.action_dim), np.float32)
    chunk[..., 0] = 0.1 * np.sin(np.asarray(obs.time)[:, None] + np.arange(3))
    chunk[..., 1] = 0.05 * obs.state[:, :1]
    return chunk


SPEC = EnvConfig("lift").spec()


@pytest.fixture(scope="module")
def policy(start: Start) -> DeterministicResidual:
    """A residual with random weights over a base without noise."""
    encoder = load_policy(start.policy)
    made = DeterministicResidual(FunctionPolicy(SPEC, sways), encoder, ResidualConfig(head=METHOD.policy.residual.head))
    for number, weights in enumerate(made.trainable().values()):
        weights.data += 0.2 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(number))
    return made


def played(policy: Any, person: PersonConfig, deadline: int, seconds: float) -> list[tuple[Rollout, FleetEpisode]]:
    """Episodes as the fleet in virtual time gives them, and as a robot would send them."""
    lift, timeline, found = EnvConfig("lift", options={"deadline": deadline}), Timeline(), []
    (watched,) = Corrects("sims.mujoco.tasks.lift:potential", person).watch([lift.make(1)], lift)
    env = Recorded(watched)

    def deliver(rollout: Rollout) -> None:
        number = len(found)
        steps, people = env.steps[number], env.people[number]
        outcome = "success" if bool(rollout.success.any()) else "failure"
        end = EpisodeEnd(outcome, len(steps), sum(people), 0, 1.0)
        task, sender = SPEC.tasks[int(rollout.task[0, 0])], Sender("robot-0", "0")
        versions = tuple(rollout.version.flatten().tolist())
        sent = FleetEpisode(sender, str(number), task, SPEC, tuple(steps), versions, tuple(people), end)
        found.append((rollout, sent))

    VirtualRobot(0, env, iter(range(100)), VirtualReleases(policy), TIMES, timeline, deliver, 1, "sample")
    timeline.run(micros(seconds))
    env.close()
    return found


@pytest.fixture(scope="module")
def episodes(policy: DeterministicResidual) -> list[tuple[Rollout, FleetEpisode]]:
    """Failed ones with short interventions, and one that the person brings to its end."""
    short = played(policy, PersonConfig(patience=2, delay=1, hold=3, max_share=0.5), 12, 4.0)
    rescued = played(policy, PersonConfig(patience=1, delay=0, hold=60, max_share=1.0), 40, 3.5)
    return [*short, *rescued]


def slots(rollout: Rollout) -> Replay:
    replay = Replay(100, 0.9, 3)
    replay.add(rollout)
    return replay


def test_what_a_robot_sent_is_in_the_replay_slot_by_slot_as_the_simulation_had_it(policy, episodes) -> None:
    assert {episode.end.outcome for _, episode in episodes} == {"success", "failure"}
    assert any(0 < sum(episode.intervened) < len(episode.steps) - 1 for _, episode in episodes)
    for rollout, episode in episodes:
        again = relabelled_episode(policy, episode, {0})
        assert torch.equal(again.success, rollout.success)
        simulated, sent = slots(rollout), slots(again)
        decisions = simulated.decisions()
        assert decisions.tolist() == sent.decisions().tolist() == list(range(len(episode.steps)))
        ours, theirs = (replay.transitions(decisions) for replay in (simulated, sent))
        corrections = [policy.critic_action(item.features, item.sample, item.executed) for item in (ours, theirs)]
        torch.testing.assert_close(*corrections, atol=1e-5, rtol=0)
        for name in ("executed", "reward", "discount", "returns", "intervened", "version", "task", "robot"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-6, rtol=0, msg=name)
        going_on = ours.discount > 0  # what follows an end has no value
        for name in ours.features:
            torch.testing.assert_close(ours.features[name], theirs.features[name], atol=1e-4, rtol=0, msg=name)
            after = (item.next_features[name][going_on] for item in (ours, theirs))
            torch.testing.assert_close(*after, atol=1e-4, rtol=0, msg=name)


def test_an_episode_that_nobody_judged_is_truncated_before_its_last_action(policy, episodes) -> None:
    rollout, episode = episodes[0]
    late = replace(episode, end=replace(episode.end, outcome="time_limit"))
    found = relabelled_episode(policy, late, {0})
    assert len(found.reward) == len(episode.steps) - 1 and bool(found.truncated[-1, 0])
    assert not found.terminated.any() and not found.reward.any()
    expected = rollout.features["base_action"][-2]  # where the last action was chosen
    torch.testing.assert_close(found.final_features["base_action"], expected, atol=1e-5, rtol=0)


def test_a_version_of_another_policy_counts_as_the_first(policy, episodes) -> None:
    episode = episodes[0][1]
    versions = tuple(7 if i < 2 else 3 for i in range(len(episode.steps)))
    found = relabelled_episode(policy, replace(episode, versions=versions), {3})
    assert found.version.flatten().tolist() == [0, 0] + [3] * (len(versions) - 2)
    assert found.robot == "robot-0" and found.seeds.unique().tolist() == [-1]


def test_a_chunk_begins_at_every_step_for_a_policy_that_decides_by_chunks(episodes, start) -> None:
    method = configs.rlpd().method
    found = method.rollout(built(method, start).policy, replace(episodes[0][1], versions=tuple(range(12))), range(12))
    assert found.executed.shape[:3] == (6, 2, 2) and found.valid.sum() == 12 + 11
    assert found.version[:, 0].tolist() == [0, 2, 4, 6, 8, 10] and found.version[:, 1].tolist() == [1, 3, 5, 7, 9, 11]
    assert found.intervened[found.valid].sum() == 2 * sum(episodes[0][1].intervened) - episodes[0][1].intervened[0]


# -- the learner ------------------------------------------------------------------------------------------------------


def built(method: LearnByReplay, start: Start) -> ReplayLearner:
    return method.build(load_policy(start.policy), start.episodes.with_tasks(SPEC.tasks), 1)


def fed(learner: ReplayLearner, episodes: list[tuple[Rollout, FleetEpisode]], method: LearnByReplay = METHOD) -> None:
    for _, episode in episodes:
        learner.add(method.rollout(learner.policy, episode, {0}))


def flat(state: Any) -> Any:
    """``state`` with bytes in place of tensors."""
    if isinstance(state, dict):
        return {name: flat(item) for name, item in state.items()}
    if isinstance(state, (list, tuple)):
        return [flat(item) for item in state]
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else state


def weights(learner: ReplayLearner) -> list[torch.Tensor]:
    return [item.detach().clone() for item in learner.learner.learnt.values()]


def test_nothing_is_learnt_before_the_robots_have_done_enough_and_the_critics_begin(start, episodes) -> None:
    learner = built(replace(METHOD, algorithm=replace(METHOD.algorithm, learning_starts=13, critic_warmup=3)), start)
    fed(learner, episodes[:1])
    assert learner.learn(5) == {} and learner.learner.steps == 0 and learner.learner.decisions == 12
    fed(learner, episodes[1:])
    before = weights(learner)
    assert learner.learn(3)["critic/steps"] == 3 and "policy/loss" not in learner.learn(0)
    assert all(torch.equal(*pair) for pair in zip(before, weights(learner), strict=True))
    assert "policy/loss" in learner.learn(1), "the fourth: after the warm-up, and every second one"
    assert "policy/loss" not in learner.learn(1)
    assert any(not torch.equal(*pair) for pair in zip(before, weights(learner), strict=True))


def test_the_actor_waits_while_the_critics_do_not_foresee_how_episodes_end(start, episodes) -> None:
    learner = built(replace(METHOD, algorithm=replace(METHOD.algorithm, release=ReleaseConfig())), start)
    fed(learner, episodes)
    assert len(learner.learner.guard.release.recent) == len(episodes)
    assert "policy/loss" not in learner.learn(8)


def test_corrections_have_their_share_and_what_is_too_old_is_not_drawn_unless_a_person_did_it(start, episodes) -> None:
    sampler = SamplerConfig(min_corrections=0.5)
    learner = built(replace(METHOD, replay=AdaptiveReplay(capacity=500, max_age=2, sampler=sampler)), start)
    fed(learner, episodes)
    noise = torch.Generator().manual_seed(1)
    drawn = learner.learner.replay.sample(2000, noise)
    assert abs(float(drawn.intervened.double().mean()) - 0.5) < 0.05
    assert bool(((drawn.version == 0) & ~drawn.intervened).any()) and bool((drawn.version == -1).any())
    learner.policy.version = 3
    drawn = learner.learner.replay.sample(2000, noise)
    assert not ((drawn.version == 0) & ~drawn.intervened).any() and bool(drawn.intervened.any())


def test_tasks_are_families(start, episodes) -> None:
    base, shown = load_policy(start.policy), start.episodes.with_tasks(SPEC.tasks)
    names = ("round", "flat", "round", "flat")
    base.spec = replace(base.spec, families=names)
    learner = METHOD.build(base, shown, 1)
    fed(learner, episodes)
    replay = learner.learner.replay
    played, recorded = {SPEC.tasks.index(episode.task) for _, episode in episodes}, shown.task.tolist()
    for part, tasks in ((replay.online, played), (replay.recorded, recorded)):
        found = part.transitions(part.decisions()).task
        assert set(found.tolist()) == {("flat", "round").index(names[task]) for task in tasks}


def test_a_learner_goes_on_from_its_state_bit_for_bit(start, episodes) -> None:
    learner = built(METHOD, start)
    fed(learner, episodes[:2])
    learner.learn(4)
    state = copy.deepcopy(learner.state_dict())
    resumed = built(METHOD, start)
    resumed.load_state_dict(state)
    for one in (learner, resumed):
        fed(one, episodes[2:])
        one.learn(4)
    assert flat(learner.state_dict()) == flat(resumed.state_dict())


def test_what_a_fleets_learner_cannot_do_is_refused_in_one_sentence(start, episodes) -> None:
    with pytest.raises(UserError, match="WSRLConfig takes 1000000 steps before the first decision"):
        built(replace(configs.rlpd().method, algorithm=WSRLConfig(num_critics=2)), start)
    with pytest.raises(UserError, match="SquashedLatent chooses noise"):
        built(replace(METHOD, policy=SACLatent()), start)
    with pytest.raises(UserError, match=r"leave replay\.folder out"):
        built(replace(METHOD, replay=replace(METHOD.replay, folder="replay")), start)
    learner = built(METHOD, start)
    with pytest.raises(ContractError, match="version 7 but the learner has version 0"):
        learner.add(METHOD.rollout(learner.policy, replace(episodes[0][1], versions=(7,) * 12), {7}))


# -- what was recorded -------------------------------------------------------------------------------------------------


def test_every_step_of_a_demonstration_begins_a_decision_whose_return_counts_what_is_left(start) -> None:
    episodes = start.episodes
    rollout = recorded_rollout(load_policy(start.policy), episodes)
    outcomes, known = outcomes_of(rollout, 40, 1.0)
    assert int(known.sum()) == len(episodes.state) and bool(outcomes.human.all())
    left = [end - step for begin, end in episodes.spans() for step in range(begin, end)]
    assert sorted(outcomes.to_end.tolist()) == sorted(left)
    np.testing.assert_array_equal(rollout.executed[0, :, 0], episodes.action[_begins(episodes, 5)])
    assert set(rollout.version[rollout.valid.any(-1)].tolist()) == {DEMONSTRATED}


def _begins(episodes, horizon: int) -> list[int]:
    return [begin + i for begin, _ in episodes.spans() for i in range(horizon)]


def test_corrections_are_drawn_as_often_as_the_sampler_says(start) -> None:
    policy = load_policy(start.policy)
    rollout = recorded_rollout(policy, start.episodes)
    chunks = chunks_of(replace(rollout, version=rollout.version.clone()), rollout.valid, policy)
    kind = torch.arange(len(chunks)) % 10  # 0: a correction, 1 to 4 alone, others recorded
    chunks = replace(chunks, version=torch.where(kind < 5, 3, DEMONSTRATED), task=torch.zeros(len(chunks), dtype=int))
    sampler = BalancedChunks(AdaptiveSampler(SamplerConfig(min_corrections=0.3)), torch.zeros(1, dtype=int))
    generator = torch.Generator().manual_seed(0)
    drawn = kind[sampler.draw(chunks, kind != 1, 4000, generator)]
    sampler.record(torch.ones(4000))
    assert abs((drawn < 5).double().mean() - 0.5) < 0.2
    assert sampler.state_dict()["losses"].keys() == {"0/0", "0/1", "0/2"}
