"""OpenVLA and OpenVLA-OFT as policies over action tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.policies.feed_forward import categorical_kl, density, entropy, sum_per
from vla_rl.policies.noise import Generators, uniform
from vla_rl.policies.normalization import Affine
from vla_rl.policies.openvla.decoding import STOP, OpenVLAOptions, own_options
from vla_rl.policies.openvla.network import VISION, OpenVLANetwork, OpenVLAShape, Prefix, ViTShape
from vla_rl.policies.vla.checkpoint import match_cameras, read_public
from vla_rl.policies.vla.dataset_statistics import read_statistics
from vla_rl.policies.vla.features import PICTURE, KeepPictures, KeepPrefix, Views, picture_bytes
from vla_rl.policies.vla.options import VLAOptions, cast_frozen, checkpoint_gradients
from vla_rl.policies.vla.saving import Base, SavedVLA
from vla_rl.policies.vla.tokenizer import Prompts, TokenizerPrompts, Vocabulary, WordPrompts
from vla_rl.policies.vla.weights import load_public_weights, open_tensors, weight_files, without_weights

_PICTURES = KeepPictures()  # of imitation, which encodes nothing beforehand


class OpenVLA(SavedVLA):
    """A categorical distribution over 256 bins for every entry of a chunk, made by a language model.

    ``log pi(a|o) = sum_i log softmax(logits_i / T)[bin_i]``, exact for what is executed: under ``Autoregressive`` given
    the tokens before, under ``Parallel`` independent.  The softmax is over the 256 action tokens alone, in acting and
    in the likelihood, as in SimpleVLA-RL (arXiv 2509.09674) and RLinf-VLA; OpenVLA itself takes the best of the whole
    vocabulary.  ``sample`` holds the bins, int64 [E,H,D]; the highest two stand for one action, as there are 255
    intervals between OpenVLA's 256 edges.  Mode "eval" is greedy.  It implements ``LikelihoodPolicy``.
    OpenVLA-OFT's continuous heads (L1 regression, diffusion) and its FiLM layers are not there.
    """

    cameras: tuple[str, ...]  # none is missing
    tokens: Tensor
    token_mask: Tensor
    options_class = OpenVLAOptions

    def __init__(
        self,
        spec: EnvSpec,
        network: OpenVLANetwork,
        prompts: Prompts,
        state_scale: Affine,
        action_scale: Affine,
        cameras: Sequence[str],
        options: OpenVLAOptions,
        base: Base | None = None,
    ) -> None:
        """``cameras``: the environment's, in the order of the model's; ``options.horizon`` 0 executes the whole chunk.

        ``base``: the public folder that the frozen weights are in; checkpoints then hold the trained ones alone.
        Raises ContractError when ``spec`` has other sizes than the statistics, or more actions are to be executed than
        the model makes.
        """
        super().__init__()
        self.spec, self.prompts, self.cameras, self.config = spec, prompts, tuple(cameras), options
        self.horizon = options.horizon or min(options.decoding.actions, spec.max_chunk)
        self.state_scale, self.action_scale, self.network, self.version = state_scale, action_scale, network, 0
        self.base = base
        _check_sizes(self)
        trained = options.trains.prepare(network)
        cast_frozen(network, trained, options.torch_dtype)
        checkpoint_gradients(network, options.gradient_checkpointing)
        self.trained_names = frozenset(trained)  # of the network; moving a module may make new parameters
        self.set_limits(spec)
        tokens, mask = prompts.encode(spec.tasks)
        for name, item in {"tokens": tokens, "token_mask": mask}.items():
            self.register_buffer(name, item, persistent=False)
        self.kept = _choose_kept(self)

    @property
    def feature_sizes(self) -> dict[str, int]:
        return {"pooled": self.network.pooled_size, "state": self.spec.state.shape[0]}

    @property
    def chunk_length(self) -> int:
        """``C``: actions of a chunk that imitation learns."""
        return self.config.decoding.actions

    # -- the part no gradient reaches ------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """``pooled``, normalised ``state`` [E,S], ``time`` [E,1] (for critics only), ``task``, and what is kept."""
        seen = {name: item.to(self.action_low.device) for name, item in self.imitation_features(obs).items()}
        state = seen.pop("state")
        time = torch.as_tensor(obs.time, device=state.device)[:, None].to(state) / self.spec.time_limit
        return {
            **self.kept.features(self.network, self._views(), seen),
            "task": seen["task"],
            "state": state,
            "time": time,
        }

    def imitation_features(self, obs: Observation) -> Features:
        """What :meth:`imitation_losses` reads, where the observation is: pictures, task and normalised state."""
        pictures = {PICTURE + name: torch.as_tensor(obs.images[name]) for name in self.cameras}
        state = self.state_scale.normalize(torch.as_tensor(obs.state).float())
        return {**pictures, "task": torch.as_tensor(obs.task).long(), "state": state}

    def _views(self) -> Views:
        every = self.network.named_parameters()
        learnt = [item for name, item in every if name in self.trained_names and name.startswith(VISION)]
        return Views(self.cameras, self.tokens, self.token_mask, learnt)

    def _prefix(self, features: Features) -> Prefix:
        """What the language model reads; features without ``pooled`` are those of :meth:`imitation_features`."""
        kept = self.kept if "pooled" in features else _PICTURES
        patches = kept.prefix(self.network, self._views(), features)["patches"]
        task = features["task"]
        return self.network.prefix(patches, self.tokens[task], self.token_mask[task], features["state"])

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

    def trainable(self) -> dict[str, nn.Parameter]:
        every = self.network.named_parameters()
        return {f"network.{name}": item for name, item in every if name in self.trained_names}

    def _log_probs(self, logits: Tensor) -> Tensor:
        return (logits / self.config.temperature).log_softmax(-1)

    def _logprob(self, terms: Tensor) -> Tensor:
        return sum_per(terms, self.horizon, self.config.logprob_per)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @classmethod
    def from_public(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions | None = None) -> Self:
        """The policy of a downloaded OpenVLA folder for an environment.

        ``options.cameras`` {name of your choice: environment's camera} gives OpenVLA-OFT its pictures in order; without
        it the environment has one camera.  Options of no :class:`OpenVLAOptions` choose its defaults.  Raises
        UserError, naming the key and the cure, for what is missing, does not fit the environment or is not supported.
        """
        place, chosen = Path(folder), own_options(options)
        checkpoint = read_public(place)
        checkpoint = replace(checkpoint, cameras=tuple(chosen.cameras) or checkpoint.cameras)
        cameras = match_cameras(checkpoint, spec, chosen.cameras)
        shape = public_shape(place, checkpoint.config, chosen.crop)
        found = read_statistics(Path(chosen.statistics or place), checkpoint.modes, chosen.statistics_key)
        found = found if shape.state else replace(found, state=critics_scale(spec))
        statistics = found.cut(spec.state.shape[0], spec.action_dim)
        if statistics.state is None:
            raise UserError(
                f"{statistics.source!r} has no statistics of the state, which this OpenVLA reads; name those of the "
                "dataset that it was trained on with --vla.statistics FOLDER."
            )
        prompts = OpenVLAPrompts(str(place)).learn(spec.tasks)
        network = filled_network(shape, place, chosen.torch_dtype)
        seen = [name for name in cameras if name is not None]
        action_scale = with_gripper(statistics.action, chosen.gripper)
        base = Base.of(place)
        return cls(spec, network, prompts, statistics.state, action_scale, seen, chosen, base).eval()

    @classmethod
    def new(
        cls,
        spec: EnvSpec,
        state_scale: Affine,
        shape: OpenVLAShape | None = None,
        options: VLAOptions | None = None,
    ) -> Self:
        """Random weights, drawn from torch's global generator; every word of the tasks is a token.

        ``shape`` None: a small one.  1 and -1 stand for the bounds of an action.
        """
        vocabulary = Vocabulary.from_texts(spec.tasks)
        sizes = (shape or OpenVLAShape.small()).with_words(max(len(vocabulary.words), STOP) + 1)
        action_scale, cameras = Affine.from_bounds(spec.action), sorted(spec.images)
        prompts = WordPrompts(vocabulary)
        return cls(spec, sizes.build(), prompts, state_scale, action_scale, cameras, own_options(options)).eval()

    @classmethod
    def filled_network(cls, shape: OpenVLAShape, folder: Path, options: VLAOptions) -> OpenVLANetwork:
        """The network of a public ``folder``, read in the dtype of the options."""
        return filled_network(shape, folder, options.torch_dtype)


def _choose_kept(policy: OpenVLA) -> KeepPrefix | KeepPictures:
    """What ``options.kept`` says; "auto" keeps the patches where they are smaller than the pictures and do not change.

    Raises UserError for patches that are to be kept although training changes them.
    """
    changed = any(name.startswith(VISION) for name in policy.trained_names)
    if policy.config.kept == "prefix" and changed:
        raise UserError(
            f"{type(policy.config.trains).__name__} changes the vision model, so kept patches would be out of date; "
            'set kept to "pictures".'
        )
    size = policy.network.prefix_bytes(policy.cameras, policy.tokens.shape[1])
    smaller = size < picture_bytes(policy.spec, policy.cameras)
    patches = policy.config.kept == "prefix" or (policy.config.kept == "auto" and smaller and not changed)
    return KeepPrefix() if patches else KeepPictures()


def _check_sizes(policy: OpenVLA) -> None:
    spec, known = policy.spec, (len(policy.state_scale.offset), len(policy.action_scale.offset))
    sizes = (spec.state.shape[0], spec.action_dim)
    if sizes != known or policy.network.shape.state not in (0, sizes[0]):
        raise ContractError(
            f"environment {spec.name!r} has states of {sizes[0]} and actions of {sizes[1]} numbers but the "
            f"checkpoint's statistics are of {known[0]} and {known[1]}, so they would be misread; use the environment "
            "that it was trained for, or imitate a dataset of this one first."
        )
    made = policy.config.decoding.actions
    longest = min(made, spec.max_chunk)
    if not 0 < policy.horizon <= longest:
        raise ContractError(
            f"horizon is {policy.horizon}, but the model makes {made} actions and {spec.name!r} takes at most "
            f"{spec.max_chunk} at once, so it cannot be executed; set horizon from 1 to {longest}."
        )


_EMPTY = 29871  # Llama's token of a lone word boundary; in training it stood between the colon and the first action
_HEADS = {"vit_large_patch14_reg4_dinov2.lvd142m": 16, "vit_so400m_patch14_siglip_224": 16}
_TOWERS = ("vision_backbone.featurizer", "vision_backbone.fused_featurizer")
# What OpenVLA's code does otherwise for other values than these.
_ASSUMED = {
    "use_fused_vision_backbone": True,
    "image_resize_strategy": "resize-naive",
    "timm_override_act_layers": [None, None],
    "timm_model_ids": list(_HEADS),
}
_PROPRIO, _CONTINUOUS = "proprio_projector", "action_head"


@dataclass(frozen=True)
class OpenVLAPrompts(TokenizerPrompts):
    """``In: What action should the robot take to INSTRUCTION?`` and ``Out:``, the instruction in lower case.

    OpenVLA appends token 29871 where the tokenizer does not (``predict_action``), as it was there in training.
    """

    template: str = "In: What action should the robot take to {}?\nOut:"
    start: str = "<s>"
    longest: int = 2048

    def _tokens(self, text: str) -> list[int]:
        if text in self.known:
            return list(self.known[text])
        found = list(super()._tokens(text.lower()))
        return found if found[-1] == _EMPTY else [*found, _EMPTY]


def public_shape(folder: Path, config: Mapping[str, Any], crop: float) -> OpenVLAShape:
    """The sizes of the network of ``folder``, by its config and, for the vision transformers, by its tensors.

    Raises UserError, naming the key, for a model that differs from OpenVLA's in what is computed, and for one whose
    tokens were never trained, as a continuous head makes its actions.
    """
    heads = sorted(path.name for path in folder.glob(f"{_CONTINUOUS}*"))
    if heads:
        raise UserError(
            f"{str(folder)!r} makes its actions by a continuous head ({heads[0]}), so the distribution over its action "
            "tokens means nothing; use an OpenVLA-OFT checkpoint that was fine-tuned for discrete tokens."
        )
    for name, assumed in _ASSUMED.items():
        if config.get(name, assumed) != assumed:
            raise UserError(
                f"{str(folder / 'config.json')!r} sets {name} to {config[name]}, but only {assumed} is supported, so "
                "its pictures would be misread; use an OpenVLA checkpoint with DINOv2 and SigLIP at 224 pixels."
            )
    shapes = _tensor_shapes(folder)
    missing = [f"{tower}.pos_embed" for tower in _TOWERS if f"{tower}.pos_embed" not in shapes]
    if missing:
        raise UserError(f"{str(folder)!r} has no tensor {missing[0]}, so it cannot be built; download it again.")
    dino, siglip = (ViTShape.of(shapes, tower, count) for tower, count in zip(_TOWERS, _HEADS.values(), strict=True))
    return OpenVLAShape(
        llama=dict(config["text_config"]),
        dino=dino,
        siglip=siglip,
        bins=config["n_action_bins"],
        padding=config["pad_to_multiple_of"],
        state=proprio_size(folder),
        crop=crop,
    )


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with open_tensors(path) as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def proprio_size(folder: Path) -> int:
    """Entries of the state that OFT's projector in ``folder`` reads; 0 when there is none."""
    tensors = _proprio_tensors(folder)
    return tensors["fc1.weight"].shape[1] if tensors else 0


def filled_network(shape: OpenVLAShape, folder: Path, dtype: torch.dtype) -> OpenVLANetwork:
    """The network of ``shape`` with the weights of ``folder`` in ``dtype``; it is never in memory twice.

    OFT's projector of the state, if there is one, is in a file of its own and stays float32.
    """
    with without_weights():
        network = shape.build()
    own = [name for name in network.state_dict() if name.startswith(f"{_PROPRIO}.")]
    load_public_weights(network, folder, dtype=dtype, absent=own)
    if own:
        network.proprio_projector.load_state_dict(_proprio_tensors(folder), assign=True)
    return network


def _proprio_tensors(folder: Path) -> dict[str, Tensor]:
    """float32 tensors of OFT's projector, saved with or without DDP's ``module.``; {} when the folder has none.

    Raises UserError for a pickle, as OFT writes it.
    """
    files = sorted(folder.glob(f"{_PROPRIO}*"))
    if not files:
        return {}
    readable = [path for path in files if path.suffix == ".safetensors"]
    if not readable:
        raise UserError(
            f"{str(files[0])!r} is a pickle, which could run code, so the projector of the state is not read; write "
            f"its tensors into {files[0].stem}.safetensors with safetensors.torch.save_file."
        )
    with open_tensors(readable[0]) as tensors:
        names = list(tensors.keys())
        return {name.removeprefix("module."): tensors.get_tensor(name).to(torch.float32) for name in names}


def with_gripper(action: Affine, gripper: tuple[float, float]) -> Affine:
    """``action`` for an environment where the last entry is ``gripper`` (closed, open) instead of (0, 1).

    OpenVLA's data have 0 and 1 in every dataset; its evaluations convert them outside the policy.
    """
    closed, opened = gripper
    offset = (*action.offset[:-1], closed + (opened - closed) * action.offset[-1])
    return Affine(offset, (*action.scale[:-1], (opened - closed) * action.scale[-1]))


def critics_scale(spec: EnvSpec) -> Affine:
    """For critics, where the network reads no state: entries with finite bounds to [-1, 1], others as they are."""
    shape = spec.state.shape
    low, high = (np.broadcast_to(np.asarray(bound, dtype=float), shape) for bound in (spec.state.low, spec.state.high))
    bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
    offset, scale = np.zeros(shape), np.ones(shape)
    low, high = low[bounded], high[bounded]
    offset[bounded], scale[bounded] = (low + high) / 2, (high - low) / 2
    return Affine(tuple(offset.tolist()), tuple(scale.tolist()))
