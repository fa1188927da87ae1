"""Recorded episodes as if a policy's decisions had been executed to their end: demonstrations, and what robots did."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.chunks import DEMONSTRATED
from vla_rl.contract.batch import Rollout
from vla_rl.experience.columns import side_by_side
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.fleet.episodes import FleetEpisode
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.recipes.fleet.export import demonstrations_of
from vla_rl.recipes.imitation import encode_episodes


@dataclass(frozen=True)
class _Labels:
    """Of each of ``N`` control steps: whether a person acted, by which version the robot did, and the outcome."""

    intervened: np.ndarray  # bool [N]
    version: np.ndarray  # int [N]
    success: bool
    robot: str


def recorded_rollout(policy: FlowPolicy, episodes: Demonstrations) -> Rollout:
    """The successful ``episodes`` as columns: each ``H`` times, with chunks that begin at its step 0, 1, ... ``H - 1``.

    So every control step begins a decision, as in imitation, and the decisions of a column follow each other.
    """
    count = len(episodes.state)
    nobody = np.zeros(count, bool)
    return _columns(policy, episodes, _Labels(nobody, nobody + DEMONSTRATED, True, "demonstrations"))


def fleet_rollout(policy: FlowPolicy, episode: FleetEpisode, known: Collection[int]) -> Rollout:
    """What a robot and its person did, in columns as those of :func:`recorded_rollout`.

    ``known``: the versions of the fleet's policy; a robot that ran another policy counts as one of version 0.  Raises
    ContractError for a task that the policy does not have.
    """
    steps = demonstrations_of(episode).with_tasks(policy.spec.tasks)
    version = np.array([one if one in known else 0 for one in episode.versions])
    person = np.array(episode.intervened)
    return _columns(policy, steps, _Labels(person, version, episode.end.success, episode.sender.robot))


def _columns(policy: FlowPolicy, episodes: Demonstrations, labels: _Labels) -> Rollout:
    features = encode_episodes(policy, episodes)
    chunks, columns = episodes.chunks(policy.horizon), list[Rollout]()
    for begin, end in episodes.spans():
        for first in range(begin, min(begin + policy.horizon, end)):
            index = np.arange(first, end, policy.horizon)
            columns.append(_column(features, chunks, labels, index, int(episodes.task[begin])))
    return side_by_side(columns)


def _column(
    features: dict[str, Tensor], chunks: tuple[np.ndarray, np.ndarray], labels: _Labels, index: np.ndarray, task: int
) -> Rollout:
    length, (executed, within) = len(index), (item[index] for item in chunks)
    last = torch.zeros(length, 1, dtype=torch.bool)
    last[-1] = True
    ahead = np.minimum(index[:, None] + np.arange(within.shape[1]), len(labels.intervened) - 1)
    valid = torch.as_tensor(within)[:, None]
    person = torch.as_tensor(labels.intervened[ahead])[:, None] & valid
    actions = torch.as_tensor(executed)[:, None]
    kept = {name: item[[*index.tolist(), int(index[-1])]][:, None] for name, item in features.items()}
    whole = torch.zeros(length, 1, dtype=torch.long)
    return Rollout(
        features=kept,
        sample=actions,
        executed=actions,
        aux={},
        logprob=torch.zeros(length, 1),
        reward=torch.zeros(valid.shape),
        valid=valid,
        intervened=person,
        terminated=last,
        truncated=torch.zeros_like(last),
        success=last & labels.success,
        version=torch.as_tensor(labels.version[index])[:, None],
        final_index=torch.zeros(0, 2, dtype=torch.long),
        final_features={name: item[:0, 0] for name, item in kept.items()},
        seeds=whole - 1,
        task=whole + task,
        robot=labels.robot,
    )
