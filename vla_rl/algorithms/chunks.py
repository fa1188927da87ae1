"""Recorded chunks of actions to imitate, and which of their actions count: what every imitation learns from.

An action that was not demonstrated, not executed or not chosen by whom is imitated has no weight in the loss, and every
other action of a minibatch has the same: the sum over those that count is divided by their number.  LeRobot masks what
lies past an episode's end as well (``action_is_pad``) but divides by all actions, so there a minibatch with many ends
counts less.  What does not count is still an input of a flow or a diffusion, with noise, as the places of a chunk are
when the policy acts: past an episode's end its last action, repeated; after an end inside an executed chunk what the
policy chose.

HG-DAgger (Kelly et al. 2019, arXiv 1810.02890): a person takes over when needed, and the policy imitates that.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vla_rl.algorithms.decisions import ages, flatten, mean, select_each
from vla_rl.algorithms.learner import BaseLearner
from vla_rl.contract.batch import Rollout
from vla_rl.contract.config import Checked, above_zero, at_least
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.contract.policy import Features, Policy, public, require
from vla_rl.policies.normalization import Affine, made_relative

DEMONSTRATED = -1  # in place of a policy's version


class ImitationPolicy(Policy, Protocol):
    """A policy that learns chunks of actions by a loss of its own, such as flow matching or denoising.

    Besides, it may have

    relative                    which entries of its actions are relative (``policies/normalization.py``); its features
                                have ``ORIGIN`` then
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
    return policy


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


def normalized(policy: ImitationPolicy, features: Mapping[str, Tensor], actions: Tensor) -> Tensor:
    """Executed ``actions`` [N,H,D], in physical units, as ``policy`` makes them of ``features`` {name: [N,...]}."""
    return policy.action_scale.normalize(made_relative(features, actions))


def chunks_of(rollout: Rollout, counts: Tensor, policy: ImitationPolicy) -> Chunks:
    """The decisions of ``rollout`` with an action that ``counts`` bool [T,E,H]."""
    used, task = counts.any(-1), torch.zeros_like(rollout.seeds) if rollout.task is None else rollout.task
    features = {name: flatten(item[:-1], used) for name, item in public(dict(rollout.features)).items()}
    actions = normalized(policy, features, flatten(rollout.executed, used).float())
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
        return drawn_equally(self._family.to(chunks.task.device)[chunks.task], size, generator)


def mean_loss(policy: ImitationPolicy, chunks: Chunks, draws: int, generator: torch.Generator) -> Tensor:
    """The mean of the policy's imitation loss over the actions that count; the others have no gradient."""
    losses = policy.imitation_losses(chunks.features, chunks.actions, draws, generator)
    return losses[chunks.counts].mean()


@dataclass(frozen=True)
class StepConfig(Checked):
    """What a gradient step is made of."""

    batch: int = at_least(64, 1)  # decisions to imitate in a step
    draws: int = at_least(2, 1)  # random draws, of noise and time for instance, per decision and step
    capacity: int = at_least(50_000, 1)  # decisions that are kept
    lr: float = above_zero(3e-4)
    weight_decay: float = at_least(1e-4, 0)
    grad_norm: float = above_zero(1.0)


@dataclass(frozen=True)
class GradientConfig(StepConfig):
    """And the weight of demonstrations, of which a step has as many."""

    alpha: float = at_least(1.0, 0)  # weight of the demonstrations beside what is learnt; 0: none are drawn


Config = TypeVar("Config", bound=StepConfig)


class ChunkLearner(BaseLearner, Generic[Config]):
    """Imitates the decisions that it keeps, and demonstrations: what HG-DAgger, self-imitation and RECAP share."""

    name, imitated = "", ""  # of the algorithm; of what is kept, in metrics
    counters: ClassVar[tuple[str, ...]] = ("steps",)

    def __init__(
        self,
        policy: object,
        parameters: Mapping[str, nn.Parameter],
        demonstrations: Chunks | None,
        config: Config,
        generator: torch.Generator,
        sampler: ChunkSampler | None = None,
    ) -> None:
        """``demonstrations`` None: what is kept alone; ``sampler`` chooses of both, None: ``TasksEqually``.

        Raises UserError for a policy without a loss for every action (``ImitationPolicy``).
        """
        self.sampler = sampler or TasksEqually()
        self.policy, self.config = require_imitation(policy, self.name), config
        self.parameters, self.generator = dict(parameters), generator
        self.alpha = config.alpha if isinstance(config, GradientConfig) else 0.0
        self.demonstrations = demonstrations if self.alpha and demonstrations else None
        self.kept: Chunks | None = None
        self.steps = 0
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay, fused=True)

    def loss(self, kept: Chunks) -> tuple[Tensor, dict[str, float]]:
        """The imitation loss of drawn decisions, and metrics."""
        loss = mean_loss(self.policy, kept, self.config.draws, self.generator)
        return loss, {f"policy/{self.imitated}_loss": float(loss.detach())}

    def keep(self, new: Chunks) -> int:
        """Keep ``new`` decisions to imitate; returns how many they are."""
        if len(new):
            self.kept = self._newest(joined([self.kept, new]) if self.kept else new)
        return len(new)

    def step(self, kept: Chunks) -> dict[str, float]:
        config = self.config
        loss, metrics = self.loss(self._drawn(kept))
        if self.demonstrations is not None:
            recorded = mean_loss(self.policy, self._drawn(self.demonstrations), config.draws, self.generator)
            metrics["policy/demonstration_loss"] = float(recorded.detach())
            loss = loss + self.alpha * recorded
        norm = self.descend(self.optimizer, loss)
        self.steps += 1
        return {**metrics, "policy/loss": float(loss.detach()), "policy/grad_norm": norm}

    def descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
        """A step of ``optimizer`` on ``loss``, before a NaN could enter; returns the gradient's norm.

        Every group of parameters is clipped by itself, and the largest norm is returned.
        """
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        limit, groups = self.config.grad_norm, optimizer.param_groups
        norm = float(torch.stack([nn.utils.clip_grad_norm_(group["params"], limit) for group in groups]).max())
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient of {self.name}'s step {self.steps} is not finite, so the step was not taken; lower the "
                "learning rate or look for NaN in what was recorded."
            )
        optimizer.step()
        return norm

    def _drawn(self, chunks: Chunks) -> Chunks:
        human = torch.ones_like(chunks.task, dtype=torch.bool)
        return chunks.select(self.sampler.draw(chunks, human, self.config.batch, self.generator))

    def _newest(self, kept: Chunks) -> Chunks:
        return kept.select(torch.arange(len(kept))[-self.config.capacity :])

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """And what is kept; demonstrations are the run's."""
        return {**super().state_dict(), "kept": self.kept.to_state() if self.kept else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.kept = Chunks(**state["kept"]) if state["kept"] else None


@dataclass(frozen=True)
class HGDaggerConfig(GradientConfig):
    """And the schedule."""

    steps: int = at_least(50, 1)  # gradient steps per rollout, once there are corrections


class HGDagger(ChunkLearner[HGDaggerConfig]):
    """A ``LoopLearner`` of a policy with a loss for every action (``ImitationPolicy``)."""

    name, imitated = "HG-DAgger", "correction"

    @property
    def corrections(self) -> Chunks | None:
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
