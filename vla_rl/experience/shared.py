"""Several learners that read each other's rollouts, with importance weights.

The idea is SAPO's (Gensyn AI team 2025, arXiv 2509.08721), whose nodes learn from rollouts of their own and of others.
The paper reports cumulative rewards up to 94 % higher, of small language models on reasoning tasks.

    rollout of an update = own columns | columns of at most ``rollouts`` rollouts of others

Others' decisions have the version before the learner's own, so they count as stale: the log-probs that were recorded
when they were made are those of their behaviour, and the decoupled objective weighs them by
min(pi_prox / pi_behaviour, w_max) (``algorithms/staleness.py``).  As for stale decisions of one's own, advantages and
the critic's targets are those of the policy that acted.

Deviations from the paper: the importance weights; features, samples and log-probs are shared and not decoded text, so
learners must have the frozen part of their policies in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vla_rl.contract.batch import ExperienceSource, Resumable, Rollout
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.experience.board import Board, layout
from vla_rl.experience.columns import moved, side_by_side

_APART = 1 << 40  # between the seeds of two learners: more than there are seeds


class SharedSource:
    """The ``ExperienceSource`` of one learner among several: ``source`` and beside it what others left on ``board``.

    ``policy`` is what the learner changes.  Nobody waits: where nothing new is there, a rollout is one's own alone.  So
    which rollouts meet depends on the learners' speed, and equal seeds do not give equal results.

    ``Rollout.others`` says which columns are others'.  Counters in ``info`` are of one's own; ``rollout/shared`` is the
    share of decisions that are others'.  Seeds of others are moved to negative numbers, so that a group of episodes
    never has members of two learners.  It is for on-policy learners: a replay buffer would continue one learner's
    episodes by another's.  It is ``Resumable`` if ``source`` is.
    """

    def __init__(self, source: ExperienceSource, board: Board, policy: Policy, rollouts: int = 1) -> None:
        self.source, self.board, self.policy, self.rollouts = source, board, policy, rollouts
        if isinstance(source, Resumable):
            self._resumable = source
            self.state_dict, self.load_state_dict = self._state, self._load

    def next(self) -> Rollout:
        """Collect, publish, and read; raises UserError for rollouts of another environment or another form."""
        own = self.source.next()
        self.board.publish(own)
        others = self.board.newest(self.rollouts)
        for other in others:
            _require_like(own, other)
        return beside(own, others, self.policy.version - 1)

    def _state(self) -> dict[str, Any]:
        return {"source": self._resumable.state_dict(), "board": self.board.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._resumable.load_state_dict(state["source"])
        self.board.load_state_dict(state["board"])


def beside(own: Rollout, others: Sequence[Rollout], version: int) -> Rollout:
    """``own`` and the columns of ``others``, whose decisions have ``version``."""
    if not others:
        return replace(own, info={**own.info, "rollout/shared": 0.0})
    device, width = own.reward.device, own.reward.shape[1]
    columns = [
        replace(
            moved(other, device),
            version=torch.full_like(other.version, version, device=device),
            seeds=other.seeds.to(device) - number * _APART,
        )
        for number, other in enumerate(others, 1)
    ]
    whole = side_by_side([own, *columns])
    active = whole.valid.any(-1)
    share = float(active[:, width:].sum()) / max(1.0, float(active.sum()))
    is_other = torch.arange(active.shape[1], device=device) >= width
    return replace(whole, info={**own.info, "rollout/shared": share}, others=is_other, spans=own.spans)


def _require_like(own: Rollout, other: Rollout) -> None:
    """Raise UserError for another environment, or arrays of another form."""
    if own.robot != other.robot:
        raise UserError(
            f"another learner shares rollouts of {other.robot!r} and this one learns in {own.robot!r}, so they cannot "
            "learn from each other; give each environment a folder of its own."
        )
    here, there = layout(own), layout(other)
    different = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    if different:
        name = different[0]
        raise UserError(
            f"{name} is {there.get(name, 'missing')} in a rollout of another learner and {here.get(name, 'missing')} "
            "here, so they cannot learn from each other; share only among runs with the same policy and experience."
        )
