"""What trainer configs build, and what several processes share."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.commands import save_untrained
from tests.experience.makers import equal_rollouts as same
from tests.recipes import quick
from tests.recipes.outside.straight import Straight
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.process import ProcessSource
from vla_rl.experience.rollout import RolloutSource, WindowConfig
from vla_rl.experience.sources import Collectors
from vla_rl.policies.feed_forward import GaussianPolicy
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.improve import TrainingSetup, build, improve
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.trainers import OffPolicyRL, OnPolicyRL, RunContext, TrainerConfig
from vla_rl.recipes.workers import worker_processes, workers
from vla_rl.training.loop import LoopConfig, PolicyStore
from vla_rl.training.tracking import RunFolder

ROOT = Path(__file__).resolve().parents[2]
POINT_MASS = EnvConfig("point_mass")


class Process(OneProcess):
    """One of two processes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2


def context(rank: int = 0, base=None) -> RunContext:
    return RunContext(EnvConfig("lift"), base, 1, Process(rank))


def test_all_collectors_play_other_seeds_with_other_noise():
    parts = [part for rank in (0, 1) for part in context(rank).split(3)]
    seeds = [set(islice(part.seeds(), 500)) for part in parts]
    together = set(islice(RunContext(EnvConfig("lift"), None, 1, OneProcess()).seeds(), 3000))
    assert len(parts) == 6 and set().union(*seeds) == together and sum(map(len, seeds)) == 3000
    noise = [float(torch.randn((), generator=part.exploration())) for part in parts]
    assert len(set(noise)) == 6


@dataclass(frozen=True)
class Collecting(TrainerConfig):
    """A trainer whose learner is of no interest."""

    loop: LoopConfig
    experience: WindowConfig = WindowConfig(num_envs=4, decisions=2)

    def build_policy(self, context, env):
        torch.manual_seed(context.seed)
        return GaussianPolicy(env.spec)

    def build_learner(self, context, env, policy):
        return None


class Counted:
    """An ``EnvFactory`` that counts the environments that are made."""

    def __init__(self, name: str) -> None:
        self.config, self.made = EnvConfig(name), 0

    def make(self, num_envs: int):
        self.made += 1
        return self.config.make(num_envs)

    make_training = make

    def spec(self):
        return self.config.spec()


def test_demonstrations_need_no_environment_of_their_own(tmp_path):
    save_demonstrations(collect(EnvConfig("lift"), 1, seed=1), tmp_path / "recorded", video="never")
    made, base = Counted("lift"), TinyVLA.from_pretrained(save_untrained(tmp_path / "policy"))
    setup = build(quick.mixed().rl, RunContext(made, base, 1, OneProcess(), str(tmp_path / "recorded")))
    setup.close()
    assert made.made == 1, "the one that is learned in"


@pytest.mark.parametrize(("loop", "kind"), [(LoopConfig(), RolloutSource), (LoopConfig(staleness=2), Collectors)])
def test_a_single_collector_that_is_never_ahead_needs_no_thread(loop, kind):
    setup = build(Collecting(loop), RunContext(POINT_MASS, None, 1, OneProcess()))
    assert type(setup.source) is kind and setup.source.next().reward.shape[:2] == (2, 4)
    setup.close()


@pytest.mark.full
def test_processes_collect_what_sources_here_collect(monkeypatch):
    """Weights, versions and progress that are published in between included, and a saved state."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    trainer = Collecting(LoopConfig(collectors=2))
    context = RunContext(POINT_MASS, None, 1, OneProcess())

    def processes() -> TrainingSetup:
        setup = build(trainer, context)
        sources = [player.source for player in setup.source._players]
        assert all(isinstance(source, ProcessSource) for source in sources)
        assert len({source.worker.pid for source in sources} | {os.getpid()}) == 3
        return setup

    def here() -> TrainingSetup:
        policy = trainer.build_policy(context, POINT_MASS.make(1))
        sources = [trainer.build_source(part, trainer.build_env(part), policy) for part in context.split(2)]
        source = Collectors(sources, policy)
        return TrainingSetup(policy, None, source, None, PolicyStore(policy), source.close)

    with worker_processes(""):
        rollouts, states = [], []
        for make in (here, processes):
            setup = make()
            rollouts.append([])
            for number in range(4):
                rollouts[-1].append(setup.source.next())
                with torch.no_grad():
                    setup.policy.log_std.add_(0.3)
                setup.store.publish({}, number / 4)
                if number == 1:
                    states.append((setup.source.state_dict(), setup.store.state_dict(), setup.policy.log_std.clone()))
            setup.close()
        assert all(same(*pair) for pair in zip(*rollouts, strict=True))
        assert [int(rollout.version.max()) for rollout in rollouts[1]] == [0, 1, 2, 3]

        resumed = processes()
        source, store, log_std = states[0]  # what sources here saved is what processes continue from
        resumed.source.load_state_dict(source)
        resumed.store.load_state_dict(store)
        resumed.policy.log_std.data.copy_(log_std)
        assert same(resumed.source.next(), rollouts[0][2])
        resumed.close()


@pytest.mark.full
def test_a_killed_collector_is_started_again(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    trainer = Collecting(LoopConfig(collectors=2, staleness=1))
    with worker_processes(""):
        setup = build(trainer, RunContext(POINT_MASS, None, 1, OneProcess()))
        rollouts, killed = [setup.source.next()], workers(2).all[1].pid
        os.kill(killed, signal.SIGKILL)
        while rollouts[-1].info["source/restarts"] == 0:  # the other one plays on meanwhile
            setup.store.publish({}, 0.5)
            rollouts.append(setup.source.next())
        pids = {worker.pid for worker in workers(2).all}
        setup.close()
    assert rollouts[-1].info["source/restarts"] == 1 and len(pids) == 2 and killed not in pids
    assert all(rollout.reward.shape[:2] == (2, 4) for rollout in rollouts)
    ages = [number - rollout.version for number, rollout in enumerate(rollouts)]
    assert all(age.min() >= 0 and age.max() <= 1 for age in ages)


def test_off_policy_learners_get_windows_ahead_one_by_one():
    @dataclass(frozen=True)
    class Joining(Collecting):
        joins_episodes = True

    setup = build(Joining(LoopConfig(staleness=1)), RunContext(POINT_MASS, None, 1, OneProcess()))
    assert OffPolicyRL(TD3Residual()).joins_episodes and setup.source.next().stream == "source-0"
    setup.close()


def test_a_rollout_ahead_of_a_learning_world_model_is_refused():
    with pytest.raises(UserError, match="set staleness to 0"):
        Imagine(Collecting(LoopConfig(staleness=1)), plan=None, env=POINT_MASS)


def test_processes_draw_different_decisions():
    drawn = []
    for rank in (0, 1):
        config = SimpleNamespace(
            num_critics=2, critic=HeadConfig(8, 1), build=lambda *given: drawn.append(torch.rand(4, generator=given[4]))
        )
        trainer = OffPolicyRL(None, replay=SimpleNamespace(build=lambda *given: None), algorithm=config)
        policy = SimpleNamespace(feature_sizes={"state": 2}, trainable=dict)
        trainer.build_learner(context(rank), SimpleNamespace(spec=SimpleNamespace(action_dim=1)), policy)
    assert not torch.equal(*drawn)


def test_a_residual_keeps_the_temperature_that_is_chosen(tmp_path):
    base = TinyVLA.from_pretrained(save_untrained(tmp_path / "policy"))
    assert base.sampler.temperature == 1.0
    made = TD3Residual(temperature=0.3).build(context(base=base))
    assert made.base.sampler.temperature == 0.3
    made.save_pretrained(tmp_path / "residual")
    assert load_policy(tmp_path / "residual").base.sampler.temperature == 0.3


@dataclass(frozen=True)
class Made:
    """A new policy of somebody's class."""

    kind: type[Straight]

    def build(self, context):
        return self.kind(context.env.spec())


class Careless(Straight):
    """Its actions leave the bounds."""

    def act(self, features, state, mode, generator):
        out, state = super().act(features, state, mode, generator)
        return replace(out, action=out.action + 10.0), state


class Featureless(Straight):
    """Critics do not know what there is to read."""

    def __init__(self, spec):
        super().__init__(spec)
        del self.feature_sizes


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Featureless, "policy 'Featureless' has no 'feature_sizes', so it cannot be trained with"),
        (Careless, "action"),
    ],
)
@pytest.mark.parametrize("trainer", [OnPolicyRL, OffPolicyRL])
def test_a_new_policy_is_checked_before_its_learner_is_built(kind, sentence, trainer, tmp_path):
    rail = RunContext(EnvConfig("tests.recipes.outside.rail:make"), None, 1, OneProcess())
    with pytest.raises(ContractError, match=sentence):
        few = EvaluationConfig(validation=2, test=2, num_envs=2)
        improve(trainer(Made(kind)), rail, few, RunFolder(tmp_path / "run", {}))
