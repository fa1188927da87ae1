"""pi0.5 (arXiv 2504.16054), downloaded: ``vla-rl train pi05.py:ppo --policy FOLDER --env NAME``; and a small one.

As ``pi0.py``, with the five denoising steps that pi_RL takes for pi0.5.  docs/bring/vla.md
"""

from dataclasses import replace

from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import vla
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.imitate import Imitate, NewPi05
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.improve import Improve
from vla_rl.training.fit import FitConfig

OPTIONS = VLAOptions(horizon=5, dtype="bfloat16")


def imitate() -> ImitateDataset:
    """Imitation of ``--dataset FOLDER`` as in LeRobot: 30,000 steps of 32 chunks at 2.5e-5, of the expert alone."""
    return vla.imitate("pi0.5", OPTIONS, FitConfig(steps=30_000, batch=32, lr=2.5e-5, weight_decay=0.01, warmup=1000))


def ppo() -> Improve:
    """pi_RL's PPO (arXiv 2510.25889): Flow-SDE noise in one random step of five."""
    return vla.improve(vla.flow_ppo(steps=5), OPTIONS)


def grpo() -> Improve:
    """GRPO on the same chains."""
    return vla.improve(vla.flow_grpo(steps=5), OPTIONS)


def residual_td3() -> Improve:
    """A small correction at every control step; all of the model is frozen."""
    return vla.improve(vla.residual_td3(), OPTIONS)


def dsrl() -> Improve:
    """The noise that the flow starts from is chosen; all of the model is frozen."""
    return vla.improve(vla.dsrl(), replace(OPTIONS, horizon=20))


# A pi0.5 of two million random weights on two CPU cores, by the numbers of the small SmolVLA (smolvla.py).
def small_imitate() -> Imitate:
    """A hundred demonstrations, from which the action expert alone learns."""
    recipe: Imitate = load_config("smolvla.py:small_imitate")
    return replace(recipe, new=NewPi05(options=recipe.new.options))  # type: ignore[attr-defined]  # of a NewSmolVLA


def small_ppo() -> Improve:
    """PPO of the action expert, from the checkpoint ``--policy``; the vision-language model is frozen."""
    recipe: Improve = load_config("smolvla.py:small_ppo")
    return recipe
