"""The robot's next states: modes predicted from its actions alone.

The future is often bimodal: the fingers stop at an object or close fully.  A single prediction would be the mean of the
two, which never happens and which the next call could not continue from.  So the prediction is a mixture of modes (a
mixture density network, Bishop 1994), for each entry of the state by itself: what stops a hand is not what stops its
fingers, and joint modes of all entries would be all pairs of the two.

``StateDynamics`` predicts the modes from state and actions alone, ``ModeClassifier`` (``mode_classifier.py``) their
probabilities from the picture.  One network for both hardly learns the probabilities: the gradient of a mode's value is
larger than that of its probability by the inverse of the standard deviation, squared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

# Chooses among modes [B,K,F,S] with log-probabilities [B,K,S], given standard normal noise [B,S]: int64 [B,S].
ModeSelector: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class StateDynamics(nn.Module):
    """Modes of the robot's next states, from state and actions alone."""

    def __init__(self, state: int, actions: int, frames: int, modes: int, width: int = 256) -> None:
        """``state`` S; ``actions``: entries A of the action input; ``frames`` F; ``modes`` K."""
        super().__init__()
        self.shape = (modes, frames + 1, state)
        sizes = [state + actions, width, width, width]
        layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.SiLU())]
        self.think = nn.Sequential(*layers, nn.Linear(width, math.prod(self.shape)))
        self.straight = nn.Linear(state + actions, frames * state)  # most of it is linear

    def forward(self, state: Tensor, action_input: Tensor) -> tuple[Tensor, Tensor]:
        """Modes [B,K,F,S] and their log-probabilities [B,K,S], from ``state`` [B,S] and ``action_input`` [B,A]."""
        known = torch.cat([state, action_input], 1)
        linear = state[:, None] + self.straight(known).unflatten(1, (-1, state.shape[1]))
        out = self.think(known).unflatten(1, self.shape)
        return linear[:, None] + out[:, :, 1:], out[:, :, 0].log_softmax(1)


@dataclass(frozen=True)
class ModePrediction:
    """The output of :class:`StateDynamics`.

    modes         [B,K,F,S]
    log_probs     [B,K,S]
    expected_end  [B,S]      the mean over the modes of the state after the last known action
    """

    modes: Tensor
    log_probs: Tensor
    expected_end: Tensor

    @classmethod
    def of(cls, modes: Tensor, log_probs: Tensor, known: Tensor) -> ModePrediction:
        """With ``known`` [B] actions, 1 to F."""
        ends = modes[torch.arange(len(known), device=known.device), :, known - 1]
        return cls(modes, log_probs, (log_probs.exp() * ends).sum(1))


def sample_modes(modes: Tensor, log_probs: Tensor, noise: Tensor) -> Tensor:
    """int64 [B,S]: a mode for each entry, drawn with probabilities ``exp(log_probs)`` [B,K,S]; a ``ModeSelector``."""
    share = torch.special.ndtr(noise)[:, None]
    return (log_probs.exp().cumsum(1) < share).sum(1).clamp_max(log_probs.shape[1] - 1)


def select_modes(modes: Tensor, choice: Tensor) -> Tensor:
    """[B,F,S]: the states of the modes ``choice`` int64 [B,S] among ``modes`` [B,K,F,S]."""
    index = choice[:, None, None].expand(-1, 1, modes.shape[2], -1)
    return modes.gather(1, index)[:, 0]


def mixture_nll(modes: Tensor, log_probs: Tensor, target: Tensor, counts: Tensor, spread: float = 0.1) -> Tensor:
    """[B]: negative log-likelihood, per entry, of ``target`` [B,F,S] under Gaussians around ``modes`` [B,K,F,S].

    All have the standard deviation ``spread``, so the nearest mode gets most of the gradient; ``counts`` [B,F] is 1 for
    control steps with a known action.
    """
    off = ((modes - target[:, None]) / spread).square() * counts[:, None, :, None]
    return -(log_probs - 0.5 * off.sum(2)).logsumexp(1).sum(1) / math.prod(target.shape[1:])


def training_nll(modes: Tensor, log_probs: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """[B]: :func:`mixture_nll`, and a tenth of it with a ten times larger standard deviation.

    A mode far from all data gets no gradient of the first term, and another mode would average two outcomes; the
    second term brings it back.
    """
    near = mixture_nll(modes, log_probs, target, counts)
    return near + 0.1 * mixture_nll(modes, log_probs, target, counts, spread=1.0)
