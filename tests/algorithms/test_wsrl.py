"""WSRL: recorded data are dropped, the pre-trained policy collects first, then SAC continues from its weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.off_policy_toys import critics, deployed, env_spec, recorded, seeded, squashed
from tests.toys import bandit
from vla_rl.algorithms.iql import IQLConfig
from vla_rl.algorithms.wsrl import WSRL, CalQLConfig, WSRLConfig
from vla_rl.contract.errors import UserError
from vla_rl.experience.mixture import Mixture
from vla_rl.experience.replay import Replay

RATES = {"lr": 3e-3, "critic_lr": 3e-3, "tau": 0.02}
CAL_QL = CalQLConfig(batch=64, num_critics=2, actions=4, temperature=0.1, temperature_lr=1e-2, **RATES)
IQL = IQLConfig(batch=64, **RATES)
QUICK = WSRLConfig(
    batch=64,
    num_critics=2,
    learning_starts=64,
    utd_ratio=1.0,
    policy_delay=1,
    temperature=0.7,
    temperature_lr=1e-2,
    offline=CAL_QL,
    **RATES,
)


def mixture(width: float = 1.0) -> Mixture:
    parts = {"online": Replay(5000, 0.9), "demonstrations": Replay(5000, 0.9)}
    parts["demonstrations"].add(recorded(256, seeded(4), width))
    return Mixture(parts, {"online": 0.5, "demonstrations": 0.5})


def learner(config: WSRLConfig = QUICK, width: float = 1.0) -> WSRL:
    policy = squashed(env_spec())
    return config.build(policy, policy.trainable(), critics(policy), mixture(width), seeded())


def weights(wsrl: WSRL) -> list[torch.Tensor]:
    parts = [*wsrl.learnt.values(), *wsrl.critic.state_dict().values(), *wsrl.target_critic.state_dict().values()]
    return [item.detach().clone() for item in [*parts, wsrl.log_temperature]]


def test_after_pre_training_the_recorded_data_are_gone_and_all_else_goes_on():
    wsrl = learner()
    before, counted = weights(wsrl), []
    wsrl.pretrain(20, lambda step, info: counted.append(step))
    assert counted == list(range(20)) and wsrl.steps == 20
    assert set(wsrl.replay.parts) == {"online"} and not len(wsrl.replay)
    assert all(not torch.equal(*pair) for pair in zip(before, weights(wsrl), strict=True) if pair[0].numel() > 1)
    assert 0.05 < float(wsrl.temperature) < 0.12  # Cal-QL's, which began at 0.1, and not SAC's 0.7
    # The targets followed slowly: they are neither the critics nor what they were.
    slow, fast = wsrl.target_critic.last.weight, wsrl.critic.last.weight
    assert not torch.equal(slow, fast)


def test_the_targets_are_those_of_pre_training():
    wsrl, made = learner(), []
    build = CAL_QL.build

    class Spied(CalQLConfig):
        def build(self, *given: object) -> object:
            made.append(build(*given))  # type: ignore[arg-type]
            return made[-1]

    wsrl.config = replace(QUICK, offline=Spied())
    wsrl.pretrain(5)
    for ours, theirs in zip(wsrl.target_critic.parameters(), made[0].target_critic.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours is not theirs
    assert wsrl.critic is made[0].critic and float(wsrl.temperature) == float(made[0].temperature)


def test_the_frozen_policy_collects_before_anything_is_learnt_online():
    wsrl, generator = learner(), seeded(1)
    wsrl.pretrain(5)
    before = weights(wsrl)
    for _ in range(3):
        wsrl.update(bandit(wsrl.policy, 21, generator))
    assert wsrl.decisions == len(wsrl.replay) == 63 and wsrl.steps == 5
    assert all(torch.equal(*pair) for pair in zip(before, weights(wsrl), strict=True))
    wsrl.update(bandit(wsrl.policy, 21, generator))
    assert wsrl.steps == 5 + 21  # a step for each of the 21 decisions that end the warm-up, none for those in it
    assert not torch.equal(before[0], weights(wsrl)[0])


@pytest.mark.parametrize(
    "offline", [pytest.param(one, marks=pytest.mark.full) for one in (CAL_QL, IQL)], ids=["Cal-QL", "IQL"]
)
def test_it_finds_the_optimum_that_was_not_recorded(offline):
    """Recorded within 0.25 of 0: pre-training gets as far as that, online learning to the optimum."""
    wsrl, generator = learner(replace(QUICK, offline=offline), width=0.25), seeded(1)
    wsrl.pretrain(150)
    pretrained = deployed(wsrl.policy)
    assert pretrained < -0.03
    for _ in range(12):
        wsrl.update(bandit(wsrl.policy, 64, generator))
    assert deployed(wsrl.policy) > -0.02


def test_a_resumed_run_is_bit_identical_without_the_recorded_data():
    ours, generator = learner(), seeded(1)
    ours.pretrain(5)
    ours.update(bandit(ours.policy, 70, generator))
    theirs = learner()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # as if it came from the disk
    assert set(theirs.replay.parts) == {"online"}
    for one in (ours, theirs):
        one.update(recorded(8, seeded(5)))
    assert all(torch.equal(*pair) for pair in zip(weights(ours), weights(theirs), strict=True))


def test_a_replay_buffer_without_parts_is_refused():
    policy = squashed(env_spec())
    wsrl = QUICK.build(policy, policy.trainable(), critics(policy), Replay(100, 0.9), seeded())
    with pytest.raises(UserError, match="Replay does not keep them apart; give it a Mixture"):
        wsrl.pretrain(5)


def test_keep_only_refuses_an_unknown_part():
    replay = mixture()
    with pytest.raises(UserError, match=r"no replay buffer 'offline' among .'demonstrations', 'online'."):
        replay.keep_only("offline")
    replay.keep_only("demonstrations")
    assert replay.counts(10) == {"demonstrations": 10}
