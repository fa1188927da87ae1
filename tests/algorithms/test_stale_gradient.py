"""PPO's gradient with decisions of an older policy, by hand, and the mean of what is weighted, by an exact sum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.toys import FlowToy, rollout
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Rollout
from vla_rl.contract.policy import ActionOut, Likelihood
from vla_rl.experience.rollout import side_by_side

NOW, BEFORE = (0.2, 0.5, 0.3), (0.5, 0.3, 0.2)  # probabilities of three actions
REWARDS = (1.0, -1.0, 3.0)


class Softmax(FlowToy):
    """Three actions, whatever the state; ``sample`` is the index."""

    def __init__(self) -> None:
        super().__init__(width=1)
        self.logits = nn.Parameter(torch.tensor(NOW, dtype=torch.float64).log())

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


def ppo(bound: float) -> PPO:
    """A learner of version 7 whose step is the gradient."""
    config = PPOConfig(
        epochs=1, minibatch=1000, critic_warmup=0, grad_norm=math.inf, target_kl=9.0, max_importance_weight=bound
    )
    policy = Softmax()
    policy.version = 7
    learner = PPO(policy, policy.trainable(), Zero(), config, torch.Generator())
    learner.optimizer = torch.optim.SGD([policy.logits], lr=1.0)
    return learner


def chosen(actions, probabilities, version: int) -> Rollout:
    """One decision in each of ``len(actions)`` environments, by a policy with these ``probabilities``."""
    index, state = torch.tensor(actions), torch.zeros(2, len(actions), 1, dtype=torch.float64)
    sample = index[:, None, None].double()
    out = ActionOut(sample, sample, torch.tensor(probabilities, dtype=torch.float64)[index].log())
    reward = torch.tensor(REWARDS, dtype=torch.float64)[index][None, :, None]
    versions, task = torch.full((1, len(actions)), version), torch.zeros(1, len(actions), dtype=torch.long)
    return rollout({"state": state}, out, reward, version=versions, task=task)


@pytest.mark.parametrize("bound", [1.2, 2.0])
def test_the_gradient_with_older_decisions_by_hand(bound):
    """d/d logits of -1/N sum w A log pi(a) is -1/N sum w A (e_a - pi), with w = 1 for decisions of this version."""
    learner = ppo(bound)
    metrics = learner.update(side_by_side([chosen([0, 1, 2, 1], NOW, 7), chosen([0, 1, 2, 0, 1], BEFORE, 6)]))
    actions = [0, 1, 2, 1, 0, 1, 2, 0, 1]
    earned = [REWARDS[action] for action in actions]
    mean = sum(earned) / 9
    std = (sum((item - mean) ** 2 for item in earned) / 9) ** 0.5
    weights = [1.0] * 4 + [min(NOW[action] / BEFORE[action], bound) for action in actions[4:]]
    assert sorted(set(weights)) == pytest.approx([0.4, 1.0, *sorted({min(1.5, bound), min(5 / 3, bound)})])
    gradient = [
        -sum(
            weight * (item - mean) / std * ((action == k) - NOW[k])
            for weight, item, action in zip(weights, earned, actions, strict=True)
        )
        / 9
        for k in range(3)
    ]
    moved = learner.policy.logits.detach() - torch.tensor(NOW, dtype=torch.float64).log()
    assert moved.tolist() == pytest.approx([-item for item in gradient], abs=1e-7)
    assert metrics["policy/importance_weight"] == pytest.approx(sum(weights[4:]) / 5)
    assert metrics["rollout/stale"] == pytest.approx(5 / 9) and metrics["rollout/decisions"] == 9


def test_weighted_older_samples_have_the_present_mean():
    """Each action as often as the older policy chooses it in ten decisions: sum mu (pi/mu) f = sum pi f."""
    learner, f = ppo(100.0), torch.tensor([3.0, -1.0, 10.0], dtype=torch.float64)
    older = chosen([0] * 5 + [1] * 3 + [2] * 2, BEFORE, 6)
    batch, metrics = learner._make_batch(side_by_side([chosen([0, 1], NOW, 7), older]))
    batch = learner._with_proximal(batch, learner._old_likelihood(batch, metrics), metrics)
    values = (batch.weight * f[batch.sample.long().flatten()])[2:]
    assert values.mean().item() == pytest.approx(sum(p * item for p, item in zip(NOW, f.tolist(), strict=True)))
    assert f[batch.sample.long().flatten()][2:].mean().item() != pytest.approx(values.mean().item())
