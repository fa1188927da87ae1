"""OpenVLA and OpenVLA-OFT as policies: over action tokens, by L1 regression, by diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.policies.diffusion import DenoisingPolicy, DiffusionSampler, Network
from vla_rl.policies.feed_forward import categorical_kl, density, entropy, sum_per
from vla_rl.policies.image_encoder import BackboneOutput, cell_centres
from vla_rl.policies.noise import Generators, uniform
from vla_rl.policies.openvla.base import OpenVLABase, head_shape
from vla_rl.policies.openvla.decoding import OpenVLAOptions, Parallel
from vla_rl.policies.openvla.heads import Denoising, HeadShape, Regression, time_encoding
from vla_rl.policies.openvla.network import OpenVLANetwork, OpenVLAShape
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.pointing import with_state

_SLOTS = "slots"  # among features


class OpenVLA(OpenVLABase):
    """A categorical distribution over 256 bins for every entry of a chunk, made by a language model.

    ``log pi(a|o) = sum_i log softmax(logits_i / T)[bin_i]``, exact for what is executed: under ``Autoregressive`` given
    the tokens before, under ``Parallel`` independent.  The softmax is over the 256 action tokens alone, in acting and
    in the likelihood, as in SimpleVLA-RL (arXiv 2509.09674) and RLinf-VLA; OpenVLA itself takes the best of the whole
    vocabulary.  ``sample`` holds the bins, int64 [E,H,D]; the highest two stand for one action, as there are 255
    intervals between OpenVLA's 256 edges.  Mode "eval" is greedy.  It implements ``LikelihoodPolicy``.
    OpenVLA-OFT's FiLM layers are not there.
    """

    # -- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Mode "eval" draws nothing, so it needs no generator."""
        prefix, sizes = self._prefix(features), (self.horizon * self.spec.action_dim, self.spec.action_dim)
        shape = (len(features["state"]), sizes[0], self.network.shape.bins)
        # The largest of log-probabilities plus Gumbel noise is a sample of the distribution.
        noise = torch.zeros(()).expand(shape).to(self.action_low)
        if mode == "sample":
            noise = -(-uniform(shape, generator, like=self.action_low).clamp_min(1e-20).log()).log()
        bins, logits = self.config.decoding.decode(
            self.network,
            prefix,
            sizes,
            lambda some, first: (self._log_probs(some) + noise[:, first : first + some.shape[1]]).argmax(-1),
        )
        terms = density(self._log_probs(logits), bins) if mode == "sample" else torch.zeros_like(logits[..., 0])
        sample = bins.unflatten(-1, (self.horizon, self.spec.action_dim))
        return ActionOut(self.actions(sample), sample, self._logprob(terms), {}, self.version), state

    def actions(self, bins: Tensor) -> Tensor:
        """Physical actions [...,D]: the middle of each of the ``K - 1`` equal intervals of [-1, 1], un-normalised."""
        intervals = self.network.shape.bins - 1
        middle = (bins.clamp_max(intervals - 1).to(self.action_low) + 0.5) * 2.0 / intervals - 1.0
        return self.action_scale.unnormalize(middle).clamp(self.action_low, self.action_high)

    def bins(self, chunks: Tensor) -> Tensor:
        """The bins int64 of normalised actions: the intervals that they lie in, the last edge alone in a bin."""
        intervals = self.network.shape.bins - 1
        return ((chunks.clamp(-1.0, 1.0) + 1.0) / 2.0 * intervals).floor().long()

    # -- learning ---------------------------------------------------------------------------------------------------

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Log-probability of recorded bins; the entropy is the sum of the tokens' (under ``Autoregressive`` those of
        the conditionals along the recorded bins, an unbiased estimate of the chunk's).
        """
        bins = sample.flatten(1)
        logits = self.config.decoding.logits(self.network, self._prefix(features), bins, self.spec.action_dim)
        log_probs = self._log_probs(logits)
        return Likelihood(self._logprob(density(log_probs, bins)), entropy(log_probs), {"log_probs": log_probs})

    # Exact under ``Parallel``; under ``Autoregressive`` that of the conditionals along the recorded bins, whose mean
    # over decisions of the old policy is the chunks' exact KL.
    kl = staticmethod(categorical_kl)

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Mean cross-entropy [B,C] of the bins of every action of ``chunks`` [B,C,D] among the action tokens.

        It draws nothing, and the temperature is 1.  Deviation: OpenVLA's is among the whole vocabulary and includes the
        stop token.
        """
        seen = {name: item.to(chunks.device) for name, item in features.items()}
        bins = self.bins(chunks).flatten(1)
        logits = self.config.decoding.logits(self.network, self._prefix(seen), bins, self.spec.action_dim)
        tokens = nn.functional.cross_entropy(logits.flatten(0, 1), bins.flatten(), reduction="none")
        return tokens.view(chunks.shape).mean(-1)

    def _log_probs(self, logits: Tensor) -> Tensor:
        return (logits / self.config.temperature).log_softmax(-1)

    def _logprob(self, terms: Tensor) -> Tensor:
        return sum_per(terms, self.horizon, self.config.logprob_per)

    @classmethod
    def from_public(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions | None = None) -> OpenVLABase:
        """The policy of a downloaded folder for ``spec``: over tokens, or that of OFT's continuous head if it has one.

        See :meth:`OpenVLABase.opened`.
        """
        return policy_class(head_shape(Path(folder))).opened(folder, spec, options)


class _Continuous(OpenVLABase):
    """A policy with one of OFT's continuous heads, over whole chunks in parallel."""

    def _configure(self, options: OpenVLAOptions) -> OpenVLAOptions:
        decoding = options.decoding if isinstance(options.decoding, Parallel) else Parallel()
        return super()._configure(replace(options, decoding=decoding))

    @classmethod
    def with_head(cls, shape: OpenVLAShape, entries: int) -> OpenVLAShape:
        return replace(shape, head=shape.head or cls._head(entries, int(shape.llama["hidden_size"])))

    @classmethod
    def _head(cls, entries: int, hidden: int) -> HeadShape:
        raise NotImplementedError

    def _here(self, features: Features) -> Features:
        """``features`` where the weights are: a dataset's are on the host."""
        return {name: item.to(self.action_low.device) for name, item in features.items()}


class OpenVLARegression(_Continuous):
    """OpenVLA-OFT's L1 regression: one chunk for an observation, in modes "sample" and "eval" alike.

    It has no density, so PPO and GRPO do not take it: put a Gaussian around it (``policies/gaussian_around.py``), or
    correct it by a residual.  With ``config.critics`` "hidden" these read what the head reads: only the language model
    has compared the picture with the instruction.
    """

    @classmethod
    def _head(cls, entries: int, hidden: int) -> HeadShape:
        return Regression(entries, hidden)

    def _configure(self, options: OpenVLAOptions) -> OpenVLAOptions:
        return replace(super()._configure(replace(options, critics="patches")), critics=options.critics)

    @property
    def feature_sizes(self) -> dict[str, int]:
        sizes = super().feature_sizes
        return {**sizes, _SLOTS: self.network.width} if self.config.critics == "hidden" else sizes

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """As ``OpenVLABase``, and ``slots`` float32 [E,W] where critics read it: the mean over the placeholders."""
        features = super().encode(obs)
        if self.config.critics != "hidden":
            return features
        return {**features, _SLOTS: self._hidden(features).float().mean(1)}

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """It draws nothing, so it needs no generator."""
        sample = self.predicted(features)
        action = self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)
        return ActionOut(action, sample, sample.new_zeros(len(sample), dtype=torch.float64), {}, self.version), state

    def predicted(self, features: Features) -> Tensor:
        """The normalised actions [B,H,D] that are executed, with gradient."""
        return self._chunks(features)[:, : self.horizon]

    def _chunks(self, features: Features) -> Tensor:
        """Whole chunks [B,C,D], in the dtype of the actions or a wider one."""
        found: Tensor = self.network.action_head(self._hidden(features))
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def _hidden(self, features: Features) -> Tensor:
        """The language model's hidden states [B,CD,W] that the head reads."""
        count = self.chunk_length * self.spec.action_dim
        return self.config.decoding.hidden(self.network, self._prefix(features), count)

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Mean absolute error [B,n] of every action of ``chunks`` [B,n,D], n at most C; it draws nothing."""
        return (self._chunks(self._here(features))[:, : chunks.shape[1]] - chunks).abs().mean(-1)


class OpenVLADiffusion(_Continuous, DenoisingPolicy):
    """OpenVLA-OFT's diffusion: the whole language model predicts the noise of a chunk in every denoising step.

    A chain runs over the model's chunk, ``N = C D`` numbers, and its likelihood is that of all of them.  Every step
    has a density and is trained by the same network: ``config.denoising.fine_tuned`` is ``steps``.
    Raises UserError for a sampler that fine-tunes fewer, and when diffusers is not installed.
    """

    def _configure(self, options: OpenVLAOptions) -> OpenVLAOptions:
        self.sampler: DiffusionSampler = options.denoising
        if self.sampler.fine_tuned != self.sampler.steps:
            raise UserError(
                f"only {self.sampler.fine_tuned} of {self.sampler.steps} steps are to be fine-tuned, which takes a "
                "second, frozen copy of the language model for the others; set denoising.fine_tuned to denoising.steps."
            )
        self.scheduler = self.sampler.reverse.scheduler(self.sampler.process)
        return super()._configure(options)

    @classmethod
    def _head(cls, entries: int, hidden: int) -> HeadShape:
        return Denoising(entries, hidden)

    @property
    def denoised(self) -> int:
        return self.chunk_length

    def _late_network(self, features: Features) -> Network:
        patches, task, state = self._patches(features), features["task"], features["state"]
        seen = patches, self.tokens[task], self.token_mask[task], state

        def network(x: Tensor, t: Tensor) -> Tensor:
            timesteps = (t * self.sampler.process.timesteps).round().flatten()
            rows = (item.repeat_interleave(x.shape[1], 0) for item in seen)
            prefix = self.network.prefix(*rows, time_encoding(timesteps, self.network.width))
            slots = self.network.noisy_action_projector(x.flatten()[:, None]).unflatten(0, (-1, x.shape[-1]))
            hidden = self.config.decoding.hidden(self.network, prefix, x.shape[-1], slots)
            return self.network.action_head(hidden).reshape(x.shape)

        return network

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """DDPM's loss of every action [B,C], see ``DenoisingPolicy``.

        Raises ContractError for parts of chunks: the model denoises all actions of a chunk together.
        """
        if chunks.shape[1] != self.denoised:
            raise ContractError(
                f"{type(self).__name__} denoises {self.denoised} actions together and {chunks.shape[1]} are to be "
                "imitated, so the others would be undefined; let it execute whole chunks (horizon 0)."
            )
        return super().imitation_losses(self._here(features), chunks, draws, generator)


def policy_class(head: HeadShape | None) -> type[OpenVLABase]:
    """The class of the policies whose network has this head."""
    kinds: Mapping[type, type[OpenVLABase]] = {Regression: OpenVLARegression, Denoising: OpenVLADiffusion}
    return kinds.get(type(head), OpenVLA)


class PointingOpenVLA(nn.Module):
    """The network with heads that point, and that are thrown away after grounding, on one camera.

    One reads the language model's hidden states of every patch: how likely the object is there, and where within the
    patch.  Another reads those of the placeholders of ``count`` numbers, so that an action need not find the right
    patch, and a third ``pooled``, for critics; no layer has compared its patches with the prompt, so that one has a
    hidden layer.  States are random, and the placeholders tell them as well: an action depends on where the object is
    from here, and an L1 head over placeholders that do not know the state begins to predict medians and stays there.
    """

    def __init__(self, network: OpenVLANetwork, count: int) -> None:
        super().__init__()
        self.network, self.count = network, count
        device, pooled = next(network.parameters()).device, network.pooled_size
        outputs = 3, 2 + network.shape.state
        self.cells, self.slots = (nn.Linear(network.width, size).to(device) for size in outputs)
        layers = nn.BatchNorm1d(pooled), nn.Linear(pooled, pooled), nn.GELU(), nn.Linear(pooled, 2)
        self.pooled = nn.Sequential(*layers).to(device)

    def forward(self, images: Tensor, tokens: Tensor, token_mask: Tensor) -> BackboneOutput:
        """Where ``images`` uint8 [B,h,w,3] show what the prompts ``tokens``, ``token_mask`` [B,L] name.

        Three queries, and those of the state (``with_state``), which is drawn from the global generator.
        """
        network = self.network
        seen = network.encode([images], tokens, token_mask)
        state = 2.0 * torch.rand(len(images), network.shape.state).to(seen["pooled"]) - 1.0
        prefix = network.prefix(seen["patches"], tokens, token_mask, state)
        hidden = Parallel().whole(network, prefix, self.count)
        patches = seen["patches"].shape[1]
        side = round(patches**0.5)
        logits, offset = self.cells(hidden[:, 1 : 1 + patches]).split((1, 2), -1)
        places = cell_centres(side, side, like=offset) + torch.tanh(offset) / side
        logits = logits.transpose(1, 2)
        slots = hidden[:, -2 - self.count : -2].mean(1)  # where heads read them, each a place before its own
        point, said = self.slots(slots).tensor_split((2,), -1)
        pointed = torch.stack([(logits.softmax(-1) @ places)[:, 0], point, self.pooled(seen["pooled"])], 1)
        uv = with_state(pointed, point, said - state)
        return BackboneOutput(slots, uv, logits.expand(-1, uv.shape[1], -1))
