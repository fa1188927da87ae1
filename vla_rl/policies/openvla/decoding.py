"""How OpenVLA makes its action tokens: one after another, or all of a chunk at once.

Shape letters: ``B`` batch, ``P`` positions of the prefix, ``n`` tokens that are chosen, ``D`` entries of an action,
``K`` bins.  Both start from the prompt's last token, whose output is the first action token's distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor

from vla_rl.contract.config import Checked, check_choice, check_positive, within
from vla_rl.contract.errors import UserError
from vla_rl.policies.diffusion import Ddim, DiffusionSampler, Process
from vla_rl.policies.feed_forward import LogprobPer
from vla_rl.policies.openvla.network import OpenVLANetwork, Prefix
from vla_rl.policies.vla.options import VLAOptions

Choose: TypeAlias = Callable[[Tensor, int], Tensor]
"""Bins [B,m] by logits [B,m,K] of the tokens from a given index on."""

STOP = 2  # Llama's end of sequence: it followed the actions in training, and OFT's tokens attend to what follows


class Decoding:
    """``actions``: how many one decision of the model has (C); at most so many are executed."""

    actions: int

    def decode(
        self, network: OpenVLANetwork, prefix: Prefix, sizes: tuple[int, int], choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """Bins [B,n] of the first ``n`` tokens by ``choose``, and the logits [B,n,K]; ``sizes`` is (n, D)."""
        raise NotImplementedError

    def logits(self, network: OpenVLANetwork, prefix: Prefix, bins: Tensor, entries: int) -> Tensor:
        """The logits [B,n,K] of the first ``n`` tokens where ``bins`` [B,n] were chosen; ``entries`` is D."""
        raise NotImplementedError


@dataclass(frozen=True)
class Autoregressive(Decoding, Checked):
    """Each token depends on those before it: OpenVLA (arXiv 2406.09246).  ``n`` passes with a key-value cache.

    Causal attention.  Tokens of actions that are not executed are never made: those before them do not depend on them.
    """

    actions: int = within(1, 1, 1000)

    def decode(
        self, network: OpenVLANetwork, prefix: Prefix, sizes: tuple[int, int], choose: Choose
    ) -> tuple[Tensor, Tensor]:
        cache, mask = network.new_cache(), prefix.mask
        hidden = network.hidden(prefix.embeddings, _causal(mask), _positions(mask), cache)
        bins, logits = [], []
        for index in range(sizes[0]):
            logits.append(network.bin_logits(hidden[:, -1:]))
            bins.append(choose(logits[-1], index))
            if index + 1 < sizes[0]:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                token = network.embed(network.bin_tokens(bins[-1]))
                hidden = network.hidden(token, mask[:, None], _positions(mask)[:, -1:], cache)
        return torch.cat(bins, 1), torch.cat(logits, 1)

    def logits(self, network: OpenVLANetwork, prefix: Prefix, bins: Tensor, entries: int) -> Tensor:
        given = network.embed(network.bin_tokens(bins[:, :-1]))
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(given.shape[:2])], 1)
        hidden = network.hidden(torch.cat([prefix.embeddings, given], 1), _causal(mask), _positions(mask))
        return network.bin_logits(hidden[:, -bins.shape[1] :])


@dataclass(frozen=True)
class Parallel(Decoding, Checked):
    """All tokens in one pass, independent given the observation: OpenVLA-OFT (arXiv 2502.19645).

    The action tokens' embeddings are zeros, or with a diffusion head noisy actions.  Attention is bidirectional
    everywhere, pictures and prompt included, as in the authors' transformers (moojink/openvla-oft#27), and a stop token
    follows.
    """

    actions: int = within(8, 1, 1000)

    def decode(
        self, network: OpenVLANetwork, prefix: Prefix, sizes: tuple[int, int], choose: Choose
    ) -> tuple[Tensor, Tensor]:
        count, entries = sizes
        logits = self._all(network, prefix, entries)[:, :count]
        return choose(logits, 0), logits

    def logits(self, network: OpenVLANetwork, prefix: Prefix, bins: Tensor, entries: int) -> Tensor:
        return self._all(network, prefix, entries)[:, : bins.shape[1]]

    def _all(self, network: OpenVLANetwork, prefix: Prefix, entries: int) -> Tensor:
        return network.bin_logits(self.hidden(network, prefix, self.actions * entries))

    def hidden(self, network: OpenVLANetwork, prefix: Prefix, count: int, slots: Tensor | None = None) -> Tensor:
        """Hidden states [B,count,W], each where the token before its placeholder stands; see :meth:`whole`."""
        first = prefix.embeddings.shape[1] - 1
        return self.whole(network, prefix, count, slots)[:, first : first + count]

    @staticmethod
    def whole(network: OpenVLANetwork, prefix: Prefix, count: int, slots: Tensor | None = None) -> Tensor:
        """Hidden states of the prefix, of ``count`` placeholders and of the stop token.

        ``slots`` [B,count,W]: embeddings of the placeholders; None: zeros.
        """
        before = prefix.embeddings
        empty = before.new_zeros(len(before), count, before.shape[-1]) if slots is None else slots.to(before)
        stop = network.embed(torch.full((len(before), 1), STOP, device=before.device))
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(len(before), count + 1)], 1)
        sequence = torch.cat([before, empty, stop], 1)
        attends = mask[:, None].expand(-1, mask.shape[1], -1)
        return network.hidden(sequence, attends, _positions(mask))


def _positions(mask: Tensor) -> Tensor:
    """Positions int64 [B,S] that padding does not count in."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def _causal(mask: Tensor) -> Tensor:
    """bool [B,S,S]: what precedes and is no padding; the first token, which every row has, always counts."""
    length = mask.shape[1]
    return mask[:, None] & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()


# What OFT's diffusion heads were trained for and are deployed with: the defaults of diffusers' DDIMScheduler.
OFT_PROCESS = Process(timesteps=50, prediction="epsilon", spacing="leading")
OFT_REVERSE = Ddim(use_clipped_model_output=False)


@dataclass(frozen=True)
class OpenVLAOptions(VLAOptions):
    """Choices that an OpenVLA checkpoint leaves to whoever opens it; ``sampler`` is not read.

    A continuous head always decodes in parallel: where ``decoding`` is not :class:`Parallel`, eight actions (LIBERO's).

    Raises UserError for a choice that does not exist.
    """

    decoding: Decoding = Autoregressive()  # or Parallel(): OpenVLA-OFT
    denoising: DiffusionSampler = DiffusionSampler(OFT_PROCESS, OFT_REVERSE, steps=50, fine_tuned=50)  # by such a head
    temperature: float = 1.0  # of exploration and of its likelihood alike; SimpleVLA-RL: 1.6
    logprob_per: LogprobPer = "chunk"  # or "action", "token": what has a ratio of its own in PPO and GRPO
    crop: float = 1.0  # the share of a picture's area that is seen; .9 for checkpoints fine-tuned with random crops
    # What critics and corrections read: "patches" and words, or "hidden", what an L1 head reads as well, for which the
    # language model runs once more in every decision.
    critics: str = "patches"
    # The environment's last entry where the gripper is closed and open; 0 and 1 in OpenVLA's data.
    gripper: tuple[float, float] = (0.0, 1.0)  # LIBERO: (1, -1), ManiSkill: (-1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature", "crop")
        check_choice(self, "logprob_per", "chunk", "action", "token")
        check_choice(self, "critics", "patches", "hidden")


def own_options(options: VLAOptions | None) -> OpenVLAOptions:
    """``options`` with the defaults of what only an OpenVLA has; raises UserError for actions relative to a state."""
    if options is not None and any(options.relative):
        raise UserError(
            "an OpenVLA's actions are what its environment takes, not relative to a state, so with --vla.relative they "
            "would be misread; leave it out."
        )
    if isinstance(options, OpenVLAOptions):
        return options
    shared = {} if options is None else {item.name: getattr(options, item.name) for item in fields(options)}
    return OpenVLAOptions(**shared)
