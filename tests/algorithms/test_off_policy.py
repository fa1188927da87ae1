"""The base of off-policy algorithms: independent critics, minimum of a pair, when actor and critics step, errors."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.algorithms import test_dsrl, test_offline, test_sac
from tests.algorithms.ppo_learners import learner as ppo_learner
from tests.algorithms.test_offline import QUICK as IQL
from tests.algorithms.test_residual_td3 import whole
from tests.algorithms.test_sac import QUICK as SAC
from tests.by_hand import Line, Recorded, batch, build, learnt
from tests.latent import toy_base
from tests.off_policy_toys import critics, env_spec, recorded, squashed
from tests.residuals import POINT, SMALL, StateEncoder, biased_base
from tests.toys import TwoProcesses, bandit, seeded
from vla_rl.algorithms.guard import FallbackConfig, ReleaseConfig
from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig, swapped
from vla_rl.algorithms.ppo import PPO
from vla_rl.algorithms.residual_td3 import ResidualTD3
from vla_rl.contract.batch import OneProcess, Reducer
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.replay import Replay
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.residual import GaussianResidual
from vla_rl.training.checkpoint import latest_state, save_state


def test_the_minimum_is_over_a_random_pair_without_replacement():
    """Of three constant critics the highest is never the minimum; with replacement it would be one time in nine."""
    td3 = build(num_critics=3, num_min_q=2)
    for parameter in learnt(td3.target_critic):
        nn.init.zeros_(parameter)
    with torch.no_grad():
        td3.target_critic.last.bias.copy_(torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    found = torch.tensor([float(td3.min_target_q(batch(1).features, torch.zeros(1, 2))) for _ in range(400)])
    assert (found == 3).sum() == 0
    assert float((found == 1).float().mean()) == pytest.approx(2 / 3, abs=0.095)  # four standard errors


def test_targets_are_clamped_to_the_bounds_of_returns():
    td3 = build(value_bounds=(-0.1, 0.2))
    td3.target = lambda found: found.reward
    value = td3.critic(td3.replay.found.features, td3.replay.found.executed.flatten(1)).detach()
    expected = (value - td3.replay.found.reward.clamp(-0.1, 0.2)).square().mean(1).sum()
    assert td3.critic_step(td3.replay.found)["critic/loss"] == pytest.approx(float(expected), rel=1e-5)


def test_each_critic_is_regressed_on_its_own():
    """The gradient of each is that of its own mean squared error: all that couples them is the norm's bound."""
    td3 = build(grad_norm=1e9)
    target = td3.target(td3.replay.found)
    td3.target = lambda found: target
    td3.critic_step(td3.replay.found)
    for head in range(4):
        alone = build()
        value = alone.critic(td3.replay.found.features, td3.replay.found.executed.flatten(1))[head]
        (value - target).square().mean().backward()
        for one, two in zip(learnt(td3.critic), learnt(alone.critic), strict=True):
            torch.testing.assert_close(one.grad[head], two.grad[head], rtol=1e-4, atol=1e-6)


class Table(nn.Module):
    """Heads that are one number each."""

    num_critics = 10

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(3 * torch.rand(10, 1, generator=seeded()) - 1)

    def forward(self, features, action):
        return self.values.expand(10, len(action))


def test_critics_that_start_apart_converge():
    """Bernoulli(1/2) targets, critics in [-1, 2] (algorithms.md 7.6): coupled critics would stay .08 to .96 apart."""
    policy, table, generator = Line(), Table(), seeded(1)
    config = OffPolicyConfig(critic_lr=2e-2)
    learner = OffPolicy(policy, {"w": policy.w}, table, Recorded(), config, generator)
    learner.target = lambda found: found.reward
    assert np.ptp(table.values.detach().numpy()) > 2
    for _ in range(500):
        coin = (torch.rand(256, generator=generator) < 0.5).float()
        learner.critic_step(SimpleNamespace(features={}, sample=None, executed=torch.zeros(256, 1, 1), reward=coin))
    assert np.ptp(table.values.detach().numpy()) <= 0.05
    assert float(table.values.detach().mean()) == pytest.approx(0.5, abs=0.05)


def test_the_actor_step_leaves_the_critics_unchanged():
    td3 = build()
    td3.critic_step(td3.replay.found)
    before = [(p.detach().clone(), p.grad.clone()) for p in learnt(td3.critic)]
    slow = [p.clone() for p in td3.target_critic.parameters()]
    w = td3.policy.w.detach().clone()
    td3.actor_step(td3.replay.found)
    assert all(
        torch.equal(p, q) and torch.equal(p.grad, g) for p, (q, g) in zip(learnt(td3.critic), before, strict=True)
    )
    assert all(torch.equal(p, q) for p, q in zip(td3.target_critic.parameters(), slow, strict=True))
    assert all(p.requires_grad for p in learnt(td3.critic)) and not torch.equal(td3.policy.w, w)


def decisions(number: int):
    return SimpleNamespace(valid=torch.ones(number, 1, 1, dtype=torch.bool))


def test_steps_follow_the_decisions_once_there_are_enough():
    """Half a step per decision from the tenth on; idle decisions do not count, and halves are not lost."""
    td3 = build()
    steps = [td3.update(decisions(number)) and td3.steps for number in (4, 5, 4, 1, 1, 0, 20)]
    assert steps == [0, 0, 2, 2, 3, 3, 13]
    idle = decisions(8)
    idle.valid[5:] = False
    assert td3.update(idle)["rollout/decisions"] == 5 and td3.steps == 15
    td3.update(decisions(1))
    assert td3.steps == 16
    empty = build(replay=Recorded(batch(0)))
    empty.update(decisions(30))
    assert empty.steps == 0 and empty.update_debt == 10.5
    empty.update(decisions(4))
    assert empty.update_debt == 2, "steps that could not be taken are not made up for at once"
    empty.replay.found = batch()
    empty.update(decisions(1))
    assert empty.steps == 2


def test_a_burst_is_taken_once_when_learning_starts():
    """Seven steps on top of the half for the tenth decision, whatever the size of the rollout that brings it."""
    td3 = build(burst=7)
    assert [td3.update(decisions(number)) and td3.steps for number in (9, 1, 1, 4)] == [0, 7, 8, 10]
    at_once = build(burst=7, learning_starts=0)
    assert at_once.update(decisions(2)) and at_once.steps == 8 and at_once.update(decisions(2)) and at_once.steps == 9


def test_the_actor_waits_for_the_warmup_and_the_delay():
    td3, moved = build(), []
    for _ in range(12):
        before = td3.policy.w.detach().clone()
        info = td3.step()
        moved.append(not torch.equal(before, td3.policy.w))
        assert moved[-1] == ("policy/loss" in info)
    assert moved == [False] * 6 + [False, True] * 3, "after the last of policy_delay critic steps"


def test_swapped_weights_are_restored_after_the_block():
    line = Line(0.5)
    with pytest.raises(ZeroDivisionError), swapped({"w": line.w}, {"w": torch.ones(2)}):
        assert line.w.tolist() == [1, 1]
        raise ZeroDivisionError
    assert line.w.tolist() == [0.5, 0.5]


def test_what_off_policy_cannot_train_is_refused():
    with pytest.raises(
        UserError, match=r"needs a policy with rsample and critic_action but GaussianResidual lacks them"
    ):
        build(GaussianResidual(biased_base(), StateEncoder(POINT), SMALL))
    with pytest.raises(UserError, match=r"num_min_q 5 exceeds the 4 critics.*choose 1 to 4"):
        build(num_min_q=5)


@pytest.mark.parametrize("who", ["critic", "policy"])
def test_a_nan_is_named_and_its_step_not_taken(who):
    found = batch()
    td3 = build(replay=Recorded(found), critic_warmup=0, policy_delay=1)
    td3.step(), td3.step()
    if who == "critic":
        found.reward[3] = torch.nan
    else:
        td3.actor_loss = lambda sampled: (td3.policy.rsample(sampled.features, None).action.sum() * torch.nan, {})
    module = td3.critic if who == "critic" else td3.policy
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(NonFiniteError, match=rf"the {who} gradient of .* is not finite at step 2"):
        td3.step()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_a_replay_that_asks_is_told_the_loss_of_every_decision():
    replay, read = Recorded(), []
    replay.read_losses = read.append
    learner, found = build(replay=replay), replay.found
    target, value = learner.target(found), learner.critic(found.features, found.executed.flatten(1))
    learner.target = lambda batch: target
    learner.critic_step(found)
    torch.testing.assert_close(read, [(value - target).square().mean(0).detach()])


SIZE = 40
# No random numbers: all target critics are in the minimum, and targets are not smoothed.
EXACT = {"num_min_q": 4, "target_noise": 0.0, "batch": SIZE, "grad_norm": 0.3}


def part(found: Any, rows: slice) -> Any:
    """The same rows of every tensor, in double precision."""
    if isinstance(found, dict):
        return {name: part(item, rows) for name, item in found.items()}
    if is_dataclass(found):
        return replace(found, **{f.name: part(getattr(found, f.name), rows) for f in fields(found)})  # type: ignore[type-var]
    return found[rows].double() if found.is_floating_point() else found[rows]


class Batches(Recorded):
    """Other decisions at every step, of which this process draws ``rows``; asked for the right number of them."""

    def __init__(self, rows: slice) -> None:
        super().__init__()
        self.rows, self.drawn = rows, 0

    def sample(self, size, generator):
        if size > SIZE:  # for the statistics of inputs
            return part(self.found, self.rows)
        self.drawn += 1
        found = part(batch(SIZE, seed=self.drawn), self.rows)
        assert len(found.reward) == size
        return found


def learner(reducer: Reducer, rows: slice, **changes: Any) -> ResidualTD3:
    made = build(replay=Batches(rows), reducer=reducer, **(EXACT | changes))
    for module in (made.policy, made.critic, made.target_critic):
        module.double()
    made.target_parameters = {name: item.detach().clone() for name, item in made.learnt.items()}
    return made


def taught(reducer: Reducer, rows: slice, decisions: int) -> tuple[ResidualTD3, dict[str, float]]:
    one = learner(reducer, rows)
    return one, one.update(SimpleNamespace(valid=torch.ones(decisions, 1, 1, dtype=torch.bool)))


def both(work: Any) -> list[Any]:
    """What ``work(reducer, rows)`` gives in each of two processes, which have half of the rows each."""
    with ThreadPoolExecutor(2) as pool:
        halves = (slice(0, SIZE // 2), slice(SIZE // 2, None))
        return list(pool.map(work, TwoProcesses.pair(), halves))


def test_two_processes_take_the_steps_of_one_with_all_decisions():
    """Half of the decisions in each: as many steps, and the weights of one, in double precision."""
    (one, said), (other, _) = both(lambda reducer, rows: taught(reducer, rows, 25))
    whole, expected = taught(OneProcess(), slice(None), 50)
    assert one.steps == other.steps == whole.steps == 20 and one.decisions == whole.decisions == 50
    assert not torch.equal(whole.policy.w, build().policy.w.double())
    for name in ("policy", "critic", "target_critic"):
        of = [getattr(found, name).state_dict() for found in (one, other, whole)]
        for key, value in of[2].items():
            assert torch.equal(of[0][key], of[1][key]), "the processes have different weights"
            torch.testing.assert_close(of[0][key], value, rtol=1e-9, atol=1e-12)
    assert said["rollout/decisions"] == expected["rollout/decisions"] == 50
    assert said["replay/size"] == 2 * SIZE, "the sum of both replays, which in this test pretend to hold 40 each"


def test_nobody_learns_while_a_process_has_nothing_to_draw():
    def work(reducer: Reducer, rows: slice) -> int:
        found = Recorded(batch(0)) if reducer.rank else Recorded()
        made = build(replay=found, reducer=reducer, **EXACT)
        made.update(SimpleNamespace(valid=torch.ones(30, 1, 1, dtype=torch.bool)))
        return made.steps

    assert both(work) == [0, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 33}, "a batch of 33 cannot be drawn equally from the replays of 2 processes"),
        ({"release": ReleaseConfig()}, "watch the episodes of one process"),
        ({"fallback": FallbackConfig()}, "watch the episodes of one process"),
    ],
)
def test_what_processes_cannot_share_is_said(changes, said):
    with pytest.raises(UserError, match=said):
        build(reducer=TwoProcesses(), **changes)


def off_policy(config):
    policy, replay = squashed(env_spec()), Replay(2000, 0.9)
    replay.add(recorded(256, seeded(4)))
    return config.build(policy, policy.trainable(), critics(policy), replay, seeded())


def tensors(learner) -> dict[str, torch.Tensor]:
    """All weights of a learner: the policy's and those of every network and target."""
    parts = {f"policy.{name}": item for name, item in learner.parameters.items()}
    for name, item in vars(learner).items():
        if isinstance(item, torch.nn.Module) and name != "policy":
            parts |= {f"{name}.{key}": value for key, value in item.state_dict().items()}
        elif isinstance(item, torch.nn.Parameter):
            parts[name] = item
    parts |= {f"target.{name}": item for name, item in getattr(learner, "target_parameters", {}).items()}
    return {name: item.detach().clone() for name, item in parts.items()}


@pytest.mark.parametrize("name", ["sac", "iql", "td3"])
def test_critics_and_targets_are_rolled_back_with_the_policy(name):
    if name == "td3":
        source, learner = whole(1)
        train = lambda: [learner.update(source.next()) for _ in range(3)]  # noqa: E731
    else:
        learner = off_policy(replace(SAC if name == "sac" else IQL, policy_delay=1))
        train = lambda: learner.pretrain(3)  # noqa: E731
    train()
    kept, before, lr = copy.deepcopy(learner.best_state()), tensors(learner), learner.lr
    train()
    changed = {key for key, item in tensors(learner).items() if not torch.equal(before[key], item)}
    assert name == "td3" or changed >= {key for key in before if "weight" in key}
    assert any(key.startswith("target") for key in changed)
    learner.roll_back(kept, 0.5)
    assert all(torch.equal(item, before[key]) for key, item in tensors(learner).items())
    assert learner.lr == lr / 2
    optimizers = [item for item in vars(learner).values() if isinstance(item, torch.optim.Optimizer)]
    assert len(optimizers) >= 2 and not any(item.state for item in optimizers)
    train()
    assert any(not torch.equal(before[key], item) for key, item in tensors(learner).items()), "it learns on"


def test_a_rollback_of_td3_to_the_start_keeps_input_statistics():
    source, td3 = whole(1)
    kept = td3.best_state()
    for _ in range(3):
        td3.update(source.next())
    fitted = td3.policy.delta.trunk.inputs.mean.detach().clone()
    assert td3.steps and fitted.abs().max() > 0
    td3.roll_back(kept, 0.5)
    inputs = [td3.policy.delta.trunk.inputs, td3.critic.inputs, td3.target_critic.inputs]
    assert all(item.mean.abs().max() > 0 and not torch.equal(item.std, torch.ones_like(item.std)) for item in inputs)
    assert all(torch.equal(td3.parameters[name], kept["parameters"][name]) for name in td3.learnt)


def residual_ppo():
    torch.manual_seed(0)
    policy = GaussianResidual(biased_base(), StateEncoder(POINT), SMALL)
    critic = ValueCritic({**policy.feature_sizes, "time": 1}, width=16)
    config = replace(ppo_learner().config, minibatch=32, epochs=1)
    return PPO(policy, policy.trainable(), critic, config, seeded())


def test_a_rollback_of_ppo_to_the_start_keeps_input_statistics():
    """Also in a run that was resumed in between."""
    source, _ = whole(1)
    ppo = residual_ppo()
    source.policy = ppo.policy
    source = type(source)(source.env, ppo.policy, 9, SeedStream(1, 10**6), seeded(2))
    kept = copy.deepcopy(ppo.best_state())
    ppo.update(source.next())
    fitted = ppo.policy.delta.trunk.inputs.mean.detach().clone()
    assert fitted.abs().max() > 0 and ppo.calibration
    resumed = residual_ppo()
    resumed.load_state_dict(copy.deepcopy(ppo.state_dict()))
    for learner in (ppo, resumed):
        learner.roll_back(kept, 0.5)
        assert torch.equal(learner.policy.delta.trunk.inputs.mean, fitted)
        assert all(torch.equal(learner.parameters[name], kept["parameters"][name]) for name in learner.learnt)


def test_after_a_rollback_ppo_has_no_moments_and_a_lower_rate():
    ppo = ppo_learner(target_kl=100.0, lr=1e-3)
    ppo.update(bandit(ppo.policy, 64, seeded(1)))
    kept = ppo.best_state()
    assert len(ppo.optimizer.state) == len(ppo.learnt) + len(ppo._critic_parameters)
    lr = ppo.lr
    ppo.roll_back(kept, 0.5)
    assert ppo.lr == lr / 2 and not ppo.optimizer.state
    resumed = ppo_learner(target_kl=100.0, lr=1e-3)
    state = copy.deepcopy(ppo.state_dict())
    resumed.load_state_dict(state)
    with pytest.raises(UserError, match=r"of PPO has no 'max_lr', .* start another"):
        resumed.load_state_dict({name: value for name, value in state.items() if name != "max_lr"})
    for learner in (ppo, resumed):
        for seed in range(3):
            learner.update(bandit(learner.policy, 64, seeded(seed)))
        assert learner.lr == lr / 2, "the KL is far below its target, and still"


# -- a run that goes on -----------------------------------------------------------------------------------------------


def fed(made: Any, count: int) -> tuple[Any, Any]:
    """A learner with experience of its own policy in the bandit."""
    generator = seeded(1)
    return made, lambda: bandit(made.policy, count, generator)


def residual(seed: int) -> tuple[Any, Any]:
    """On the point mass, whose episodes go on from rollout to rollout."""
    source, td3 = whole(seed)
    return td3, source.next


RESUMED = {
    "SAC": lambda seed: fed(test_sac.learner(), 4),
    "IQL": lambda seed: fed(test_offline.learner(replace(IQL, learning_starts=1), 64), 4),
    "aliased DSRL": lambda seed: fed(test_dsrl.learner(toy_base(), test_dsrl.ALIASED), 4),
    "residual TD3": residual,
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_learner_is_the_same_bit_for_bit(name, tmp_path):
    """Networks, targets, optimizers, replay buffer, input statistics, temperature, generator and counters."""
    ours, feed = RESUMED[name](1)
    for _ in range(3):
        ours.update(feed())
    assert ours.steps > 5
    save_state(tmp_path, 1, ours.state_dict())
    theirs, _ = RESUMED[name](2)
    theirs.load_state_dict(latest_state(tmp_path)[1])
    for rollout in (feed(), feed()):
        assert ours.update(rollout) == theirs.update(rollout)
    states = [one.state_dict() for one in (ours, theirs)]
    names = [state["replay"].pop("robots") for state in states]  # texts, which torch does not compare
    assert names[0] == names[1]
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)
