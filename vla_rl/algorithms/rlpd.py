"""RLPD (Ball et al. 2023, arXiv 2302.02948): SAC whose every batch is half recorded data, with safe critics.

Four things make it differ from SAC (``sac.py``), and none of them is in a loss:

- half of each batch comes from demonstrations or other recorded data, the other half from the run itself: a ``Mixture``
  of memories with equal shares;
- critics with LayerNorm, which bounds the values of actions that nobody tried (``QEnsemble`` always has it);
- an ensemble of ten, of which a random two give the target, without replacement;
- many steps of the critics per decision, and one of the actor after them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.algorithms.sac import SACConfig


@dataclass(frozen=True)
class RLPDConfig(SACConfig):
    """RLPD's numbers; what is mixed, and how much of it, is said by the memory.

    Deviation: every step of the critics draws a batch of its own, and the actor learns from the last of them.
    """

    num_critics: int = 10
    num_min_q: int = 2
    learning_starts: int = 5000
    utd_ratio: float = 20.0
    policy_delay: int = 20
    target_entropy: float = -0.5
