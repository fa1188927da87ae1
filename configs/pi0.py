"""A downloaded pi0 (arXiv 2410.24164): ``vla-rl train pi0.py:ppo --policy FOLDER --env NAME``.

Its action expert is trained, its vision-language model is frozen and in bfloat16, as in pi_RL (train_expert_only); five
actions of a chunk are executed, with DSRL twenty, as in their runs on LIBERO.  docs/bring/vla.md
"""

from dataclasses import replace

from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import vla
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.improve import Improve
from vla_rl.training.fit import FitConfig

OPTIONS = VLAOptions(horizon=5, dtype="bfloat16")


def imitate() -> ImitateDataset:
    """Imitation of ``--dataset FOLDER`` as in openpi: 30,000 steps of 32 chunks at 2.5e-5, of the expert alone."""
    return vla.imitate("pi0", OPTIONS, FitConfig(steps=30_000, batch=32, lr=2.5e-5, weight_decay=0.01, warmup=1000))


def ppo() -> Improve:
    """pi_RL's PPO (arXiv 2510.25889): Flow-SDE noise in one random step of four."""
    return vla.improve(vla.flow_ppo(), OPTIONS)


def grpo() -> Improve:
    """GRPO on the same chains."""
    return vla.improve(vla.flow_grpo(), OPTIONS)


def residual_td3() -> Improve:
    """A small correction at every control step; all of the model is frozen."""
    return vla.improve(vla.residual_td3(), OPTIONS)


def dsrl() -> Improve:
    """The noise that the flow starts from is chosen; all of the model is frozen."""
    return vla.improve(vla.dsrl(), replace(OPTIONS, horizon=20))
