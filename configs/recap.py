"""A recorded dataset, failures too: ``vla-rl train recap.py:offline --dataset FOLDER --policy CHECKPOINT --env NAME``.

Any policy that imitates: ours, or a downloaded SmolVLA, pi0, pi0.5 or OpenVLA(-OFT).  docs/algorithms/recap.md
"""

from vla_rl.recipes.offline import ByWeight, LearnOffline


def offline() -> LearnOffline:
    """RECAP: imitate everything, conditioned on how good it was, and act as if the next decision were good."""
    return LearnOffline()


def weighted() -> LearnOffline:
    """Advantage-weighted imitation: what was good is imitated more often."""
    return LearnOffline(method=ByWeight())
