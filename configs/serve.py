"""Learners beside a fleet's server: vla-rl serve FOLDER --learn serve.py:corrections --policy CHECKPOINT"""

from vla_rl.algorithms.guard import FallbackConfig, ReleaseConfig
from vla_rl.algorithms.hg_dagger import HGDaggerConfig
from vla_rl.algorithms.recap import RecapConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.fleet.sampler import SamplerConfig
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import BlendConfig, ResidualConfig
from vla_rl.recipes.fleet.learners import Learn, LearnByAdvantage, LearnByCorrections, LearnByReplay
from vla_rl.recipes.off_policy import AdaptiveReplay
from vla_rl.recipes.policies import TD3Residual

BASE = "runs/fleet/base"


def corrections() -> Learn:
    """HG-DAgger: what people correct is imitated, beside the demonstrations."""
    return Learn(LearnByCorrections(HGDaggerConfig(lr=2e-4)), f"{BASE}/checkpoints/imitation", f"{BASE}/demonstrations")


def recap() -> Learn:
    """RECAP: what robots do alone is learnt from as well."""
    method = LearnByAdvantage(RecapConfig(lr=2e-4), SamplerConfig(min_corrections=0.4), guidance=1.5)
    return Learn(method, f"{BASE}/checkpoints/imitation", f"{BASE}/demonstrations")


def residual() -> Learn:
    """Residual TD3: the policy stays, and a correction of it is learnt from everything."""
    head = HeadConfig(width=128)
    algorithm = ResidualTD3Config(
        learning_starts=1000, burst=500, critic_warmup=1000, num_critics=4, critic=head, lr=1e-4, tau=0.01,
        value_bounds=(0.0, 1.0), penalty=0.01, release=ReleaseConfig(auroc=0.65, hold=0.55),
        fallback=FallbackConfig(margin=0.08),
    )  # fmt: skip
    blend = BlendConfig(start=0.5, per="episode", size=0.2)
    policy = TD3Residual(ResidualConfig(scale=0.1, noise=0.04, head=head, blend=blend))
    method = LearnByReplay(policy, algorithm, AdaptiveReplay(gamma=0.98, n_step=5, max_age=20))
    return Learn(method, f"{BASE}/checkpoints/imitation", f"{BASE}/demonstrations")
