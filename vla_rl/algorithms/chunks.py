"""Recorded chunks of actions to imitate, and which of their actions count: what every imitation learns from.

An action that was not demonstrated, not executed or not chosen by whom is imitated has no weight in the loss, and every
other action of a minibatch has the same: the sum over those that count is divided by their number.  LeRobot masks what
lies past an episode's end as well (``action_is_pad``) but divides by all actions, so there a minibatch with many ends
counts less.  What does not count is still an input of a flow or a diffusion, with noise, as the places of a chunk are
when the policy acts: past an episode's end its last action, repeated; after an end inside an executed chunk what the
policy chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vla_rl.algorithms.decisions import flatten, select_each
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Features, Policy, public, require
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.normalization import Affine

DEMONSTRATED = -1  # in place of a policy's version


class ImitationPolicy(Policy, Protocol):
    """A policy that learns chunks of actions by a loss of its own, such as flow matching or denoising.

    Besides, it may have

    encode_with_grad(obs)       the features with gradient, for a vision backbone that learns too
    imitation_features(obs)     {name: [N,...]} on the host, where its loss reads other features than its decisions;
                                with ``chunk_length``, the actions of a chunk to imitate, of which it executes the first
    with_trained_backbone()     itself, keeping pictures in its features so that RL can train the backbone, and
    encode_again(features)      the features, with gradient, as today's backbone makes them of those pictures
    """

    spec: EnvSpec
    action_scale: Affine

    @property
    def horizon(self) -> int:
        """``H``: actions in a chunk."""

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """The loss [B,H] of every action of normalised ``chunks`` [B,H,D], each with ``draws`` random draws.

        ``features`` {name: [B,...]} are those of the observations before the chunks.
        """

    def trainable(self) -> dict[str, nn.Parameter]: ...

    def save_pretrained(self, folder: str | Path) -> None: ...


def require_imitation(policy: Any, needed_by: str) -> ImitationPolicy:
    """``policy``; raises UserError when it has no loss for every action."""
    cure = "so a person's actions cannot be told from the others in a chunk; use a flow policy, or add them."
    require(policy, needed_by, ("imitation_losses", "action_scale"), cure)
    found: ImitationPolicy = policy
    return found


@dataclass(frozen=True)
class Chunks:
    """``N`` decisions to imitate.

    features  {name: [N,...]}  encoded observations
    actions   [N,H,D]          what was executed, normalised
    counts    bool [N,H]       the actions that are imitated
    task      int [N]
    version   int [N]          of the policy that acted, ``DEMONSTRATED`` where none did
    """

    features: dict[str, Tensor]
    actions: Tensor
    counts: Tensor
    task: Tensor
    version: Tensor

    def __len__(self) -> int:
        return len(self.actions)

    def select(self, index: Tensor) -> Chunks:
        """The decisions at ``index`` (positions or a mask)."""
        rest = (item[index] for item in (self.actions, self.counts, self.task, self.version))
        return Chunks(select_each(self.features, index), *rest)

    def to_state(self) -> dict[str, Any]:
        """Nested dicts of tensors (see ``Resumable``); ``Chunks(**state)`` restores it."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def chunks_of(rollout: Rollout, counts: Tensor, policy: ImitationPolicy) -> Chunks:
    """The decisions of ``rollout`` with an action that ``counts`` bool [T,E,H]."""
    used, task = counts.any(-1), torch.zeros_like(rollout.seeds) if rollout.task is None else rollout.task
    features = {name: flatten(item[:-1], used) for name, item in public(dict(rollout.features)).items()}
    actions = policy.action_scale.normalize(flatten(rollout.executed, used).float())
    return Chunks(features, actions, *(flatten(item, used) for item in (counts, task, rollout.version)))


def demonstrated(features: Mapping[str, Tensor], actions: Tensor, counts: Tensor, task: Tensor) -> Chunks:
    """Demonstrations: ``features`` {name: [N,...]}, normalised ``actions`` [N,H,D], their mask [N,H], ``task`` [N]."""
    return Chunks(dict(features), actions, counts, task, torch.full_like(task, DEMONSTRATED))


def joined(parts: list[Chunks]) -> Chunks:
    """``parts`` one after the other; raises ContractError for chunks of different lengths or features."""
    shapes = {(*part.actions.shape[1:], *sorted(part.features)) for part in parts}
    if len(shapes) > 1:
        raise ContractError(
            f"chunks of {' and '.join(str(shape) for shape in sorted(shapes, key=str))} (length, actions, features) "
            "cannot be learnt together; collect all of them with one policy."
        )
    return Chunks(
        {name: torch.cat([part.features[name] for part in parts]) for name in parts[0].features},
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("actions", "counts", "task", "version")),
    )


def drawn_equally(groups: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """``size`` positions in ``groups`` int [N], with replacement: groups are equally likely, and so is all of one."""
    _, group, count = groups.cpu().unique(return_inverse=True, return_counts=True)
    index = torch.multinomial(1.0 / count[group].double(), size, replacement=True, generator=generator)
    return index.to(groups.device)


class ChunkSampler(Protocol):
    """Chooses the decisions of the next gradient step, and may depend on the losses of those before."""

    def draw(self, chunks: Chunks, human: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """``size`` positions in ``chunks``, of which a person did ``human`` bool [N]."""

    def record(self, losses: Tensor) -> None:
        """The losses [size] of what was drawn last."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TasksEqually:
    """Tasks are equally likely, and so are the decisions of each (a ``ChunkSampler``)."""

    def draw(self, chunks: Chunks, human: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Whoever acted."""
        return drawn_equally(chunks.task, size, generator)

    def record(self, losses: Tensor) -> None:
        """They change nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class FamiliesEqually(TasksEqually):
    """Families of tasks are equally likely, and so are the decisions of each: many instructions count as one."""

    def __init__(self, families: Sequence[str]) -> None:
        """``families`` [M]: that of every task."""
        names = sorted(set(families))
        self._family = torch.tensor([names.index(name) for name in families])

    def draw(self, chunks: Chunks, human: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Whoever acted."""
        return drawn_equally(self._family.to(chunks.task.device)[chunks.task], size, generator)


def mean_loss(policy: ImitationPolicy, chunks: Chunks, draws: int, generator: torch.Generator) -> Tensor:
    """The mean of the policy's imitation loss over the actions that count; the others have no gradient."""
    losses = policy.imitation_losses(chunks.features, chunks.actions, draws, generator)
    return losses[chunks.counts].mean()
