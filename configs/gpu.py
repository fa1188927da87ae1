"""On a GPU: the tabletop on MuJoCo-Warp and in imagination, ManiSkill, public VLAs by the memory of the card.

    vla-rl train gpu.py:demo                                                    # lift from nothing
    vla-rl train gpu.py:lift --policy runs/demo/checkpoints/imitation

Simulator, policy and learner compute on the GPU that torch sees; where it sees none, those of the tabletop compute on
the processor, slowly.  What was measured, and on which card: docs/results/gpu.md.
"""

import math
from dataclasses import replace
from typing import Any

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import ActorConfig
from vla_rl.policies.vla.inference import CudaGraph
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import vla
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.trainers import CriticConfig, StateBased
from vla_rl.training.loop import LoopConfig

NUM_ENVS = 1024
EVALUATION = EvaluationConfig(validation=NUM_ENVS, test=NUM_ENVS, ablation=NUM_ENVS, num_envs=NUM_ENVS)


def demo() -> Demo:
    """What ``make demo-gpu`` runs: lift from nothing, by demonstrations, imitation and then :func:`lift`."""
    improve: Any = lift()
    return Demo(improve.rl, env=improve.env, evaluation=EVALUATION, device="auto")


def lift() -> Improve:
    """The demo's PPO from the checkpoint ``--policy``, with eight times its rollout."""
    return _on_warp("demo.py:last_step", LoopConfig(iterations=60, validate_every=10))


def place() -> Improve:
    """Place, from the checkpoint ``--policy`` of ``tabletop.py:imitate_place``."""
    return _on_warp("tabletop.py:place", LoopConfig(iterations=80, validate_every=10))


def push() -> Improve:
    """Push, from the checkpoint ``--policy`` of ``tabletop.py:imitate_push``."""
    return _on_warp("tabletop.py:push", LoopConfig(iterations=80, validate_every=10))


def mixed() -> Improve:
    """One policy for all three, from the checkpoint ``--policy`` of ``tabletop.py:imitate_mixed``."""
    return _on_warp("tabletop.py:mixed", LoopConfig(iterations=100, validate_every=10))


def _on_warp(config: str, loop: LoopConfig) -> Improve:
    """``config`` with as many environments as a GPU takes at once, and half of a rollout in a minibatch."""
    recipe = load_config(config)
    window = replace(recipe.rl.experience, num_envs=NUM_ENVS)
    algorithm = replace(recipe.rl.algorithm, minibatch=NUM_ENVS * window.decisions // 2)
    env = EnvConfig("warp", {"env": recipe.env.name, "device": "auto"}, recipe.env.training_options)
    rl = replace(recipe.rl, experience=window, algorithm=algorithm, loop=loop)
    return replace(recipe, rl=rl, env=env, evaluation=EVALUATION, device="auto")


def imagine() -> Imagine:
    """Lift in a video model that learns from episodes of the checkpoint ``--policy``, 256 dreams at once."""
    recipe = load_config("imagine.py:lift")
    window, loop = replace(recipe.rl.experience, num_envs=256), LoopConfig(iterations=30, validate_every=6)
    return replace(recipe, rl=replace(recipe.rl, experience=window, loop=loop), device="auto")


def pick_cube() -> Improve:
    """ManiSkill's PickCube from nothing, by its state, with the numbers of ManiSkill's own PPO."""
    ppo = PPOConfig(
        gamma=0.8, lam=0.9, epochs=8, minibatch=1600, lr=3e-4, critic_lr=3e-4, lr_bounds=(1e-5, 1e-3), target_kl=0.05,
        stop_kl=2.0, clip_low=0.2, clip_high=0.2, critic_warmup=1,
    )  # fmt: skip
    return Improve(
        StateBased(
            ActorConfig(width=256, depth=3, std=0.6),
            CriticConfig(width=256, depth=3),
            ppo,
            WindowConfig(NUM_ENVS, decisions=50),
            LoopConfig(iterations=200, validate_every=20, save_every=20, collapse=math.inf),
        ),
        policy="",
        env=EnvConfig("maniskill", {"task": "PickCube-v1", "ends_at_success": False, "device": "auto"}),
        evaluation=EVALUATION,
        device="auto",
    )


# Of public models, from the folder --policy in the environment --env; weights of the expert are float32, layers compute
# in bfloat16.  One card learns from as many decisions at once as its memory takes: pi0 needs 11.5 GB before it learns
# and .25 GB for each, SmolVLA 2.4 and .11.  Of an observation SmolVLA's prefix is kept, and pi0's pictures.


def smolvla_24gb() -> Improve:
    """SmolVLA on one card of 24 GB."""
    return _vla(decisions=24)


def smolvla_80gb() -> Improve:
    """SmolVLA on one card of 80 GB."""
    return _vla(decisions=48)


def smolvla_8x80gb() -> Improve:
    """SmolVLA on eight cards of 80 GB, by torchrun: every process plays and learns like the one of an 80 GB card."""
    return _vla(decisions=48, cards=8, micro_batch=256)


def pi0_24gb() -> Improve:
    """pi0 on one card of 24 GB."""
    return _vla(decisions=24)


def pi0_80gb() -> Improve:
    """pi0 on one card of 80 GB."""
    return _vla(decisions=48)


def pi0_8x80gb() -> Improve:
    """pi0 on eight cards of 80 GB, by torchrun: every process plays and learns like the one of an 80 GB card."""
    return _vla(decisions=48, cards=8, micro_batch=128)


def _vla(decisions: int, cards: int = 1, micro_batch: int = 0) -> Improve:
    rl: Any = vla.flow_ppo()
    window = WindowConfig(num_envs=64, decisions=decisions)
    algorithm = replace(rl.algorithm, minibatch=512 * cards, micro_batch=micro_batch)
    options = VLAOptions(horizon=5, dtype="bfloat16", inference=CudaGraph())
    return replace(vla.improve(replace(rl, experience=window, algorithm=algorithm), options), device="cuda")
