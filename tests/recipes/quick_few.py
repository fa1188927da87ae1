"""A config for the tests of ``vla-rl few``: eight episodes of lift, tested on six scenes."""

from dataclasses import replace

from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.few.learn import FewEpisodes
from vla_rl.recipes.few.selection import LatentSelection, Selection
from vla_rl.recipes.few.uses import Branches
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.off_policy import OffPolicyRL, ReplayConfig
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.stages import EvaluationConfig
from vla_rl.training.fit import FitConfig
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.imitation import ImitationConfig
from world_models.latent import LatentConfig

LIFT = EnvConfig("lift", training_options={"deadline": 5})
SMALL = HeadConfig(width=16)


def imitate_lift() -> Imitate:
    """As little as can be imitated."""
    return Imitate(
        env=LIFT,
        grounding=GroundingConfig(scenes=64, fit=FitConfig(steps=2, batch=8)),
        imitation=ImitationConfig(2, fit=FitConfig(steps=2, batch=8)),
        evaluation=EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4),
    )


def lift_residual_one() -> FewEpisodes:
    """Alone."""
    algorithm = ResidualTD3Config(
        batch=16,
        utd_ratio=1.0,
        learning_starts=8,
        critic_warmup=2,
        num_critics=2,
        critic=SMALL,
        value_bounds=(0.0, 1.0),
    )
    rl = OffPolicyRL(
        TD3Residual(ResidualConfig(horizon=5, plan=0, correlation=0.0, head=SMALL)),
        WindowConfig(num_envs=2, decisions=1),
        replay=ReplayConfig(share=0.0, n_step=2),
        algorithm=algorithm,
    )
    return FewEpisodes(rl, env=LIFT, episodes=(4, 8), scenes=6, num_envs=3)


def lift_selection() -> FewEpisodes:
    """The best of three."""
    return replace(lift_residual_one(), use=Selection(3))


def lift_latent_selection() -> FewEpisodes:
    """The best of three by a latent model."""
    return replace(lift_residual_one(), use=LatentSelection(LatentConfig(width=16), 3))


def lift_branches() -> FewEpisodes:
    """A tenth of the batch."""
    return replace(lift_residual_one(), use=Branches(new=4))


def lift_expansion() -> FewEpisodes:
    """Half of the batch."""
    return replace(lift_residual_one(), use=Branches(0.5, 3, "executed", new=4))
