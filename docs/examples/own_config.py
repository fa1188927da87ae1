"""A config of your own: ``vla-rl train own_config.py:point_mass`` in the folder that holds it and ``noisy_policy.py``.

A config is a function that returns a frozen dataclass with everything about a run; ``--field value`` overrides a part
of it.  The file is copied into the run folder, so that the run can be resumed when the file has changed.
"""

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import StartFrom
from vla_rl.recipes.trainers import OnPolicyRL
from vla_rl.training.loop import LoopConfig


def point_mass() -> Improve:
    """PPO of the linear policy on the toy ``point_mass``: bring a point to the origin."""
    rl = OnPolicyRL(
        policy=StartFrom(),
        experience=WindowConfig(num_envs=64, decisions=16),
        loop=LoopConfig(iterations=60, validate_every=20),
        algorithm=PPOConfig(lr=1e-2, lr_bounds=(1e-4, 5e-2), target_kl=0.02, critic_warmup=1),
    )
    return Improve(
        rl,
        policy="noisy_policy:LinearGaussian",
        env=EnvConfig("point_mass"),
        evaluation=EvaluationConfig(validation=64, test=64, num_envs=64),
    )
