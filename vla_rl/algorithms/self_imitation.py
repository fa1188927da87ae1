"""Imitation of one's own successes: play, keep the episodes that succeeded, imitate every decision of them, play again.

    theta <- argmin  mean_successes l(o, a) + alpha mean_demonstrations l(o, a),    from the weights at the beginning

with the policy's own imitation loss ``l`` (flow matching for a flow policy).  What succeeded is distributed as

    pi(a | o, success) = pi(a | o) P(success | o, a) / P(success | o)

so this is a step of policy improvement towards what the policy does anyway when it succeeds: without a critic, and
without an action that it would not choose itself, so exploring costs nothing (grow and improve: ReST, Gulcehre et al.
2023, arXiv 2308.08998; reward-ranked fine-tuning: RAFT, Dong et al. 2023, arXiv 2304.06767; with a critic:
self-imitation learning, Oh et al. 2018, arXiv 1806.05635).

As in ReST every improvement begins at the first weights and learns from all successes so far.  Going on from the last
weights instead, after every rollout, repeats the first few successes too often: place fell from 61 to 50 %.

Deviations: nothing is ranked, as success is all that is known; older successes stay, up to ``capacity`` decisions, for
they are right whoever played them.  Episodes that a rollout begins or leaves unfinished count for nothing.

Where an episode goes on to, as an auxiliary loss: it teaches a backbone to see what the policy has to reach.

    L = |g(phi(o_t), s_t) - (s_{t+1}, ..., s_{t+K})|^2 / (K S)

where ``phi`` are the features of the policy's backbone, with gradient, ``s_{t+k}`` the robot's normalised state ``k``
decisions later and ``g`` a small head, which is no part of the policy.  In an episode that succeeded the gripper went
to the object that the instruction names and then to its goal, so a few states of the robot say where both are, and that
is all that the loss knows: it needs neither labels nor a simulator.  (Predicting future measurements: Dosovitskiy and
Koltun 2017, arXiv 1611.01779; auxiliary losses for what an agent sees: Jaderberg et al. 2017, arXiv 1611.05397.)

Deviations: the states are those of what was played, and not of each action that could be; the same action is imitated
beside it.  What lies after an episode's last decision has no weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import ChunkLearner, Chunks, ChunkSampler, GradientConfig, chunks_of
from vla_rl.algorithms.decisions import ages, mean
from vla_rl.contract.batch import Rollout
from vla_rl.contract.config import Checked, at_least
from vla_rl.contract.policy import require


@dataclass(frozen=True)
class SelfImitationConfig(GradientConfig):
    """And when it improves, and for how long."""

    batch: int = 128
    draws: int = 4
    alpha: float = 0.0
    grow: int = at_least(8, 1)  # rollouts from one improvement to the next
    epochs: int = at_least(20, 1)  # passes over the successes, while the learning rate falls to 0 (cosine)


class SelfImitation(ChunkLearner[SelfImitationConfig]):
    """A ``LoopLearner`` of a policy with a loss for every action (``ImitationPolicy``)."""

    name, imitated = "self-imitation", "success"
    counters = (*ChunkLearner.counters, "rollouts")

    def __init__(
        self,
        policy: object,
        parameters: Mapping[str, nn.Parameter],
        demonstrations: Chunks | None,
        config: SelfImitationConfig,
        generator: torch.Generator,
        sampler: ChunkSampler | None = None,
        future: FutureStates | None = None,
    ) -> None:
        """As for ``ChunkLearner``; improvements begin at the present ``parameters``, and at those of ``future``.

        Raises UserError where a backbone should foresee the ``future`` states and cannot learn.
        """
        super().__init__(policy, parameters, demonstrations, config, generator, sampler)
        self.rollouts, self.future = 0, future
        self.report: Callable[[float], None] = lambda share: None  # called with the share of it that is done
        if future is not None:
            require_learning_backbone(policy)
            self.optimizer.param_groups[0]["params"].extend(future.parameters())
        self._first = {name: item.detach().clone() for name, item in self._learnt().items()}

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Keep what succeeded in ``rollout``, and improve after every ``grow`` of them.

        Raises NonFiniteError before a NaN could enter the weights, and ContractError for a decision of a version that
        the learner has not reached.
        """
        kept, self.rollouts = self.add(rollout), self.rollouts + 1
        metrics = {"rollout/decisions": float(kept), "replay/successes": float(len(self.kept) if self.kept else 0)}
        if self.kept is None or self.rollouts % self.config.grow:
            return metrics
        return {**metrics, **self.improve(self.kept)}

    def add(self, rollout: Rollout) -> int:
        """Keep the decisions of the episodes that succeeded in ``rollout``; returns how many."""
        ages(rollout, self.policy.version)
        if self.future is not None:
            ahead = following(
                rollout.features["state"][:-1], rollout.terminated | rollout.truncated, self.future.config.decisions
            )
            rollout = replace(rollout, features={**rollout.features, FUTURE: torch.cat([ahead, ahead[-1:]])})
        return self.keep(chunks_of(rollout, rollout.valid & of_successes(rollout)[..., None], self.policy))

    def loss(self, kept: Chunks) -> tuple[Tensor, dict[str, float]]:
        """And that of the states to come, in which the backbone learns."""
        if self.future is None:
            return super().loss(kept)
        policy: Any = self.policy
        kept = replace(kept, features=policy.encode_again(kept.features))
        imitation, metrics = super().loss(kept)
        missed = self.future.loss(kept.features)
        return imitation + self.future.config.weight * missed, {
            **metrics,
            "policy/future_state_loss": float(missed.detach()),
        }

    def improve(self, kept: Chunks) -> dict[str, float]:
        """Imitate ``kept`` from the first weights on; metrics are means of all steps."""
        with torch.no_grad():
            for name, parameter in self._learnt().items():
                parameter.copy_(self._first[name])
        self.optimizer.state.clear()
        steps, infos, highest = math.ceil(self.config.epochs * len(kept) / self.config.batch), [], self.config.lr
        for step in range(steps):
            self.lr = 0.5 * highest * (1.0 + math.cos(math.pi * step / steps))
            infos.append(self.step(kept))
            self.report((step + 1) / steps)
        return mean(infos)

    def _learnt(self) -> dict[str, nn.Parameter]:
        """What an improvement changes, by name."""
        head = dict(self.future.named_parameters(prefix="future")) if self.future is not None else {}
        return {**self.parameters, **head}

    def state_dict(self) -> dict[str, Any]:
        """And the head's weights and the first weights."""
        head = self.future.state_dict() if self.future is not None else {}
        return {**super().state_dict(), "future": head, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.future is not None:
            self.future.load_state_dict(state["future"])
        self._first = dict(state["first"])


def of_successes(rollout: Rollout) -> Tensor:
    """bool [T,E]: the decisions of episodes that ended in success within ``rollout``.

    A simulator's breakdown ends an episode by a decision without valid actions; that is no success.
    """
    active, ends = rollout.valid.any(-1), rollout.terminated | rollout.truncated
    found, won = torch.zeros_like(ends), torch.zeros_like(ends[0])
    for t in reversed(range(len(ends))):
        won = torch.where(ends[t], rollout.success[t] & active[t], won)
        found[t] = won & active[t]
    return found


FUTURE = "future_states"  # the feature [N,K*S] that is to be predicted


@dataclass(frozen=True)
class FutureStatesConfig(Checked):
    """How far ahead, and how much it weighs beside imitation."""

    decisions: int = at_least(8, 1)  # K
    weight: float = at_least(1.0, 0)  # of the mean squared error of normalised states
    width: int = at_least(256, 1)  # of the head


class FutureStates(nn.Module):
    """The head ``g``, for features of ``sizes``."""

    def __init__(self, sizes: Mapping[str, int], config: FutureStatesConfig) -> None:
        super().__init__()
        self.read, self.config = tuple(sizes), config
        outputs = config.decisions * sizes["state"]
        self.net = nn.Sequential(
            nn.Linear(sum(sizes.values()), config.width), nn.SiLU(), nn.Linear(config.width, outputs)
        )

    def loss(self, features: Mapping[str, Tensor]) -> Tensor:
        """The mean squared error of ``features["future_states"]`` as predicted from the others, where there are any."""
        predicted, known = self.net(torch.cat([features[name] for name in self.read], -1)), ~features[FUTURE].isnan()
        missed = (predicted - features[FUTURE].nan_to_num()).square() * known
        return missed.sum() / known.sum().clamp_min(1)


def require_learning_backbone(policy: Any) -> None:
    """Raise UserError when the backbone of ``policy`` cannot learn (see ``ImitationPolicy``)."""
    cure = "so no backbone would foresee states; use a TinyVLA, or leave the backbone frozen (rl.future:none)."
    require(policy, "self-imitation", ("with_trained_backbone", "encode_again"), cure)


def following(state: Tensor, ends: Tensor, decisions: int) -> Tensor:
    """The states [T,E,K*S] of the next ``decisions`` of the same episode, of ``state`` [T,E,S]; ``ends`` bool [T,E].

    Nan beyond an episode's last decision, or the window's.
    """
    steps = torch.arange(len(ends), device=ends.device)[:, None].expand(ends.shape)
    last = torch.where(ends, steps, len(ends) - 1).flip(0).cummin(0).values.flip(0)
    ahead = steps[..., None] + torch.arange(1, decisions + 1, device=ends.device)
    rows = torch.arange(ends.shape[1], device=ends.device)[:, None]
    found = state[ahead.clamp_max(len(ends) - 1), rows]
    return found.masked_fill((ahead > last[..., None])[..., None], torch.nan).flatten(2)
