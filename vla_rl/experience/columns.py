"""Whole episodes as columns of a rollout: cut out of what was collected, and put side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import Step
from vla_rl.contract.policy import ActionOut, Features
from vla_rl.experience.rollout import done_or_chosen, stack_dicts, to_tensor

_IDLE = (
    "sample",
    "executed",
    "logprob",
    "reward",
    "valid",
    "intervened",
    "terminated",
    "truncated",
    "success",
)  # 0 when idle
_LASTING = ("version", "seeds")  # as before when idle


@dataclass(frozen=True)
class Moment:
    """One decision of all rows: what the policy kept of the observation, what it chose and what came of it."""

    features: Features
    out: ActionOut
    step: Step


def column(moments: Sequence[Moment], row: int, seed: int, last: Features | None) -> Rollout:
    """The episode that ``row`` played in ``moments``, a rollout with E = 1 whose last decision ended it.

    ``last`` {name: [...]} is what was kept of its last observation if it was truncated.  A terminated episode (None)
    has no value after its end, so what its last decision was made on stands there as well.
    """
    steps, length = [moment.step for moment in moments], len(moments)
    seen = [{name: item[row] for name, item in moment.features.items()} for moment in moments]
    seen.append(last or seen[-1])
    end, truncated = torch.zeros(length, 1, dtype=torch.bool), last is not None
    end[-1] = True

    def over_time(items: Sequence[Any]) -> Tensor:
        return torch.stack([to_tensor(item)[row] for item in items])[:, None]

    outs = [moment.out for moment in moments]
    return Rollout(
        features={name: item[:, None] for name, item in stack_dicts(seen).items()},
        sample=over_time([out.sample for out in outs]),
        executed=over_time([done_or_chosen(moment.step, moment.out) for moment in moments]),
        aux={name: over_time([out.aux[name] for out in outs]) for name in outs[0].aux},
        logprob=over_time([out.logprob for out in outs]),
        reward=over_time([step.reward for step in steps]),
        valid=over_time([step.valid for step in steps]),
        intervened=over_time([step.intervened for step in steps]),
        terminated=end & (not truncated),
        truncated=end & truncated,
        success=end & bool(steps[-1].success[row]),
        version=torch.tensor([[out.policy_version] for out in outs]),
        final_index=torch.tensor([[length - 1, 0]])[: int(truncated)],
        final_features={name: item[None][: int(truncated)] for name, item in seen[-1].items()},
        seeds=torch.full((length, 1), seed),
    )


def beside(parts: Sequence[Rollout], info: Mapping[str, float] | None = None) -> Rollout:
    """Rollouts of any length side by side; the shorter ones idle (``valid`` False) after their last decision.

    An idle decision shows the last observation; its samples and log-probs are 0 and mean nothing.
    """
    length = max(len(part.reward) for part in parts)
    widths = torch.tensor([0] + [part.reward.shape[1] for part in parts]).cumsum(0)
    arrays = {name: torch.cat([_idle(getattr(part, name), length) for part in parts], 1) for name in _IDLE}
    arrays |= {name: torch.cat([_lasting(getattr(part, name), length) for part in parts], 1) for name in _LASTING}
    shifted = [part.final_index + torch.tensor([0, int(at)]) for part, at in zip(parts, widths[:-1], strict=True)]
    return Rollout(
        features={
            name: torch.cat([_lasting(p.features[name], length + 1) for p in parts], 1) for name in parts[0].features
        },
        aux={name: torch.cat([_idle(part.aux[name], length) for part in parts], 1) for name in parts[0].aux},
        final_index=torch.cat(shifted),
        final_features={name: torch.cat([p.final_features[name] for p in parts]) for name in parts[0].final_features},
        info=dict(info or {}),
        **arrays,
    )


def to_state(rollout: Rollout) -> dict[str, Any]:
    """The rollout as nested dicts of arrays (see ``Resumable``); ``Rollout(**state)`` is it again."""
    return {item.name: getattr(rollout, item.name) for item in fields(rollout)}


def _idle(values: Tensor, length: int) -> Tensor:
    """``values`` [T,...] and zeros up to ``length``."""
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])


def _lasting(values: Tensor, length: int) -> Tensor:
    """``values`` [T,...] and the last of them again up to ``length``."""
    return torch.cat([values, values[-1:].expand(length - len(values), *values.shape[1:])])
