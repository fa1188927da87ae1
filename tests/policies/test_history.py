"""Several observations: those of the last decisions in the same episode, and the same when learning as when acting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from robot_drivers.record import Query
from sims.catalog import make
from tests.residuals import SMALL
from tests.toys import seeded
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.driver import Driver
from vla_rl.experience.relabel import relabelled
from vla_rl.experience.rollout import RolloutSource
from vla_rl.policies.advantage_conditioned import AdvantageConditioned
from vla_rl.policies.diffusion import DiffusionConfig, DiffusionPolicy
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy, SquashedConfig, SquashedPolicy
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.policies.function import EpsilonRandomPolicy
from vla_rl.policies.history import EARLIER
from vla_rl.policies.latent_noise import GaussianLatent
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.real_time_chunking import RealTimeChunking
from vla_rl.policies.residual import DeterministicResidual
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.imitate import encode_episodes, imitate_policy
from vla_rl.recipes.robots.drive import PolicyDecider
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.served import Asked, SessionPolicy
from vla_rl.training.fit import FitConfig, ImitationConfig, _encoded_with_grad

STEPS, HORIZON, NUM_ENVS = 3, 4, 5
COUNTING = make("counting", num_envs=1).spec


def gaussian(spec: EnvSpec = COUNTING) -> GaussianPolicy:
    torch.manual_seed(0)
    policy = GaussianPolicy(spec, config=GaussianConfig(HORIZON, width=16, n_obs_steps=STEPS))
    nn.init.normal_(policy.last.weight, std=0.5)
    return policy.double()


def tiny(spec: EnvSpec = COUNTING, n_obs_steps: int = STEPS, horizon: int = HORIZON) -> TinyVLA:
    torch.manual_seed(0)
    sampler = FlowSampler(FlowSde(0.5), AllSteps(), 4)
    config = TinyConfig(horizon, 2, 16, 32, 1, sampler, n_obs_steps=n_obs_steps)
    policy = TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), config)
    for parameter in policy.expert.parameters():  # its noise head begins at zero
        nn.init.normal_(parameter, std=0.3)
    return policy.eval()


def source(policy, name="counting", decisions=20, **options) -> RolloutSource:
    env = make(name, num_envs=NUM_ENVS, **options)
    return RolloutSource(env, policy, decisions, SeedStream(300, 10**9), seeded(1))


def expected(steps: torch.Tensor) -> torch.Tensor:
    """The control steps [...,n-1] that a decision at ``steps`` [...] reads besides."""
    return torch.stack([(steps - k * HORIZON).clamp_min(0) for k in range(STEPS - 1, 0, -1)], -1)


# -- acting ---------------------------------------------------------------------------------------------------------


def test_a_decision_reads_those_before_it_in_its_own_episode():
    """Episodes of 3 to 29 steps end at different decisions, and each one's history begins anew."""
    rollout = source(gaussian()).next()
    ended = rollout.terminated | rollout.truncated
    assert len({tuple(column) for column in ended.T.tolist()}) == NUM_ENVS and len(rollout.final_index) > 3
    for features in (rollout.features, rollout.final_features):
        seed, steps = features["state"][..., 0], features["state"][..., 1]
        earlier = features[EARLIER + "state"].unflatten(-1, (STEPS - 1, 4))
        assert torch.equal(earlier[..., 0], seed[..., None].expand(earlier.shape[:-1]))
        # The last observation of an episode may be in mid-chunk; the decisions before it were not.
        assert torch.equal(earlier[..., 1], expected((steps / HORIZON).ceil() * HORIZON))


def learning() -> TinyVLA:
    """With a backbone that RL trains."""
    return tiny().with_trained_backbone()


@pytest.mark.parametrize("made", [gaussian, tiny, pytest.param(learning, marks=pytest.mark.full)])
def test_recorded_decisions_have_the_likelihood_that_they_were_drawn_with(made):
    policy = made()
    rollout = source(policy).next()
    flat = {name: item[:-1].flatten(0, 1) for name, item in rollout.features.items()}
    aux = {name: item.flatten(0, 1) for name, item in rollout.aux.items()}
    found = policy.log_prob(flat, rollout.sample.flatten(0, 1), aux).logprob
    bound = 1e-9 if made is gaussian else 1e-5 * rollout.aux["points"][0, 0, 1:].numel() ** 0.5
    assert (found - rollout.logprob.flatten()).abs().max() <= bound
    blind = {**flat, EARLIER + "state": flat[EARLIER + "state"].roll(1, 0)}
    assert (policy.log_prob(blind, rollout.sample.flatten(0, 1), aux).logprob - found).abs().max() > 1e-3


def test_a_saved_source_goes_on_bit_for_bit():
    whole, saved, resumed = (source(gaussian(), decisions=3) for _ in range(3))
    whole.next(), saved.next()
    resumed.load_state_dict(saved.state_dict())
    one, other = whole.next(), resumed.next()
    assert all(torch.equal(one.features[name], other.features[name]) for name in one.features)
    assert torch.equal(one.logprob, other.logprob)


def test_a_checkpoint_keeps_how_many_it_reads(tmp_path):
    for policy in (tiny(), gaussian().float()):
        policy.save_pretrained(tmp_path / type(policy).__name__)
        again = load_policy(tmp_path / type(policy).__name__, COUNTING)
        assert again.history == policy.history and again.feature_sizes == policy.feature_sizes


@pytest.mark.full
def test_an_isolated_simulator_shows_the_same():
    here, there = source(tiny()), source(tiny(), "isolated", env="counting", workers=2)
    one, other = here.next(), there.next()
    there.close()
    assert all(torch.equal(one.features[name], other.features[name]) for name in one.features)
    assert torch.equal(one.logprob, other.logprob)


# -- of what was recorded -------------------------------------------------------------------------------------------


def played(policy, episodes: int = 6) -> Demonstrations:
    """Every control step of ``episodes`` that ``policy`` plays, one after the other."""
    parts = []
    for seed in range(300, 300 + episodes):
        driver = Driver(make("counting", num_envs=1), policy, seeded(seed), observe="all")
        seen, acted = [driver.start([seed])], []
        for decision in driver.until_done():
            valid = decision.step.valid[0]
            seen += [frame for frame, counts in zip(decision.step.frames, valid, strict=True) if counts]
            acted.append(decision.step.executed[0][valid])
        obs = seen[: len(seen) - 1]
        images = {"audit": np.concatenate([one.images["audit"] for one in obs])}
        state, task, time = (np.concatenate([getattr(one, name) for one in obs]) for name in ("state", "task", "time"))
        action = np.concatenate(acted).astype(np.float32)
        parts.append(Demonstrations.of_episode(COUNTING, Observation(images, state, task, time), action, True, seed))
    return Demonstrations.joined(parts)


def test_imitation_reads_what_the_policy_would_have_seen():
    """LeRobot's clamp: what lies before an episode's first observation is that one."""
    episodes = played(gaussian())
    found = encode_episodes(gaussian(), episodes)
    earlier = found[EARLIER + "state"].unflatten(-1, (STEPS - 1, 4))
    assert torch.equal(earlier[..., 1], expected(torch.as_tensor(episodes.time).float()))
    assert torch.equal(earlier[..., 0], found["state"][:, None, 0].expand(-1, STEPS - 1))
    decided = torch.as_tensor(episodes.time % HORIZON == 0)
    for rollout in relabelled(episodes, gaussian(), COUNTING, HORIZON, seeded()):
        mine = decided & torch.as_tensor(episodes.seed == int(rollout.seeds[0, 0]))
        acted = rollout.features[EARLIER + "state"][: len(rollout.reward), 0]
        assert torch.equal(acted, found[EARLIER + "state"][mine][: len(acted)])


def test_an_episode_whose_beginning_was_cut_off_reads_no_other():
    history = gaussian().history
    time = np.array([0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12])  # the second one counts from 7
    assert history.steps_before(np.array([5, 6, 11]), time).tolist() == [[0, 1], [6, 6], [6, 7]]


def test_learning_perception_reads_the_same():
    policy, episodes = tiny(), played(gaussian())
    index = np.array([0, 1, 7, len(episodes.state) - 1])
    found, whole = _encoded_with_grad(policy, episodes.observation(), index), encode_episodes(policy, episodes)
    assert {*found} == {*whole} and all(
        item.shape[1] == policy.feature_sizes.get(name, 1) for name, item in found.items()
    )
    for name, item in found.items():
        torch.testing.assert_close(item, whole[name][index])
    found[EARLIER + "image_features"].square().sum().backward()
    assert next(policy.backbone.parameters()).grad is not None


def test_a_persons_action_ends_the_history():
    """As on a robot, whose policy begins anew when control is handed back."""
    episodes = played(gaussian(), episodes=1)
    person = np.zeros(len(episodes.state), bool)
    person[HORIZON + 1] = True
    (rollout,) = relabelled(episodes, gaussian(), COUNTING, HORIZON, seeded(), 1, person)
    steps = rollout.features[EARLIER + "state"][:, 0].unflatten(-1, (STEPS - 1, 4))[..., 1]
    assert steps[:4].tolist() == [[0, 0], [0, 0], [2 * HORIZON] * 2, [2 * HORIZON] * 2]


# -- policies on top ------------------------------------------------------------------------------------------------


def wrapped() -> dict[str, object]:
    return {
        "advantage": AdvantageConditioned(tiny()),
        "latent": GaussianLatent(tiny()),
        "squashed": SquashedPolicy(tiny(), SquashedConfig(HORIZON)),
        "diffusion": DiffusionPolicy(tiny(), DiffusionConfig(HORIZON)),
        "random": EpsilonRandomPolicy(tiny(), COUNTING, 0.0),
    }


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.full) for name in list(wrapped())[:-1]), "random"]
)
def test_policies_on_top_read_it_too(name):
    driver = Driver(make("counting", num_envs=2), wrapped()[name], [seeded(1), seeded(2)], "eval")
    driver.start([301, 303])
    for before in (0, 0, HORIZON):
        read = driver.features[EARLIER + "state"].unflatten(-1, (STEPS - 1, 4))
        steps = tiny().proprioception.unnormalize(read)[..., -1, 1]
        assert steps.round().tolist() == [before] * 2
        driver.step()


def test_a_residuals_base_sees_what_it_sees_alone():
    """Its observations are a chunk apart, and those of the correction, which begins at 0, one step."""
    base = tiny()
    residual = DeterministicResidual(base, config=replace(SMALL, horizon=1))
    alone, corrected = [], []
    for policy, chosen in ((base, alone), (residual, corrected)):
        driver = Driver(make("counting", num_envs=1), policy, [seeded(3)], "eval")
        driver.start([301])
        chosen += [
            step for decision in driver.until_done() for step in decision.step.executed[0][decision.step.valid[0]]
        ]
    np.testing.assert_allclose(np.array(corrected), np.array(alone), rtol=1e-4, atol=1e-3)
    features = source(residual, decisions=6).next().features
    read = base.proprioception.unnormalize(features[EARLIER + "state"].unflatten(-1, (STEPS - 1, 4)))[..., -1, 1]
    now = base.proprioception.unnormalize(features["state"])[..., 1]
    torch.testing.assert_close(read, (now - 1).clamp_min(0), atol=1e-3, rtol=0)


# -- servers and robots ---------------------------------------------------------------------------------------------


def seen(step: int) -> Observation:
    state = np.array([[0, step, 20, 0]], np.float32)
    return Observation({"audit": np.zeros((1, 4, 4, 3), np.uint8)}, state, np.zeros(1, int), np.full(1, step), {})


def test_a_session_has_a_history_of_its_own():
    served = SessionPolicy(gaussian().float(), 0)
    rows = [
        SingleObservation({"audit": seen(k).images["audit"][0]}, seen(k).state[0], COUNTING.tasks[0]) for k in (0, 4, 8)
    ]
    state = served.begin()
    for row in rows:
        last, state = served.decide([Asked(row, state)])[0]
    fresh, _ = served.decide([Asked(rows[-1], served.begin())])[0]
    assert not np.allclose(last, fresh)
    assert np.allclose(served.decide([Asked(rows[-1], served.begin())])[0][0], fresh)


def test_an_arm_executes_chunks_to_their_ends_and_begins_anew_after_a_person():
    decide, alone = PolicyDecider(gaussian().float(), None), PolicyDecider(gaussian().float(), None)
    decide(Query(seen(0), 0, None, 0))
    then = decide(Query(seen(4), 4, HORIZON, 0)).chunk
    fresh = alone(Query(seen(4), 4, None, 0)).chunk
    assert not np.allclose(then, fresh)
    assert np.allclose(decide(Query(seen(4), 4, None, 0)).chunk, fresh)
    with pytest.raises(UserError, match=r"4 control steps apart.*after 2.*--execution open_loop"):
        decide(Query(seen(6), 6, 2, 0))
    with pytest.raises(UserError, match=r"asked sooner.*without --real-time"):
        RealTimeChunking(tiny())


def test_pictures_that_are_learnt_from_scratch_are_refused():
    with pytest.raises(UserError, match="n_obs_steps is 2 and image would be read"):
        GaussianConfig(cameras=("image",), n_obs_steps=2)


# -- what it is for -------------------------------------------------------------------------------------------------

DRIFT = EnvSpec(
    name="drift",
    images={"eye": ArraySpec((8, 8, 3), "uint8", 0, 255, frame="eye")},
    state=ArraySpec((1,), "float32", -1.0, 1.0),
    action=ArraySpec((1,), "float32", -1.0, 1.0),
    tasks=("follow",),
    control_dt=0.1,
    time_limit=6,
    max_chunk=2,
)


def drifting(episodes: int = 100) -> Demonstrations:
    """A point drifts left or right from anywhere; the right action is its velocity, which no observation shows."""
    rng, parts = np.random.default_rng(0), []
    for episode in range(episodes):
        velocity = rng.choice([-0.05, 0.05])
        state = (rng.uniform(-0.5, 0.5) + velocity * np.arange(6))[:, None].astype(np.float32)
        obs = Observation({"eye": np.zeros((6, 8, 8, 3), np.uint8)}, state, np.zeros(6, int), np.arange(6))
        action = np.full((6, 1), 10 * velocity, np.float32)
        parts.append(Demonstrations.of_episode(DRIFT, obs, action, True, episode))
    return Demonstrations.joined(parts)


@pytest.mark.full
def test_two_observations_show_a_velocity_that_one_does_not():
    episodes, errors = drifting(), {}
    moving = torch.as_tensor(episodes.time > 0)
    for number in (1, 2):
        policy = tiny(DRIFT, number, 1)
        policy.proprioception = Affine.from_data(torch.as_tensor(episodes.state))
        imitate_policy(policy, episodes, ImitationConfig(stride=1, fit=FitConfig(steps=300, batch=128, lr=3e-3)), 1)
        features = {name: item[moving] for name, item in encode_episodes(policy, episodes).items()}
        action = policy.act(features, {}, "eval", seeded(2))[0].action[:, 0]
        errors[number] = float((action - torch.as_tensor(episodes.action)[moving]).abs().mean())
    assert errors[2] < 0.1 < 0.3 < errors[1], errors
