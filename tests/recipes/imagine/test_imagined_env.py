"""From episodes of a simulator to reinforcement learning in a dream of it, with nothing changed about the learning."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.cli.conftest import save_untrained
from tests.world_models.dreams import SMALL
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.rollout import WindowConfig
from vla_rl.experience.trajectories import Trajectories
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.context import RunContext
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.coevolution import Plan
from vla_rl.recipes.imagine.collect import Gather, Gathered, gather
from vla_rl.recipes.imagine.imagined_env import DreamWorld, promise, replayed, starts_of, watch
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.stages import EvaluationConfig, collect, improve
from vla_rl.recipes.trainers import RLConfig
from vla_rl.training.coevolve import CoevolutionConfig
from vla_rl.training.fit import FitConfig
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import RunFolder
from vla_rl.training.world_model import WorldFit, load_world, save_world, statistics
from world_models.env import DreamConfig, ImaginedEnv
from world_models.keyframes import KeyframeConfig
from world_models.model import WorldConfig, WorldModel
from world_models.uncertainty import Limits

WORLD = EnvConfig(options={"deadline": 7})
GATHER = Gather(own=4, clumsy=2, random=2, calibration=1, held_out=2, num_envs=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> TinyVLA:
    return TinyVLA.from_pretrained(save_untrained(tmp_path_factory.mktemp("policy") / "untrained"))


@pytest.fixture(scope="module")
def gathered(policy) -> Gathered:
    return gather(WORLD, policy, GATHER, seed=1)


def world_model(trajectories: Trajectories) -> WorldModel:
    env = WORLD.make(1)
    torch.manual_seed(0)
    made = WorldModel(env.spec, WorldConfig(backbone=SMALL), *statistics(trajectories))
    env.close()
    return made.eval()


def test_every_kind_is_played_on_seeds_of_its_own_and_some_are_held_out(gathered):
    parts = gathered.learnt, gathered.calibration, gathered.held_out
    assert [part.count for part in parts] == [5, 1, 2] and gathered.own == 0.0
    seeds = [int(part.seed[begin]) for part in parts for begin, _ in part.spans()]
    assert len(set(seeds)) == 8 and min(seeds) == 18_000_000 and max(seeds) == 18_000_007


def test_what_was_gathered_is_kept_to_the_last_pixel_or_not_at_all(gathered, tmp_path):
    assert Gathered.load(tmp_path) is None
    gathered.save(tmp_path)
    again = Gathered.load(tmp_path)
    assert again is not None and again.own == gathered.own
    for name in ("learnt", "calibration", "held_out"):
        one, other = getattr(gathered, name), getattr(again, name)
        assert all(np.array_equal(one.images[camera], other.images[camera]) for camera in one.images)
        assert np.array_equal(one.action, other.action) and np.array_equal(one.seed, other.seed)
    (tmp_path / "learnt.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match="no episodes could be read"):
        Gathered.load(tmp_path)


@pytest.mark.parametrize("numbers", [{"calibration": 6}, {"held_out": 7}, {"calibration": 0}, {"held_out": 0}])
def test_nothing_left_to_learn_from_is_refused(policy, numbers):
    with pytest.raises(UserError, match="leave nothing to learn from"):
        gather(WORLD, policy, replace(GATHER, **numbers), seed=1)


def test_a_replay_knows_every_episode(gathered):
    held_out = gathered.held_out
    found = replayed(world_model(held_out), held_out, DreamConfig(part=4))
    assert found.step.max(1).tolist() == [end - begin - 1 for begin, end in held_out.spans()]


def test_a_replay_is_as_sure_as_the_least_sure_of_the_dreams_that_a_success_is_dreamt(gathered):
    """The other noise is the one that a dream has when it is dreamt again; what is shown is the first."""
    made, learnt, dream = world_model(gathered.learnt), gathered.learnt, DreamConfig(part=4, again=1)
    one, other = (replayed(made, learnt, replace(dream, noise=noise, again=0)) for noise in (0, 1))
    both = replayed(made, learnt, dream)
    assert (one.sure < other.sure).any() and (one.sure > other.sure).any(), "so either may be the least sure"
    np.testing.assert_array_equal(both.sure, np.minimum(one.sure, other.sure))
    np.testing.assert_array_equal(both.pictures, one.pictures)


def test_every_moment_has_a_promise_and_calls_have_their_own(gathered):
    learnt = gathered.learnt
    value = promise(world_model(learnt), learnt)
    assert value.shape == learnt.success.shape and ((value >= 0) & (value <= 1)).all()
    begin, end = learnt.spans()[1]
    if end - begin > 7:  # between the first two calls, a straight line
        np.testing.assert_allclose(np.diff(value[begin + 5 : begin + 8]), (value[begin + 6] - value[begin + 5]))


def test_dreams_begin_where_something_is_decided(gathered):
    learnt = gathered.learnt
    made = world_model(learnt)
    starts = starts_of(made, learnt, np.zeros(len(learnt.state)), KeyframeConfig(lead=1))
    assert len(starts.first) == learnt.count
    jumps = np.abs(np.diff(learnt.action[:, 3])) / 2 >= 0.5
    assert (len(starts.keyframes) > 0) == bool(jumps.any())


def test_the_same_ppo_learns_in_a_dream(policy, gathered, tmp_path):
    """The policy that was trained in it is the one that plays in the simulator."""
    made = world_model(gathered.learnt)
    starts = starts_of(made, gathered.learnt, np.zeros(len(gathered.learnt.state)), KeyframeConfig())
    world = DreamWorld(made, starts, Limits((np.inf, np.inf)), DreamConfig(horizon=10, deadline=10, part=4))
    method = RLConfig(
        FlowSampler(FlowSde(0.5), LastStep(), 4), WindowConfig(4, 2), loop=LoopConfig(2, validate_every=1)
    )
    folder = RunFolder(tmp_path / "run", {})
    context = RunContext(world, policy, 1, OneProcess())
    trained, _ = improve(method, context, EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4), folder)
    rows = folder.metrics("rl")
    assert len(rows) == 3 and rows[-1]["env/steps_total"] > 0
    env = WORLD.make(2)
    again = TinyVLA.from_pretrained(folder.checkpoint("best"), env.spec)
    env.close()
    assert again.spec.images == trained.spec.images


@pytest.mark.parametrize("limit, doubt", [(np.inf, 0.0), (-1.0, 1.0)])
def test_a_dream_that_ends_in_doubt_tells_nothing_of_inverse_dynamics(policy, gathered, limit, doubt):
    """It shows last what it showed before, and so would seem not to have moved at all."""
    made = world_model(gathered.learnt)
    starts = starts_of(made, gathered.learnt, np.zeros(len(gathered.learnt.state)), KeyframeConfig())
    env = ImaginedEnv(made, starts, 4, Limits((limit,)), DreamConfig(horizon=5, part=4, failed=2.0, done=2.0))
    seen = watch(env, made, policy, range(4), torch.Generator().manual_seed(1))
    assert seen.doubt == doubt and (seen.slip > 0) == (doubt == 0)


def test_a_checkpoint_is_the_same_world_and_stands_for_no_other(gathered, tmp_path):
    made = world_model(gathered.learnt)
    save_world(made, tmp_path / "world", {"limits": [1.0, 2.0]})
    env = WORLD.make(1)
    again, saved = load_world(tmp_path / "world", env.spec)
    env.close()
    assert saved["limits"] == [1.0, 2.0] and again.config == made.config
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    for options, what in (({"cameras": ["top"]}, "cameras"), ({"image_size": 32}, "cameras")):
        other = WORLD.with_options(**options).make(1)
        with pytest.raises(UserError, match=f"trained for other {what}"):
            load_world(tmp_path / "world", other.spec)
        other.close()


def test_a_policy_is_improved_in_dreams_and_judged_in_the_truth(tmp_path, policy):
    """The whole recipe; without demonstrations, an untrained policy's episodes teach nothing about success."""
    start, demonstrations = tmp_path / "start", tmp_path / "demonstrations"
    policy.save_pretrained(start)
    save_demonstrations(collect(EnvConfig(), 2, seed=1), demonstrations, video="never")
    sampler, loop = FlowSampler(FlowSde(0.5), LastStep(), 4), LoopConfig(3, validate_every=1)
    plan = Plan(
        WorldConfig(backbone=SMALL),
        DreamConfig(horizon=10, deadline=10, part=4),
        KeyframeConfig(),
        GATHER,
        fit=WorldFit(*[FitConfig(steps=3, batch=4)] * 4),
        refit=WorldFit(*[FitConfig(steps=1, batch=4)] * 4),
        trust=TrustConfig(max_hallucinated=1.0),
        coevolution=CoevolutionConfig(budget=3, batch=2, every=1, doubt=-1.0),  # doubt is always said to have risen
    )
    recipe = Imagine(
        RLConfig(sampler, WindowConfig(4, 2), loop=loop),
        plan,
        str(start),
        env=WORLD,
        evaluation=EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4),
    )
    with pytest.raises(UserError, match="none of 5 episodes succeeded"):
        recipe.run(RunFolder(tmp_path / "failures", recipe))
    shown = replace(recipe, plan=replace(plan, demonstrations=str(demonstrations)))
    folder = RunFolder(tmp_path / "run", shown)
    found = shown.run(folder)
    assert found["simulator_episodes"] == 8 + 3 and found["bought"] == 3  # all that was allowed
    decisions = json.loads((folder.path / "coevolution.json").read_text())
    assert [one["buy"] for one in decisions] == [0, 2, 1] and decisions[1]["reasons"]
    assert sorted(path.name for path in (folder.path / "episodes").glob("bought-*")) == ["bought-1.npz", "bought-2.npz"]
    assert found["imitation"]["episodes"] == found["imagined_rl"]["episodes"] == 4
    assert found["gain"]["low"] <= found["gain"]["mean"] <= found["gain"]["high"]
