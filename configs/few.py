"""A few hundred episodes of lift and place: a residual alone, and what each use of a perfect model adds to it.

``vla-rl few`` runs all of them; see docs/results/imagination.md.
"""

from dataclasses import replace

from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.few.learn import FewEpisodes
from vla_rl.recipes.few.selection import CriticSelection, LatentSelection, Selection
from vla_rl.recipes.few.uses import Branches, NoModel, Use
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.off_policy import OffPolicyRL, ReplayConfig
from vla_rl.recipes.policies import TD3Residual
from vla_rl.training.fit import FitConfig
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.imitation import ImitationConfig
from world_models.latent import LatentConfig

LIFT = EnvConfig("lift", training_options={"deadline": 25})
PLACE = EnvConfig("place", training_options={"deadline": 50})
SMALL = HeadConfig(width=128)
ALONE = NoModel()
RESIDUAL = ResidualConfig(horizon=5, plan=0, correlation=0.0, head=SMALL)  # a decision is a chunk of the base


def imitate_lift() -> Imitate:
    """The demo's first half."""
    return Imitate(env=LIFT)


def imitate_place() -> Imitate:
    """Place, as in tabletop.py."""
    grounding = GroundingConfig(scenes=8000, fit=FitConfig(steps=1500, batch=64, lr=2e-3))
    study = ImitationConfig(200, fit=FitConfig(steps=2000, batch=64, lr=1e-3))
    return Imitate(env=PLACE, grounding=grounding, imitation=study)


def lift_residual_quarter() -> FewEpisodes:
    """A gradient step in four decisions."""
    return _lift(0.25)


def lift_residual_one() -> FewEpisodes:
    """A gradient step in every decision."""
    return _lift(1.0)


def lift_residual_four() -> FewEpisodes:
    """Four gradient steps in every decision."""
    return _lift(4.0)


def lift_selection() -> FewEpisodes:
    """The best of eight candidates one decision ahead."""
    return _lift(1.0, Selection())


def lift_critic_selection() -> FewEpisodes:
    """The best of eight candidates by the critics, without a model."""
    return _lift(1.0, CriticSelection())


def lift_latent_selection() -> FewEpisodes:
    """The best of eight candidates by a latent model that is learnt beside the critics."""
    return _lift(1.0, LatentSelection(LatentConfig()))


def lift_branches() -> FewEpisodes:
    """A tenth of the batch are decisions of today's actor from recorded moments."""
    return _lift(1.0, Branches())


def lift_expansion() -> FewEpisodes:
    """Half of the batch looks three decisions of today's actor ahead."""
    return _lift(1.0, EXPANSION)


def place_residual_quarter() -> FewEpisodes:
    """A gradient step in four decisions."""
    return _place(0.25)


def place_residual_one() -> FewEpisodes:
    """A gradient step in every decision."""
    return _place(1.0)


def place_residual_four() -> FewEpisodes:
    """Four gradient steps in every decision."""
    return _place(4.0)


def place_selection() -> FewEpisodes:
    """The best of eight candidates one decision ahead."""
    return _place(1.0, Selection())


def place_critic_selection() -> FewEpisodes:
    """The best of eight candidates by the critics, without a model."""
    return _place(1.0, CriticSelection())


def place_latent_selection() -> FewEpisodes:
    """The best of eight candidates by a latent model that is learnt beside the critics."""
    return _place(1.0, LatentSelection(LatentConfig()))


def place_branches() -> FewEpisodes:
    """A tenth of the batch are decisions of today's actor from recorded moments."""
    return _place(1.0, Branches())


def place_expansion() -> FewEpisodes:
    """Half of the batch looks three decisions of today's actor ahead."""
    return _place(1.0, EXPANSION)


EXPANSION = Branches(share=0.5, decisions=3, first="executed", kept=4096)


def _lift(utd_ratio: float, use: Use = ALONE) -> FewEpisodes:
    return _few(LIFT, replace(RESIDUAL, scale=0.3, noise=0.1), 0.0, utd_ratio, use)


def _place(utd_ratio: float, use: Use = ALONE) -> FewEpisodes:
    return _few(PLACE, replace(RESIDUAL, scale=0.1, noise=0.05), 0.02, utd_ratio, use)


def _few(env: EnvConfig, residual: ResidualConfig, penalty: float, utd_ratio: float, use: Use) -> FewEpisodes:
    """A decision is a chunk: 100 episodes are 500 to 800 of them."""
    algorithm = ResidualTD3Config(
        utd_ratio=utd_ratio,
        learning_starts=200,
        burst=500,
        critic_warmup=500,
        num_critics=4,
        critic=SMALL,
        lr=1e-4,
        tau=0.01,
        value_bounds=(0.0, 1.0),
        penalty=penalty,
    )
    rl = OffPolicyRL(
        TD3Residual(residual),
        WindowConfig(num_envs=8, decisions=2),
        replay=ReplayConfig(gamma=0.98, n_step=2, share=0.25),
        algorithm=algorithm,
    )
    return FewEpisodes(rl, use, env=env)
