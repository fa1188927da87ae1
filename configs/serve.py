"""Learners beside a fleet's server: vla-rl serve FOLDER --learn serve.py:corrections --policy CHECKPOINT"""

from vla_rl.algorithms.hg_dagger import HGDaggerConfig
from vla_rl.algorithms.recap import RecapConfig
from vla_rl.fleet.sampler import SamplerConfig
from vla_rl.recipes.fleet.learn import Learn
from vla_rl.recipes.fleet.learners import LearnByAdvantage, LearnByCorrections

BASE = "runs/fleet/base"


def corrections() -> Learn:
    """HG-DAgger: what people correct is imitated, beside the demonstrations."""
    return Learn(LearnByCorrections(HGDaggerConfig(lr=2e-4)), f"{BASE}/checkpoints/imitation", f"{BASE}/demonstrations")


def recap() -> Learn:
    """RECAP: what robots do alone is learnt from as well."""
    method = LearnByAdvantage(RecapConfig(lr=2e-4), SamplerConfig(min_corrections=0.4), guidance=1.5)
    return Learn(method, f"{BASE}/checkpoints/imitation", f"{BASE}/demonstrations")
