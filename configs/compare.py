"""Ways to improve the same imitation policy, side by side: what ``make compare`` runs.

Every function takes the checkpoint ``--policy``; some need ``--demonstrations``.
"""

from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.cli.method import OffPolicyRL, OnPolicyRL
from vla_rl.cli.recipes import Improve
from vla_rl.cli.subjects import PPOResidual, TD3Residual
from vla_rl.cli.world import World
from vla_rl.experience.rollout import WindowConfig
from vla_rl.training.loop import LoopConfig

LIFT = World(training_options={"deadline": 25})
BUDGET = LoopConfig(
    iterations=100_000, validate_every=100_000, save_every=50, collapse=1.0, env_steps=150_000, validate_steps=10_000
)


def residual_td3() -> Improve:
    """A small correction at every step, learnt off-policy; the base is frozen."""
    return Improve(OffPolicyRL(TD3Residual(), loop=BUDGET, algorithm=ResidualTD3Config()), world=LIFT)


def residual_ppo() -> Improve:
    """The same correction, learnt by PPO."""
    return Improve(OnPolicyRL(PPOResidual(), WindowConfig(rows=128, decisions=25), loop=BUDGET), world=LIFT)
