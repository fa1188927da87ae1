"""A downloaded OpenVLA-OFT (arXiv 2502.19645): ``vla-rl train openvla_oft.py:ppo --policy FOLDER --env NAME``.

Over action tokens, or with a continuous head, which the folder's files say: which functions take which head is a table
in docs/bring/vla.md.  All of a chunk comes from one pass, of a diffusion head from one for each of ten steps.  LoRA of
rank 32 on the language model, in bfloat16, heads and the state's projector whole; vision is frozen.
A folder of the first OpenVLA takes ``decoding=Autoregressive()`` in a config of your own.
"""

from dataclasses import replace
from typing import cast

from vla_rl.policies.diffusion import DiffusionSampler
from vla_rl.policies.openvla.decoding import OFT_PROCESS, OFT_REVERSE, OpenVLAOptions, Parallel
from vla_rl.policies.vla.options import TrainLoRA
from vla_rl.recipes import vla
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.imitate import Imitate, NewOpenVLA
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.trainers import OffPolicyRL
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig

OPTIONS = OpenVLAOptions(
    decoding=Parallel(8),
    logprob_per="token",
    trains=TrainLoRA(rank=32, alpha=16.0),
    dtype="bfloat16",
    denoising=DiffusionSampler(OFT_PROCESS, OFT_REVERSE, steps=10, fine_tuned=10),
)


def imitate() -> ImitateDataset:
    """Imitation of ``--dataset FOLDER`` with the authors' rate and batch, 64 chunks at 5e-4."""
    return vla.imitate("OpenVLA", OPTIONS, FitConfig(steps=50_000, batch=64, lr=5e-4, weight_decay=0.01))


def ppo() -> Improve:
    """RLinf-VLA's PPO (arXiv 2510.06710), a ratio for every token."""
    return vla.improve(vla.token_ppo(), OPTIONS)


def grpo() -> Improve:
    """SimpleVLA-RL's GRPO (arXiv 2509.09674) at temperature 1.6; it trains all weights there, LoRA's here."""
    return vla.improve(vla.token_grpo(), replace(OPTIONS, temperature=1.6))


def residual_td3() -> Improve:
    """A small correction at every control step, over any head; all of the model is frozen."""
    return vla.improve(vla.residual_td3(), OPTIONS)


def residual_ppo() -> Improve:
    """The same by PPO."""
    return vla.improve(vla.residual_ppo(), OPTIONS)


def gaussian_ppo() -> Improve:
    """PPO of an L1 head: a Gaussian around its output, with a learnt std."""
    return vla.improve(vla.gaussian_ppo(), OPTIONS)


def gaussian_grpo() -> Improve:
    """GRPO of an L1 head, in the same way."""
    return vla.improve(vla.gaussian_grpo(), OPTIONS)


def self_imitation() -> Improve:
    """An L1 head imitates its own successes, played with a little noise."""
    return vla.improve(vla.self_imitation(), OPTIONS)


def dppo() -> Improve:
    """DPPO of a diffusion head; ``ppo`` and ``grpo`` take one as well, with a ratio for the whole chain."""
    return vla.improve(vla.dppo(), OPTIONS)


# An OpenVLA-OFT of .4 million random weights with an L1 head, in the place of the small SmolVLA (smolvla.py).
def small_imitate() -> Imitate:
    """A hundred demonstrations, from which the language model and the L1 head learn.

    What its L1 head could not learn before is in docs/results/simulators.md.
    """
    recipe: Imitate = load_config("smolvla.py:small_imitate")
    return replace(
        recipe,
        new=NewOpenVLA(options=OpenVLAOptions(decoding=Parallel(5), critics="hidden")),
        grounding=GroundingConfig(scenes=8000, fit=FitConfig(steps=1000, batch=64, lr=2e-3)),
        imitation=ImitationConfig(100, stride=1, draws=1, fit=FitConfig(steps=1500, batch=64, lr=5e-4)),
    )


def small_residual_td3() -> Improve:
    """A small correction at every control step, over the checkpoint ``--policy`` and its ``--demonstrations``.

    It reads the features of the checkpoint before imitation (``--rl.policy.encoder``), which point twice as well.
    """
    recipe: Improve = load_config("smolvla.py:small_residual_td3")
    trainer = cast(OffPolicyRL, recipe.rl)
    policy = replace(cast(TD3Residual, trainer.policy), encoder="runs/small_imitate/checkpoints/grounded")
    loop = replace(trainer.loop, env_steps=150_000, validate_steps=25_000)
    return replace(recipe, rl=replace(trainer, policy=policy, loop=loop))
