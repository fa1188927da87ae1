"""Others' rollouts beside one's own: weighted by importance, kept apart in groups, left out of one's own numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.algorithms.test_grpo import learner as grpo_learner
from tests.algorithms.test_grpo import play
from tests.experience.makers import gaussian
from tests.toys import FlowToy, rollout
from vla_rl.algorithms.decisions import own_columns
from vla_rl.algorithms.gorl import GoRL
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Resumable, Rollout
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Likelihood
from vla_rl.experience.board import Board, SharedSource, beside

OWN, OTHER = (0.2, 0.5, 0.3), (0.5, 0.3, 0.2)  # probabilities of three actions


class Softmax(FlowToy):
    """Three actions, whatever the state; ``sample`` is the index."""

    def __init__(self) -> None:
        super().__init__(width=1)
        self.logits = nn.Parameter(torch.tensor(OWN, dtype=torch.float64).log())

    def log_prob(self, features, sample, aux) -> Likelihood:
        all_of_them = self.logits.log_softmax(-1).expand(len(sample), 3)
        chosen = all_of_them.gather(1, sample.long().flatten(1))[:, 0]
        return Likelihood(chosen, -(all_of_them.exp() * all_of_them).sum(-1), {"log_probs": all_of_them})

    def kl(self, old, new) -> Tensor:
        return (old["log_probs"].exp() * (old["log_probs"] - new["log_probs"])).sum(-1)

    def trainable(self):
        return {"logits": self.logits}


class Zero(nn.Module):
    """A critic that expects nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, features) -> Tensor:
        return 0 * self.nothing * features["state"][..., 0]


def ppo(**changes) -> PPO:
    config = PPOConfig(epochs=1, minibatch=1000, critic_warmup=0, grad_norm=math.inf, target_kl=9.0, **changes)
    policy = Softmax()
    learner = PPO(policy, policy.trainable(), Zero(), config, torch.Generator())
    learner.optimizer = torch.optim.SGD([policy.logits], lr=1.0)  # so that a step is the gradient
    return learner


def chosen(actions, probabilities, rewards, version: int) -> Rollout:
    """One decision in each of ``len(actions)`` environments, by a policy with these ``probabilities``."""
    index, state = torch.tensor(actions), torch.zeros(2, len(actions), 1, dtype=torch.float64)
    sample = index[:, None, None].double()
    out = ActionOut(sample, sample, torch.tensor(probabilities, dtype=torch.float64)[index].log())
    reward = torch.tensor(rewards, dtype=torch.float64)[index][None, :, None]
    versions, task = torch.full((1, len(actions)), version), torch.zeros(1, len(actions), dtype=torch.long)
    return rollout({"state": state}, out, reward, version=versions, task=task)


@pytest.mark.parametrize("bound", [1.2, 2.0])
def test_the_gradient_of_ppo_with_decisions_of_another_policy_by_hand(bound):
    """d/d logits of -1/N sum w A log pi(a) is -1/N sum w A (e_a - pi), with w = 1 for one's own decisions."""
    learner, rewards = ppo(max_importance_weight=bound), (1.0, -1.0, 3.0)
    learner.policy.version = 7
    own, other = chosen([0, 1, 2, 1], OWN, rewards, 7), chosen([0, 1, 2, 0, 1], OTHER, rewards, 90)
    metrics = learner.update(beside(own, [other], learner.policy.version - 1))
    actions = [0, 1, 2, 1, 0, 1, 2, 0, 1]
    earned = [rewards[action] for action in actions]
    mean = sum(earned) / 9
    std = (sum((item - mean) ** 2 for item in earned) / 9) ** 0.5
    weights = [1.0] * 4 + [min(OWN[action] / OTHER[action], bound) for action in actions[4:]]
    assert sorted(set(weights)) == pytest.approx([0.4, 1.0, *sorted({min(1.5, bound), min(5 / 3, bound)})])
    gradient = [
        -sum(
            weight * (item - mean) / std * ((action == k) - OWN[k])
            for weight, item, action in zip(weights, earned, actions, strict=True)
        )
        / 9
        for k in range(3)
    ]
    moved = learner.policy.logits.detach() - torch.tensor(OWN, dtype=torch.float64).log()
    assert moved.tolist() == pytest.approx([-item for item in gradient], abs=1e-7)
    assert metrics["policy/importance_weight"] == pytest.approx(sum(weights[4:]) / 5)
    assert metrics["rollout/stale"] == pytest.approx(5 / 9) and metrics["rollout/decisions"] == 9


def test_weighted_samples_of_another_policy_have_the_own_policy_s_mean():
    """Each action as often as the other policy chooses it in ten decisions: sum mu (pi/mu) f = sum pi f."""
    learner, f = ppo(max_importance_weight=100.0), torch.tensor([3.0, -1.0, 10.0], dtype=torch.float64)
    own, other = chosen([0, 1], OWN, (1.0, 2.0, 3.0), 0), chosen([0] * 5 + [1] * 3 + [2] * 2, OTHER, (1.0, 2.0, 3.0), 0)
    batch, metrics = learner._make_batch(beside(own, [other], -1))
    batch = learner._with_proximal(batch, learner._old_likelihood(batch, metrics), metrics)
    values = (batch.weight * f[batch.sample.long().flatten()])[2:]
    assert values.mean().item() == pytest.approx(sum(p * item for p, item in zip(OWN, f.tolist(), strict=True)))
    assert f[batch.sample.long().flatten()][2:].mean().item() != pytest.approx(values.mean().item())


def source(folder, seed: int, rollouts: int = 1, common: str = "same", **changes) -> SharedSource:
    """A learner with the Gaussian policy of ``seed`` in a toy environment."""
    inner = gaussian(**{"env": "point_mass", "num_envs": 2, "decisions": 3, "horizon": 2, "seed": seed, **changes})
    return SharedSource(inner, Board(folder, common), inner.policy, rollouts)


def test_others_are_further_columns_and_the_own_numbers_are_one_s_own(tmp_path):
    alone, first, second = gaussian("point_mass", 2, 3, 2, 1), source(tmp_path, 1), source(tmp_path, 2, rollouts=2)
    single = first.next()
    assert single.info["rollout/shared"] == 0 and single.others is None and own_columns(single).all()
    both, own = second.next(), gaussian("point_mass", 2, 3, 2, 2).next()
    plain = alone.next()
    assert both.reward.shape == (3, 4, 2) and both.others.tolist() == [False, False, True, True]
    assert both.info["rollout/shared"] == 0.5
    counters = [name for name in own.info if not name.endswith("_s")]
    assert {name: both.info[name] for name in counters} == {name: own.info[name] for name in counters}
    for name in ("sample", "logprob", "reward", "valid"):
        assert torch.equal(getattr(both, name)[:, :2], getattr(own, name)), name
        assert torch.equal(getattr(both, name)[:, 2:], getattr(plain, name)), name
    assert both.version[:, :2].eq(0).all() and both.version[:, 2:].eq(-1).all()
    assert both.seeds[:, :2].equal(own.seeds) and (both.seeds[:, 2:] < 0).all()
    again = second.next()
    assert again.others is None, "nothing new is there, and nobody waits"


def test_what_others_share_is_stale_at_every_version_of_the_learner(tmp_path):
    first, second = source(tmp_path, 1), source(tmp_path, 2)
    first.policy.version, second.policy.version = 40, 3
    first.next()
    assert second.next().version[0].tolist() == [3, 3, 2, 2]


def test_others_are_never_published_again(tmp_path):
    first, second, third = (source(tmp_path, seed, rollouts=9) for seed in (1, 2, 3))
    first.next()
    second.next()
    assert third.next().reward.shape[1] == 2 * 3


def test_groups_of_two_learners_stay_apart_and_the_own_return_is_one_s_own():
    """Both have played the same seeds."""
    grpo, other = grpo_learner(), grpo_learner(policy=FlowToy(width=16, sampler=grpo_learner().policy.sampler))
    episodes = [(7, 2, (1, 0)), (7, 3, (0, 0)), (4, 1, (0, 1)), (4, 4, (0, 0))]
    strange = [(7, 2, (1, 1)), (7, 3, (1, 1)), (4, 1, (0, 0)), (4, 4, (1, 0))]
    own, theirs = (
        replace(found, task=torch.zeros_like(found.seeds))
        for found in (play(grpo.policy, episodes), play(other.policy, strange, seed=5))
    )
    whole = beside(own, [theirs, theirs], -1)
    assert len(whole.seeds[0].unique()) == 6
    batch, metrics = grpo._make_batch(whole)
    alone, own_metrics = grpo._make_batch(own)
    assert metrics["rollout/return"] == own_metrics["rollout/return"] == 0.5
    assert metrics["rollout/truncated"] == own_metrics["rollout/truncated"] == 0.5
    assert torch.equal(batch.advantage[: len(alone.advantage)], alone.advantage)
    assert (batch.age[: len(alone.age)] == 0).all() and (batch.age[len(alone.age) :] == 1).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env": "counting", "horizon": 2}, "shares rollouts of 'point_mass' and this one learns in 'counting'"),
        ({"horizon": 1}, r"executed is float32\[2, 2\] in a rollout of another learner and float32\[1, 2\] here"),
        ({"common": "other"}, "another frozen policy, other scales or another version"),
    ],
)
def test_a_learner_of_another_kind_is_refused_in_one_sentence(changes, said, tmp_path):
    source(tmp_path, 1).next()
    with pytest.raises(UserError, match=said) as caught:
        source(tmp_path, 2, **changes).next()
    assert str(caught.value).endswith(".") and str(caught.value).count(". ") == 0


def test_privileged_extras_that_another_learner_lacks_are_refused(tmp_path):
    first, second = source(tmp_path, 1), source(tmp_path, 2)
    first.next()
    play_on = second.source.next
    second.source.next = lambda: _with_privileged(play_on())
    with pytest.raises(UserError, match=r"features/privileged/x is missing in .* and float32\[1\] here"):
        second.next()


def _with_privileged(found: Rollout) -> Rollout:
    extra = {"privileged/x": found.features["time"]}
    return replace(found, features={**found.features, **extra})


def test_gorl_refuses_what_went_through_another_decoder():
    own, other = (chosen([0, 1], OWN, (1.0, 2.0, 3.0), 0) for _ in range(2))
    with pytest.raises(UserError, match="another learner's noise means other actions"):
        GoRL.update(None, beside(own, [other], -1))


def test_the_state_is_that_of_the_source_and_of_the_board(tmp_path):
    first, second = source(tmp_path, 1), source(tmp_path, 2)
    first.next(), second.next()
    assert isinstance(first, Resumable)
    state = second.state_dict()
    resumed = source(tmp_path, 2)
    resumed.load_state_dict(state)
    assert resumed.board.learner == second.board.learner
    later, same = second.next(), resumed.next()
    assert torch.equal(later.sample, same.sample) and later.others is same.others is None
    assert not isinstance(SharedSource(_Endless(), second.board, second.policy), Resumable)


class _Endless:
    def next(self) -> Rollout:
        raise NotImplementedError


def test_with_none_to_read_the_own_rollouts_are_those_without_sharing(tmp_path):
    alone, silent, talking = (gaussian("point_mass", 2, 3, 2, 1), source(tmp_path, 1, rollouts=0), source(tmp_path, 2))
    for _ in range(3):
        talking.next()
        one, two = alone.next(), silent.next()
        assert two.others is None and all(
            torch.equal(getattr(one, name), getattr(two, name)) for name in ("sample", "logprob", "seeds", "version")
        )
    assert len(list(tmp_path.glob(f"{silent.board.learner}-*"))) == 3, "which others may read all the same"
    assert all(a < b for a, b in pairwise(sorted(silent.board._numbers()[silent.board.learner])))
