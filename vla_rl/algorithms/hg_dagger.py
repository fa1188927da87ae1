"""HG-DAgger (Kelly et al. 2019, arXiv 1810.02890): a person takes over when needed, and the policy imitates that.

The robot acts by itself; a person takes over where it goes wrong and hands back when all is well again.  What the
person did is aggregated, ``D <- D + {(o, a_human)}``, and the policy imitates

    L = sum_D m_h l_h / sum_D m_h + alpha mean_demonstrations l_h

where ``l_h`` is the policy's own imitation loss of action ``h`` of a chunk (flow matching for a flow policy) and
``m_h`` is 1 where the person chose it: a person who takes over in the middle of a chunk is imitated from there on.  The
chunk's other actions are an input of a flow, as executed and with noise, but no target.  Tasks are equally likely.

Versions do not matter: the target is what a person did in a state, whoever led there.  So there is neither a bound of
staleness nor an importance weight; the oldest corrections leave when there are more than ``capacity``.

Deviations: demonstrations enter by a weight of their own and not by their number (theirs would outweigh the first
corrections); the paper's risk estimate, an ensemble's doubt above which a person should watch, is not part of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vla_rl.algorithms.chunk_learner import ChunkLearner, GradientConfig
from vla_rl.algorithms.chunks import Chunks, chunks_of
from vla_rl.algorithms.decisions import ages
from vla_rl.algorithms.off_policy import mean
from vla_rl.contract.batch import Rollout
from vla_rl.contract.config import check_limits


@dataclass(frozen=True)
class HGDaggerConfig(GradientConfig):
    """And the schedule."""

    steps: int = 50  # gradient steps per rollout, once there are corrections

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, steps=(1, math.inf))


class HGDagger(ChunkLearner[HGDaggerConfig]):
    """A ``LoopLearner`` of a policy with a loss for every action (``ActionwiseImitation``)."""

    name, imitated = "HG-DAgger", "correction"

    @property
    def corrections(self) -> Chunks | None:
        """What a person did."""
        return self.kept

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Add what a person did in ``rollout``, then take the gradient steps; none while nobody has intervened.

        Raises NonFiniteError before a NaN could enter the weights, and ContractError for a decision of a version that
        the learner has not reached.
        """
        acted, all_steps = float((rollout.intervened & rollout.valid).sum()), float(rollout.valid.sum())
        metrics = {
            "rollout/intervened": acted / max(1.0, all_steps),
            "rollout/decisions": float(self.add(rollout)),
            "replay/corrections": float(len(self.kept) if self.kept else 0),
        }
        return {**metrics, **self.learn(self.config.steps)}

    def add(self, rollout: Rollout) -> int:
        """Keep the decisions of ``rollout`` in which a person acted; returns how many.

        Raises ContractError for a decision of a version that the learner has not reached.
        """
        human = rollout.intervened & rollout.valid
        ages(rollout, self.policy.version)
        return self.keep(chunks_of(rollout, human, self.policy))

    def learn(self, steps: int) -> dict[str, float]:
        """Take so many gradient steps; none, and no metrics, while nobody has intervened."""
        if self.kept is None:
            return {}
        return mean([self.step(self.kept) for _ in range(steps)])
