"""RLPD (Ball et al. 2023, arXiv 2302.02948): SAC on batches that are half recorded data, with regularised critics.

It differs from SAC (``sac.py``) in four ways, none of them in a loss:

- half of each batch is demonstrations or other recorded data, the other half the run's own: a ``Mixture`` of replay
  buffers with equal shares;
- critics have LayerNorm, which bounds the values of untried actions (``QEnsemble`` always has it);
- an ensemble of ten critics, of which a random two without replacement give the target;
- many critic steps per decision, followed by one actor step.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.algorithms.sac import SACConfig


@dataclass(frozen=True)
class RLPDConfig(SACConfig):
    """RLPD's defaults; the replay buffer defines the mixture.

    Deviation: every critic step samples its own batch, and the actor step uses the last of them.
    """

    num_critics: int = 10
    num_min_q: int = 2
    learning_starts: int = 5000
    utd_ratio: float = 20.0
    policy_delay: int = 20
    target_entropy: float = -0.5
