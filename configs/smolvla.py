"""A downloaded SmolVLA (arXiv 2506.01844): ``vla-rl train smolvla.py:ppo --policy FOLDER --env NAME``.

Its action expert is trained, its vision-language model is frozen.  No paper improves SmolVLA by RL: numbers are those
of pi_RL, ResFiT and DSRL (``vla_rl/recipes/vla.py``), with five actions of a chunk executed.  docs/bring/vla.md
"""

from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import vla
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.improve import Improve
from vla_rl.training.fit import FitConfig

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
