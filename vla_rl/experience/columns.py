"""Whole episodes as columns of a rollout: cut from what was collected, and put side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout
from vla_rl.contract.policy import Features
from vla_rl.experience.driver import Decision
from vla_rl.experience.rollout import executed_or_chosen, stack_dicts, to_tensor

_ZERO_WHEN_IDLE = (
    "sample",
    "executed",
    "logprob",
    "reward",
    "valid",
    "intervened",
    "terminated",
    "truncated",
    "success",
)
_KEPT_WHEN_IDLE = ("version", "seeds", "task")


def episode_column(
    decisions: Sequence[Decision], env_id: int, seed: int, final: Features | None, robot: str = ""
) -> Rollout:
    """The episode that environment ``env_id`` played in ``decisions``: a rollout with E = 1, ended by the last of them.

    ``final`` {name: [...]} are the features of the last observation of a truncated episode.  A terminated episode
    (None) has no value after its end, so the features of its last decision stand there as well.
    """
    steps, outs = [decision.step for decision in decisions], [decision.out for decision in decisions]
    features = [{name: item[env_id] for name, item in decision.features.items()} for decision in decisions]
    features.append(final or features[-1])
    length, truncated, device = len(decisions), final is not None, outs[0].sample.device
    end = torch.zeros(length, 1, dtype=torch.bool, device=device)
    end[-1] = True

    def over_time(items: Sequence[Any]) -> Tensor:
        return torch.stack([to_tensor(item)[env_id] for item in items])[:, None].to(device)

    return Rollout(
        features={name: item[:, None] for name, item in stack_dicts(features).items()},
        sample=over_time([out.sample for out in outs]),
        executed=over_time([executed_or_chosen(decision.step, decision.out) for decision in decisions]),
        aux={name: over_time([out.aux[name] for out in outs]) for name in outs[0].aux},
        logprob=over_time([out.logprob for out in outs]),
        reward=over_time([step.reward for step in steps]),
        valid=over_time([step.valid for step in steps]),
        intervened=over_time([step.intervened for step in steps]),
        terminated=end & (not truncated),
        truncated=end & truncated,
        success=end & bool(steps[-1].success[env_id]),
        version=torch.tensor([[out.policy_version] for out in outs], device=device),
        final_index=torch.tensor([[length - 1, 0]], device=device)[: int(truncated)],
        final_features={name: item[None][: int(truncated)] for name, item in features[-1].items()},
        seeds=torch.full((length, 1), seed, device=device),
        task=over_time([decision.obs.task for decision in decisions]),
        robot=robot,
    )


def side_by_side(parts: Sequence[Rollout], info: Mapping[str, float] | None = None) -> Rollout:
    """Rollouts of any length side by side; shorter ones idle (``valid`` False) after their last decision.

    An idle decision has the features of the last observation; its samples and log-probs are 0 and mean nothing.
    """
    length = max(len(part.reward) for part in parts)
    widths = torch.tensor([0] + [part.reward.shape[1] for part in parts]).cumsum(0)
    arrays: dict[str, Any] = {
        name: torch.cat([_pad_with_zeros(getattr(part, name), length) for part in parts], 1) for name in _ZERO_WHEN_IDLE
    }
    arrays |= {
        name: torch.cat([_pad_with_last(getattr(part, name), length) for part in parts], 1) for name in _KEPT_WHEN_IDLE
    }
    shifted = [
        part.final_index + torch.tensor([0, int(first)], device=part.final_index.device)
        for part, first in zip(parts, widths[:-1], strict=True)
    ]
    return Rollout(
        features={
            name: torch.cat([_pad_with_last(p.features[name], length + 1) for p in parts], 1)
            for name in parts[0].features
        },
        aux={name: torch.cat([_pad_with_zeros(part.aux[name], length) for part in parts], 1) for name in parts[0].aux},
        final_index=torch.cat(shifted),
        final_features={name: torch.cat([p.final_features[name] for p in parts]) for name in parts[0].final_features},
        info=dict(info or {}),
        robot=parts[0].robot,
        **arrays,
    )


def to_state(rollout: Rollout) -> dict[str, Any]:
    """The rollout as nested dicts of arrays (see ``Resumable``); ``Rollout(**state)`` restores it."""
    return {item.name: getattr(rollout, item.name) for item in fields(rollout)}


def moved(rollout: Rollout, device: torch.device) -> Rollout:
    """``rollout`` with all its tensors on ``device``."""

    def move(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: move(item) for name, item in value.items()}
        return value.to(device) if isinstance(value, Tensor) else value

    return replace(rollout, **{item.name: move(getattr(rollout, item.name)) for item in fields(rollout)})


def _pad_with_zeros(values: Tensor, length: int) -> Tensor:
    """``values`` [T,...] padded to ``length`` with zeros."""
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])


def _pad_with_last(values: Tensor, length: int) -> Tensor:
    """``values`` [T,...] padded to ``length`` with the last one."""
    return torch.cat([values, values[-1:].expand(length - len(values), *values.shape[1:])])
