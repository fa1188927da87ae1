"""A downloaded OpenVLA-OFT (arXiv 2502.19645) over discrete action tokens: ``vla-rl train openvla_oft.py:ppo --policy
FOLDER --env NAME``.

All tokens of a chunk come from one pass.  LoRA of rank 32 on the language model, in bfloat16; vision is frozen.
A folder of the first OpenVLA takes ``decoding=Autoregressive()`` in a config of your own.  docs/bring/vla.md
"""

from dataclasses import replace

from vla_rl.policies.openvla.decoding import OpenVLAOptions, Parallel
from vla_rl.policies.vla.options import TrainLoRA
from vla_rl.recipes import vla
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.improve import Improve
from vla_rl.training.fit import FitConfig

OPTIONS = OpenVLAOptions(
    decoding=Parallel(8), logprob_per="token", trains=TrainLoRA(rank=32, alpha=16.0), dtype="bfloat16"
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
    """A small correction at every control step; all of the model is frozen."""
    return vla.improve(vla.residual_td3(), OPTIONS)
