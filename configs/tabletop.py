"""The other tabletop tasks: place, push, and one policy for all three; the same PPO as the demo's."""

from vla_rl.cli.recipes import Imitate, Improve
from vla_rl.cli.stages import RLConfig
from vla_rl.cli.world import World
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.training.fit import FitConfig
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.on_policy import LoopConfig

# Less noise than in the demo: these tasks need a steadier hand.
RL = RLConfig(FlowSampler(FlowSde(0.5), LastStep(), 4), loop=LoopConfig(iterations=450, validate_every=20))
GROUNDING = GroundingConfig(scenes=8000, fit=FitConfig(steps=1500, batch=64, learning_rate=2e-3))

# As in the demo, an episode that takes much longer than the expert has failed while learning.
PLACE = World(
    "place",
    training_options={"deadline": 50},
    expert="sims.mujoco.tasks.place_expert:PlaceExpert",
    scenes="sims.mujoco.tasks.scenes:place",
)


def imitate_place() -> Imitate:
    """Place by imitation."""
    return Imitate(
        world=PLACE,
        grounding=GROUNDING,
        imitation=ImitationConfig(200, fit=FitConfig(steps=2000, batch=64, learning_rate=1e-3)),
    )


def place() -> Improve:
    """Place by PPO, from the checkpoint ``--policy``."""
    return Improve(RL, policy="runs/imitate_place/checkpoints/imitation", world=PLACE)
