"""SmolVLA (arXiv 2506.01844), downloaded: ``vla-rl train smolvla.py:ppo --policy FOLDER --env NAME``; and a small one.

Of a downloaded one the action expert is trained, the vision-language model is frozen.  No paper improves SmolVLA by RL:
numbers are those of pi_RL, ResFiT and DSRL (``vla_rl/recipes/vla.py``), with five actions of a chunk executed.
docs/bring/vla.md
"""

from dataclasses import replace

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import vla
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import Imitate, NewSmolVLA
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.trainers import RLConfig
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig
from vla_rl.training.loop import LoopConfig

OPTIONS = VLAOptions(horizon=5)


def imitate() -> ImitateDataset:
    """Imitation of ``--dataset FOLDER`` as in LeRobot: 20,000 steps of 64 chunks at 1e-4."""
    fit = FitConfig(steps=20_000, batch=64, lr=1e-4, weight_decay=1e-10, warmup=1000, grad_norm=10.0)
    return vla.imitate("SmolVLA", OPTIONS, fit)


def ppo() -> Improve:
    """PPO on the expert's flow: noise in one random step of four."""
    return vla.improve(vla.flow_ppo(), OPTIONS)


def grpo() -> Improve:
    """GRPO on the expert's flow."""
    return vla.improve(vla.flow_grpo(), OPTIONS)


def residual_td3() -> Improve:
    """A small correction at every control step; all of the model is frozen."""
    return vla.improve(vla.residual_td3(), OPTIONS)


def dsrl() -> Improve:
    """The noise that the flow starts from is chosen; all of the model is frozen."""
    return vla.improve(vla.dsrl(), OPTIONS)


# A SmolVLA of two million random weights on two CPU cores: it learns to point at named objects on labelled scenes,
# imitates, and improves by the same code as the published model.
ENV = EnvConfig("lift", training_options={"deadline": 25})  # as in the demo
SAMPLER = FlowSampler(FlowSde(0.6), LastStep(), 4)
EVALUATION = EvaluationConfig(validation=256, test=512)


def small_imitate() -> Imitate:
    """A hundred demonstrations, from which the action expert alone learns."""
    return Imitate(
        env=ENV,
        new=NewSmolVLA(options=VLAOptions(horizon=5, sampler=SAMPLER)),
        grounding=GroundingConfig(scenes=12000, fit=FitConfig(steps=1200, batch=64, lr=1e-3)),
        imitation=ImitationConfig(100, stride=1, fit=FitConfig(steps=1500, batch=64, lr=1e-3)),
        evaluation=EVALUATION,
    )


def small_ppo() -> Improve:
    """The demo's PPO, from the checkpoint ``--policy``; the vision-language model is frozen."""
    return Improve(
        RLConfig(
            SAMPLER,
            WindowConfig(128, 5),
            loop=LoopConfig(iterations=200, validate_every=25),
            algorithm=PPOConfig(target_kl=0.1),
        ),
        policy="runs/small_imitate/checkpoints/imitation",
        env=ENV,
        evaluation=EVALUATION,
    )


def small_residual_td3() -> Improve:
    """A small correction at every control step, over the checkpoint ``--policy`` and its ``--demonstrations``."""
    loop = LoopConfig(100_000, 0, save_every=50, collapse=1.0, env_steps=50_000, validate_steps=10_000)
    trainer = replace(load_config("compare.py:residual_step").rl, loop=loop)
    run = "runs/small_imitate"
    return Improve(trainer, f"{run}/checkpoints/imitation", f"{run}/demonstrations", env=ENV, evaluation=EVALUATION)
