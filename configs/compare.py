"""Methods that improve the same imitation policy, side by side: what ``make compare`` runs.

Every function takes the checkpoint ``--policy``; those that learn from demonstrations take ``--demonstrations``, too.
"""

from dataclasses import replace

from vla_rl.algorithms.dppo import DPPOConfig
from vla_rl.algorithms.dsrl import DSRLConfig, NoiseAliasedConfig
from vla_rl.algorithms.gorl import GoRLConfig
from vla_rl.algorithms.group_relative import GRPOConfig
from vla_rl.algorithms.guard import FallbackConfig
from vla_rl.algorithms.offline import IQLConfig, WSRLConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.algorithms.sac import RLPDConfig
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import SquashedConfig
from vla_rl.policies.flow import AllSteps, FlowNoise, FlowSampler, FlowSde, LastStep
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import BlendConfig, ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import Diffusion, PPOLatent, PPOResidual, SACLatent, SquashedActor, TD3Residual
from vla_rl.recipes.trainers import OffPolicyRL, OnPolicyRL, ReplayConfig, RLConfig, TrainerConfig
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig
from vla_rl.training.loop import LoopConfig

# As in the demo and in tabletop.py.
LIFT = EnvConfig("lift", training_options={"deadline": 25})
PLACE = EnvConfig("place", training_options={"deadline": 50})
# Every trainer has the same control steps; only they count, so the iterations never run out.
BUDGET = LoopConfig(100_000, 100_000, save_every=50, collapse=1.0, env_steps=150_000, validate_steps=10_000)
ON_POLICY = replace(BUDGET, save_every=5, collapse=0.15)
# Small enough for one core to learn from 150,000 decisions in minutes.
SMALL = HeadConfig(width=128)
# A decision is a chunk of five actions, as the imitation policy's: an episode is a few decisions to explore, and the
# critics learn from a fifth as many.
CHUNKS = SquashedActor(SquashedConfig(horizon=5, head=SMALL))
CHUNK_REPLAY = ReplayConfig(gamma=0.98, n_step=1)


def imitate_lift() -> Imitate:
    """The demo's first half."""
    return Imitate(env=LIFT)


def flow_sde() -> Improve:
    """The demo's PPO: noise in the flow's last step."""
    return _lift(RLConfig(FlowSampler(FlowSde(0.6), LastStep(), 4), loop=ON_POLICY))


def flow_noise() -> Improve:
    """PPO with learned noise in all of the flow's steps."""
    sampler = FlowSampler(FlowNoise(0.04, 0.16), AllSteps(), 4)
    return _lift(RLConfig(sampler, loop=ON_POLICY, algorithm=PPOConfig(entropy=1e-4)))


def grpo() -> Improve:
    """Advantages relative to groups of eight episodes from one seed; no critic."""
    groups = GroupConfig(groups=16, size=8)
    return _lift(RLConfig(FlowSampler(FlowSde(0.6), LastStep(), 4), groups, loop=ON_POLICY, algorithm=GRPOConfig()))


def residual_td3() -> Improve:
    """A correction of the frozen base's chunks, learnt off-policy and kept near what was tried: what to begin with.

    Half of the episodes are the base's at first, and fewer while the actor is level with it; the actor returns when it
    succeeds less often.  Chosen on push, seeds 11 and 12; docs/results has seeds 17 to 19.
    """
    blend = BlendConfig(decisions=6000, start=0.5, per="episode")
    algorithm = ResidualTD3Config(
        utd_ratio=0.5,
        learning_starts=1000,
        burst=500,
        critic_warmup=1000,
        num_critics=4,
        critic=SMALL,
        lr=1e-4,
        tau=0.01,
        value_bounds=(0.0, 1.0),
        anchor=0.1,
        fallback=FallbackConfig(margin=0.05),
    )
    residual = ResidualConfig(scale=0.2, horizon=0, plan=0, noise=0.04, correlation=0.0, head=SMALL, blend=blend)
    trainer = OffPolicyRL(
        TD3Residual(residual, temperature=0.3),
        WindowConfig(num_envs=32, decisions=2),
        replay=ReplayConfig(gamma=0.99, n_step=4, share=0.0),
        loop=replace(BUDGET, save_every=200, validate_steps=50_000),
        algorithm=algorithm,
    )
    return _lift(trainer)


def residual_step() -> Improve:
    """A larger correction at every step: sooner at 98 % on lift, and far below its base on longer tasks."""
    return _lift(_residual_td3(TD3Residual(ResidualConfig(head=SMALL))))


def residual_function() -> Improve:
    """The same over a base that is only a Python function: classical vision with a camera that was pushed."""
    function = "sims.mujoco.tasks.lift:act_miscalibrated"
    return _lift(_residual_td3(TD3Residual(ResidualConfig(head=SMALL), function)))


def residual_ppo() -> Improve:
    """The same correction, learnt by PPO."""
    return _lift(
        OnPolicyRL(
            PPOResidual(ResidualConfig(noise=0.5, head=SMALL)), WindowConfig(num_envs=128, decisions=25), loop=ON_POLICY
        )
    )


def dppo() -> Improve:
    """A diffusion policy from the same demonstrations, every denoising step an action of PPO."""
    return _lift(OnPolicyRL(Diffusion(), WindowConfig(), loop=ON_POLICY, algorithm=DPPOConfig()))


def dsrl() -> Improve:
    """SAC chooses the noise that the flow starts from; the flow is frozen."""
    replay = ReplayConfig(gamma=0.98, n_step=1, share=0.0)  # of a demonstration no noise is known
    algorithm = DSRLConfig(
        utd_ratio=0.25,
        learning_starts=1200,  # decisions of nearly the base, as in residual TD3
        critic_warmup=500,
        policy_delay=2,
        num_critics=4,
        critic=SMALL,
        tau=0.01,
        temperature=1e-3,  # returns are at most 1, the entropy of 20 entries begins near 14 in every decision
        temperature_lr=1e-3,
        value_bounds=(0.0, 1.0),
    )
    return _lift(OffPolicyRL(SACLatent(), replay=replay, loop=BUDGET, algorithm=algorithm))


def dsrl_na() -> Improve:
    """The same with critics of actions, which demonstrations train as well."""
    algorithm = NoiseAliasedConfig(
        batch=128,  # each of its samples is decoded three times
        utd_ratio=0.125,
        learning_starts=1200,
        critic_warmup=250,
        policy_delay=2,
        num_critics=4,
        critic=SMALL,
        tau=0.01,
        temperature=1e-3,
        temperature_lr=1e-3,
        value_bounds=(0.0, 1.0),
        distillations=2,
    )
    replay = ReplayConfig(gamma=0.98, n_step=1)
    return _lift(OffPolicyRL(SACLatent(), replay=replay, loop=BUDGET, algorithm=algorithm))


def gorl() -> Improve:
    """PPO chooses the noise; now and then the flow is refitted to what it led to.

    In so few steps PPO finds no direction to go in: the gradients of different rollouts at the same policy are
    unrelated here, while those of Flow-SDE's agree a little.  What is left is drift, and every refit makes it part of
    the flow.  The same noise is worth steering: DSRL, which uses every decision many times, gains by it.
    """
    # The noise has a std of 1 in 20 entries: a smaller KL than this moves it too little in 49 iterations.
    algorithm = GoRLConfig(target_kl=0.2, lr=1e-3, lr_bounds=(1e-5, 3e-3), iterations=12, window=6)
    return _lift(OnPolicyRL(PPOLatent(), loop=ON_POLICY, algorithm=algorithm))


def rlpd() -> Improve:
    """A new policy from nothing but demonstrations in every batch; it reads the imitation policy's features."""
    # The entropy of 20 entries must not outweigh a success, which is worth 1 once.
    algorithm = RLPDConfig(
        learning_starts=600, utd_ratio=0.4, policy_delay=2, num_critics=4, critic=SMALL, temperature=0.003
    )
    return _lift(OffPolicyRL(CHUNKS, replay=replace(CHUNK_REPLAY, share=0.5), loop=BUDGET, algorithm=algorithm))


def wsrl() -> Improve:
    """The same policy, taught offline by the demonstrations, which are then left behind.

    As soon as the actor moves, what was taught is lost for some 30,000 steps: critics that learnt from successes, and a
    little of this policy's own doing, do not know how bad other actions are.
    """
    # Without a least std, 30 demonstrations are learnt by heart: 2 % success before the first decision, not 60.
    policy = SquashedActor(replace(CHUNKS.squashed, std_bounds=(0.2, 7.0)))
    offline = IQLConfig(num_min_q=2, expectile=0.7, beta=3.0, critic=SMALL, value_bounds=(0.0, 1.0))
    algorithm = WSRLConfig(
        batch=256,
        learning_starts=1000,
        utd_ratio=0.35,
        policy_delay=2,
        num_critics=4,
        critic=SMALL,
        critic_warmup=3000,  # 1000 of them online: critics that only know successes praise whatever they are shown
        temperature=1e-4,  # 20 entries as sharp as these cost 0.16 of value in every decision with 0.003
        offline_steps=2000,
        offline=offline,
    )
    return _lift(OffPolicyRL(policy, replay=replace(CHUNK_REPLAY, share=0.5), loop=BUDGET, algorithm=algorithm))


def imitate_place() -> Imitate:
    """Place, as in tabletop.py."""
    grounding = GroundingConfig(scenes=8000, fit=FitConfig(steps=1500, batch=64, lr=2e-3))
    study = ImitationConfig(200, fit=FitConfig(steps=2000, batch=64, lr=1e-3))
    return Imitate(env=PLACE, grounding=grounding, imitation=study)


def place_residual_td3() -> Improve:
    """As on lift."""
    return replace(residual_td3(), env=PLACE)


def place_residual_step() -> Improve:
    """As on lift.

    As soon as the actor moves, success falls, and it takes 100,000 steps to come back. Five times as many decisions
    before its first step do not help, nor does a fifth of its rate; a penalty on the size of the correction halves the
    fall: the actor leaves the corrections that were tried, and beyond them the critics guess.
    """
    return replace(residual_step(), env=PLACE)


def place_rlpd() -> Improve:
    """As on lift.

    From nothing, 150,000 steps are not enough for a task that is twice as long; it is still rising.
    """
    return replace(rlpd(), env=PLACE)


def place_wsrl() -> Improve:
    """As on lift.

    What was taught offline is lost as on lift, and 150,000 steps are not enough to find it again: the best that was
    validated, which is what is tested, is the offline policy.
    """
    return replace(wsrl(), env=PLACE)


def place_grpo() -> Improve:
    """As on lift."""
    return replace(grpo(), env=PLACE)


def _lift(trainer: TrainerConfig) -> Improve:
    return Improve(trainer, env=LIFT)


def _residual_td3(policy: TD3Residual) -> OffPolicyRL:
    algorithm = ResidualTD3Config(
        learning_starts=6000,  # decisions of the base with noise, from which the critics learn what it is worth
        critic_warmup=1500,
        num_critics=4,
        critic=SMALL,
        lr=1e-4,
        tau=0.01,
        value_bounds=(0.0, 1.0),
    )
    replay = ReplayConfig(gamma=0.98, n_step=5, share=0.25)
    return OffPolicyRL(policy, replay=replay, loop=BUDGET, algorithm=algorithm)
