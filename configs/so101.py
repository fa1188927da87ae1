"""The SO-101: a policy by imitation of fifty scripted episodes, in chunks of 16 actions (0.64 s at 25 Hz)."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.tiny import NewTiny
from vla_rl.training.fit import FitConfig
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.imitation import ImitationConfig

ENV = EnvConfig("so101")


def imitate() -> Imitate:
    """A flow policy whose chunks are long enough to be executed while the next one is computed."""
    return Imitate(
        env=ENV,
        new=NewTiny(horizon=16),
        grounding=GroundingConfig(scenes=6000, fit=FitConfig(steps=1000, batch=64, lr=2e-3)),
        imitation=ImitationConfig(50, stride=1, fit=FitConfig(steps=3000, batch=64, lr=1e-3)),
    )
