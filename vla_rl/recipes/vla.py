"""What the configs of downloaded vision-language-action models share: methods with the numbers of their papers.

Rollouts are those of one device: published runs collect up to eight times as much for an update, on eight.  The trust
region on the exact KL, which changes the learning rate, is ours; published ones keep it constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vla_rl.algorithms.chunks import ImitationPolicy
from vla_rl.algorithms.dppo import DPPOConfig
from vla_rl.algorithms.dsrl import DSRLConfig
from vla_rl.algorithms.group_relative import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.algorithms.self_imitation import SelfImitationConfig
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, OneRandomStep
from vla_rl.policies.gaussian_around import AroundConfig
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.latent_noise import SquashedLatentConfig
from vla_rl.policies.residual import ResidualConfig
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import NewImitator, SelfImitated
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import GaussianOutput, PPOResidual, SACLatent, StartFrom, TD3Residual
from vla_rl.recipes.trainers import OffPolicyRL, OnPolicyRL, ReplayConfig, RLConfig, TrainerConfig
from vla_rl.training.fit import FitConfig, RelativeImitationConfig
from vla_rl.training.loop import LoopConfig

LIFT = EnvConfig("lift")  # --env names another one
_EVALUATION = EvaluationConfig(validation=128, test=512, num_envs=64)
_ITERATIONS = LoopConfig(iterations=300, validate_every=20, save_every=5)
# Episodes of RL are counted in control steps where methods collect as they learn.
_STEPS = LoopConfig(100_000, 0, save_every=50, collapse=1.0, env_steps=500_000, validate_steps=25_000)
_GROUPS = GroupConfig(groups=16, size=8)


@dataclass(frozen=True)
class Downloaded(NewImitator):
    """No policy from nothing: a downloaded folder has to be named."""

    family: str

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> ImitationPolicy:
        """Raises UserError: there is nothing that could be built."""
        raise UserError(
            f"no {self.family} was named, so there are no weights to start from; add --policy FOLDER with a downloaded "
            "one (docs/bring/vla.md)."
        )


def imitate(family: str, options: VLAOptions, fit: FitConfig) -> ImitateDataset:
    """Imitation of a LeRobot dataset from a downloaded folder; every control step begins a chunk."""
    study = RelativeImitationConfig(demonstrations=0, stride=1, draws=1, fit=fit)
    return ImitateDataset(new=Downloaded(family), imitation=study, vla=options)


def improve(rl: TrainerConfig, options: VLAOptions) -> Improve:
    """RL by ``rl`` from the folder ``--policy``."""
    return Improve(rl, policy="", env=LIFT, evaluation=_EVALUATION, vla=options)


def flow_ppo(noise: float = 0.5, steps: int = 4) -> RLConfig:
    """pi_RL (arXiv 2510.25889; RLinf's libero_spatial_ppo_openpi): Flow-SDE noise in one random step of ``steps``."""
    algorithm = PPOConfig(
        epochs=4, minibatch=512, micro_batch=128, lr=5e-6, lr_bounds=(1e-7, 1e-4), clip_low=0.2, clip_high=0.2,
        critic_lr=1e-4, gamma=0.99, lam=0.95,
    )  # fmt: skip
    return RLConfig(
        _sampler(noise, steps), WindowConfig(64, 48), final_noise=1.0, loop=_ITERATIONS, algorithm=algorithm
    )


def flow_grpo(noise: float = 0.5, steps: int = 4) -> RLConfig:
    """GRPO on the same chains: groups of eight episodes from one seed, no critic (RLinf's GRPO of pi0)."""
    algorithm = GRPOConfig(epochs=1, minibatch=512, micro_batch=128, lr=5e-6, lr_bounds=(1e-7, 1e-4))
    return RLConfig(_sampler(noise, steps), _GROUPS, final_noise=1.0, loop=_ITERATIONS, algorithm=algorithm)


def residual_td3() -> OffPolicyRL:
    """ResFiT (arXiv 2509.19301): a correction of at most .2 half-ranges at every control step; the model is frozen.

    It reads the model's pooled prefix and the state, where ResFiT trains an image encoder of its own.  Half of ResFiT's
    batches are demonstrations: ``--demonstrations FOLDER --rl.replay.share 0.5``.
    """
    big = HeadConfig(width=1024)
    algorithm = ResidualTD3Config(
        batch=256, utd_ratio=4.0, policy_delay=4, learning_starts=10_000, critic_warmup=10_000, num_critics=10,
        num_min_q=2, critic=big, lr=1e-6, critic_lr=1e-4, tau=0.005,
    )  # fmt: skip
    policy = TD3Residual(ResidualConfig(scale=0.2, noise=0.05, head=big))
    replay = ReplayConfig(gamma=0.99, n_step=3, share=0.0)
    return OffPolicyRL(policy, WindowConfig(32, 8), replay, _STEPS, algorithm)


def dsrl() -> OffPolicyRL:
    """DSRL (arXiv 2506.15799), as its authors' code for pi0: SAC chooses one row of the noise, repeated for the chunk.

    Its networks read the model's pooled prefix and the state instead of pictures of 64 x 64 pixels.
    """
    small = HeadConfig(width=128, depth=3)
    algorithm = DSRLConfig(batch=256, utd_ratio=20.0, learning_starts=500, num_critics=10, critic=small, lr=3e-4)
    policy = SACLatent(SquashedLatentConfig(head=small, magnitude=1.0, rows=1))
    replay = ReplayConfig(gamma=0.999, n_step=1, share=0.0)
    return OffPolicyRL(policy, WindowConfig(32, 2), replay, _STEPS, algorithm)


def token_ppo() -> OnPolicyRL:
    """RLinf-VLA (arXiv 2510.06710; maniskill_ppo_openvlaoft): 128 environments, 160 control steps in chunks of 8."""
    algorithm = PPOConfig(
        epochs=1, minibatch=640, micro_batch=40, lr=1e-4, lr_bounds=(1e-6, 3e-4), clip_low=0.2, clip_high=0.28,
        critic_lr=3e-3, gamma=0.99, lam=0.95, grad_norm=10.0,
    )  # fmt: skip
    return OnPolicyRL(StartFrom(), WindowConfig(128, 20), _ITERATIONS, algorithm)


def token_grpo() -> OnPolicyRL:
    """SimpleVLA-RL (arXiv 2509.09674): one epoch, clipped at .8 and 1.28, groups of eight with dynamic sampling.

    Advantages leave the episode itself out of its group's mean and are not divided by the group's deviation.
    """
    algorithm = GRPOConfig(epochs=1, minibatch=128, micro_batch=16, lr=5e-6, lr_bounds=(1e-7, 1e-4))
    return OnPolicyRL(StartFrom(), replace(_GROUPS, groups=64, limit=256), _ITERATIONS, algorithm)


def gaussian_ppo(std: float = 0.1) -> OnPolicyRL:
    """PPO of a head that regresses, by a Gaussian around it with a learnt ``std``: no paper has its numbers.

    Rollouts are those of :func:`token_ppo`, with a lower learning rate and a ratio for every action.
    """
    algorithm = PPOConfig(
        epochs=1, minibatch=640, micro_batch=40, lr=1e-5, lr_bounds=(1e-7, 1e-4), critic_lr=3e-3, gamma=0.99, lam=0.95
    )
    return replace(token_ppo(), policy=_gaussian(std), algorithm=algorithm)


def gaussian_grpo(std: float = 0.1) -> OnPolicyRL:
    """GRPO of the same, with the numbers of :func:`token_grpo`."""
    return replace(token_grpo(), policy=_gaussian(std))


def dppo() -> OnPolicyRL:
    """DPPO (arXiv 2409.00588) of a diffusion head: a ratio for every denoising step."""
    algorithm = DPPOConfig(
        epochs=1, minibatch=640, micro_batch=10, lr=1e-5, lr_bounds=(1e-7, 1e-4), critic_lr=3e-3, gamma=0.99, lam=0.95
    )
    return OnPolicyRL(StartFrom(), WindowConfig(128, 20), _ITERATIONS, algorithm)


def residual_ppo() -> OnPolicyRL:
    """A Gaussian correction, at first mostly below .1 half-ranges, at every control step; the model is frozen."""
    policy = PPOResidual(ResidualConfig(scale=0.2, noise=0.5, head=HeadConfig(width=1024)))
    return OnPolicyRL(policy, WindowConfig(128, 160), _ITERATIONS, PPOConfig(gamma=0.99, lam=0.95))


def self_imitation(std: float = 0.05) -> SelfImitated:
    """Imitation of one's own successes, played by a Gaussian around what the policy says."""
    algorithm = SelfImitationConfig(batch=64, draws=1, lr=1e-4)
    return SelfImitated(WindowConfig(64, 80), loop=_ITERATIONS, algorithm=algorithm, policy=_gaussian(std))


def _gaussian(std: float) -> GaussianOutput:
    return GaussianOutput(AroundConfig(std, logprob_per="action"))


def _sampler(noise: float, steps: int) -> FlowSampler:
    return FlowSampler(FlowSde(noise), OneRandomStep(), steps)
