"""A flow-matching vision-language-action model of any family as a policy: SmolVLA, pi0."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import Features
from vla_rl.policies.flow import Field, VelocityField
from vla_rl.policies.flow_policy import Compute, FlowPolicy
from vla_rl.policies.heads import zero_init
from vla_rl.policies.noise import normal, uniform
from vla_rl.policies.normalization import Affine, origin
from vla_rl.policies.vla.checkpoint import PublicCheckpoint, match_cameras, read_public
from vla_rl.policies.vla.dataset_statistics import read_statistics
from vla_rl.policies.vla.features import PICTURE, PREFIX, KeepPictures, KeepPrefix, Views, choose
from vla_rl.policies.vla.inference import Eager, Operations
from vla_rl.policies.vla.network import FlowNetwork, NetworkShape
from vla_rl.policies.vla.options import VLAOptions, cast_frozen, checkpoint_gradients
from vla_rl.policies.vla.saving import Base, SavedVLA, filled
from vla_rl.policies.vla.tokenizer import Prompts, Vocabulary, WordPrompts

SMALL_CHUNK = 10  # of a new policy that is told neither a shape nor a horizon
_PICTURES = KeepPictures()  # of imitation, which encodes nothing beforehand
_DATASET_LIMIT = 2_000_000_000  # bytes of the prefixes of a dataset up to which imitation keeps them
_PART = 64  # observations that are encoded at a time


class FlowVLA(SavedVLA, FlowPolicy):
    """The policy around a :class:`FlowNetwork`; subclasses say how a public checkpoint of their family is read.

    A chain runs over padded actions, ``N = R A`` numbers, and so does its likelihood: it is exact for what was drawn.
    ``R`` is the model's whole chunk, or ``H`` where no action depends on later ones.  Critics and heads read ``pooled``
    and ``state``, never the prefix.
    """

    config: VLAOptions
    tokens: Tensor
    token_mask: Tensor
    network: FlowNetwork
    options_class = VLAOptions
    shape_class: ClassVar[Any]  # of a family

    def __init__(
        self,
        spec: EnvSpec,
        network: FlowNetwork,
        prompts: Prompts,
        state_scale: Affine,
        action_scale: Affine,
        cameras: Sequence[str | None],
        options: VLAOptions,
        base: Base | None = None,
    ) -> None:
        """``cameras``: the environment's camera for each of the model's, None where one is missing; ``base``: the
        folder that the weights of ``network`` come from.

        Raises ContractError when state or action of ``spec`` have another size than the statistics, or more entries
        or actions than the model.
        """
        _check_sizes(spec, network, state_scale, action_scale, options.horizon)
        super().__init__(spec, action_scale, options)
        self.prompts, self.cameras, self.state_scale, self.base = prompts, tuple(cameras), state_scale, base
        self.network = network
        self.noise_head = nn.Sequential(
            nn.Linear(network.hidden_size, 64), nn.Tanh(), zero_init(nn.Linear(64, network.action_size))
        )
        trained = options.trains.prepare(network)
        cast_frozen(network, trained, options.torch_dtype)
        self._trained = tuple(trained)  # names: a move to a device may replace parameters
        checkpoint_gradients(network, options.gradient_checkpointing)
        tokens, mask = prompts.encode(spec.tasks)
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("token_mask", mask, persistent=False)
        self._checked = mask, bool(mask.all())
        self._acting: Operations = options.inference.prepare(network)
        self._learning: Operations = options.inference.learning(network)
        self._prefix_bytes = network.prefix_bytes(self.cameras, self.prompt_length)
        self.kept = choose(options, self._prefix_bytes)

    @classmethod
    def new(
        cls,
        spec: EnvSpec,
        state_scale: Affine,
        shape: Any = None,
        options: VLAOptions | None = None,
        action_scale: Affine | None = None,
    ) -> Self:
        """Random weights, drawn from torch's global generator; every word of the tasks is a token.

        ``shape`` None: a small one that predicts the chunks it executes.  Its vocabulary becomes that of the tasks.
        ``action_scale`` None: 1 and -1 stand for the bounds of an action.  ``options.horizon`` 0 executes whole chunks,
        as far as the environment takes them.
        """
        (prompts, words), chosen = cls.word_prompts(Vocabulary.from_texts(spec.tasks)), options or VLAOptions()
        sizes = shape or cls.shape_class.small(
            spec.state.shape[0], spec.action_dim, chunk=chosen.horizon or SMALL_CHUNK
        )
        network = sizes.with_words(words).build()
        horizon = chosen.horizon or min(network.chunk, spec.max_chunk)
        scales = state_scale, action_scale or Affine.from_bounds(spec.action)
        cameras, whole = tuple(sorted(spec.images)), replace(chosen, horizon=horizon)
        return cls(spec, network, prompts, *scales, cameras, whole).eval()

    @classmethod
    def word_prompts(cls, vocabulary: Vocabulary) -> tuple[Prompts, int]:
        """Prompts for a model from nothing, and how many tokens there are."""
        return WordPrompts(vocabulary), len(vocabulary.words) + 1

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return self.tokens.shape[1]

    @property
    def feature_sizes(self) -> dict[str, int]:
        return {"pooled": self.network.pooled_size, "state": self.spec.state.shape[0]}

    @property
    def chunk_length(self) -> int:
        """``C``: actions of a chunk that imitation learns."""
        return int(self.network.chunk)

    # -- the part no gradient reaches ------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """``pooled`` [E,W], normalised ``state`` [E,S], ``time`` [E,1] (for critics only), and what is kept."""
        state = self._state(obs)
        kept = self.kept.features(self._acting, self._views(), {**self._seen(obs), "state": state})
        time = torch.as_tensor(obs.time, device=self.action_low.device)[:, None]
        from_here = origin(self.relative, self._tensor(obs.state))
        return {**kept, "state": state, "time": time.to(state) / self.spec.time_limit, **from_here}

    def imitation_features(self, obs: Observation) -> Features:
        """What :meth:`imitation_losses` reads, on the host: the kept prefixes if they fit, or the pictures."""
        count = len(obs.state)
        if isinstance(self.kept, KeepPrefix) and count * self._prefix_bytes <= _DATASET_LIMIT:
            parts = [self.encode(obs.select(slice(i, i + _PART))) for i in range(0, count, _PART)]
            return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}
        pictures = {PICTURE + name: torch.as_tensor(obs.images[name]) for name in self.cameras if name is not None}
        raw = torch.as_tensor(obs.state).float()
        state, from_here = self.state_scale.normalize(raw), origin(self.relative, raw)
        return {**pictures, "task": torch.as_tensor(obs.task).long(), "state": state, **from_here}

    def _seen(self, obs: Observation) -> Features:
        pictures = {PICTURE + name: self._tensor(obs.images[name]) for name in self.cameras if name is not None}
        return {**pictures, "task": self._tensor(obs.task).long()}

    def _state(self, obs: Observation) -> Tensor:
        return self.state_scale.normalize(self._tensor(obs.state).float())

    def _views(self) -> Views:
        named = dict(self.network.named_parameters()) if self.config.trains.reaches_prefix else {}
        learnt = [named[name] for name in self._trained] if named else []
        if self._checked[0] is not self.token_mask:
            self._checked = self.token_mask, not self.token_mask.is_meta and bool(self.token_mask.all())
        return Views(self.cameras, self.tokens, None if self._checked[1] else self.token_mask, learnt)

    def act_through(self, wrap: Callable[[Operations], Operations]) -> None:
        """Act through ``wrap`` of the network.  Raises UserError unless it acts operation by operation."""
        if not isinstance(self.config.inference, Eager):
            raise UserError(
                f"the weights that a {type(self.config.inference).__name__} network reads would have to lie still, but "
                "a sharded run gathers them anew for every call; set inference to Eager()."
            )
        self._acting = wrap(self._acting)

    # -- acting -----------------------------------------------------------------------------------------------------

    @property
    def latent_shape(self) -> tuple[int, int]:
        """``(R, A)``: rows and columns of the noise that a chain starts from, see ``LatentPolicy``."""
        return self.network.denoised(self.horizon), self.network.action_size

    def bounded(self, end: Tensor, features: Features) -> Tensor:
        """The executed part of a chain's end [B,N], normalised by the bounds of the action, [B,HD] in [-1, 1]."""
        return Affine.from_bounds(self.spec.action).normalize(self.executed(end, features)["action"]).flatten(1)

    # -- learning ---------------------------------------------------------------------------------------------------

    def field(self, features: Features) -> VelocityField:
        """The velocity field over padded chunks given features, differentiable in what is trained."""
        return self._field(features, self._learning)

    def acting_field(self, features: Features) -> VelocityField:
        return self._field(features, self._acting)

    @torch.no_grad()
    def decided(self, key: Hashable, compute: Compute, features: Features, drawn: Features) -> Features:
        """See ``FlowPolicy``: condition, steps and density are one call of what the network acts through."""
        prefix = self._prefix(features, self._acting)
        given = {**{PREFIX + name: item for name, item in prefix.items()}, "state": features["state"], **drawn}

        def call(network: Operations, given: Features) -> Features:
            seen = {name.removeprefix(PREFIX): item for name, item in given.items() if name.startswith(PREFIX)}
            return compute(self._field_behind(seen, given["state"], network), given)

        return self._acting.decide(key, call, given)

    def _field(self, features: Features, network: Operations) -> VelocityField:
        return self._field_behind(self._prefix(features, network), features["state"], network)

    def _prefix(self, features: Features, network: Operations) -> Mapping[str, Tensor]:
        seen = self.kept if "pooled" in features else _PICTURES
        return seen.prefix(network, self._views(), features)

    def _field_behind(self, prefix: Mapping[str, Tensor], state: Tensor, network: Operations) -> VelocityField:
        state = nn.functional.pad(state, (0, self.network.state_size - state.shape[-1]))
        condition = network.condition(prefix, state)

        def velocity(x: Tensor, t: Tensor) -> Field:
            chunks = x.flatten(0, 1).unflatten(-1, (-1, self.network.action_size))
            found, hidden = network.velocity(condition, chunks, t.flatten())
            return Field(found.reshape(x.shape), self.noise_head(hidden.to(self.action_low)).reshape(x.shape))

        return velocity

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Means [B,C] of ``(v - (eps - x_0))^2`` over an action, at times ``.001 + .999 u``, ``u ~ Beta(1.5, 1)``.

        The times are those of pi0 (arXiv 2410.24164, appendix B), LeRobot and openpi: more of them near noise.
        Actions of ``chunks`` [B,C,D] are padded to ``A`` with zeros, which the model learns as well.
        """
        target = nn.functional.pad(chunks, (0, self.network.action_size - chunks.shape[-1])).flatten(1)
        target = target[:, None].expand(-1, draws, -1)
        noise = normal(target.shape, generator, like=target)
        uniforms = uniform(target.shape[:2], generator, like=target)
        time = 0.001 + 0.999 * uniforms ** (1 / 1.5)  # the inverse of Beta(1.5, 1)'s distribution function
        point = time[..., None] * noise + (1.0 - time[..., None]) * target
        field = self.field({name: self._tensor(item) for name, item in features.items()})
        errors = (field(point, time).velocity - (noise - target)).square()
        return errors.unflatten(-1, (chunks.shape[1], -1)).mean((1, -1))

    def trainable(self) -> dict[str, nn.Parameter]:
        heads = {f"noise_head.{name}": item for name, item in self.noise_head.named_parameters()}
        named = dict(self.network.named_parameters())
        return {**{f"network.{name}": named[name] for name in self._trained}, **heads}


def _check_sizes(spec: EnvSpec, network: FlowNetwork, state: Affine, action: Affine, horizon: int) -> None:
    for what, size, known, room in (
        ("state", spec.state.shape[0], len(state.offset), network.state_size),
        ("action", spec.action_dim, len(action.offset), network.action_size),
    ):
        if size != known or size > room:
            raise ContractError(
                f"environment {spec.name!r} has {what}s of {size} numbers but the checkpoint's statistics are of "
                f"{known} and its model takes at most {room}, so they would be misread; use the environment that it "
                "was trained for, or imitate a dataset of this one first."
            )
    longest = min(network.chunk, spec.max_chunk)
    if not 0 < horizon <= longest:
        raise ContractError(
            f"horizon is {horizon}, but the model's chunk has {network.chunk} actions and {spec.name!r} takes at most "
            f"{spec.max_chunk} at once, so it cannot be executed; set horizon from 1 to {longest}."
        )


F = TypeVar("F", bound=FlowVLA)


@dataclass(frozen=True)
class OpenedFolder:
    """A public folder for one environment; its weights are not read yet.

    state    None where the statistics have none
    cameras  the environment's for each of the checkpoint's, None where one is missing
    options  with the horizon that is executed, and which actions are relative
    """

    checkpoint: PublicCheckpoint
    state: Affine | None
    action: Affine
    cameras: tuple[str | None, ...]
    options: VLAOptions


def open_public(folder: Path, spec: EnvSpec, options: VLAOptions) -> OpenedFolder:
    """Read all of ``folder`` but weights and tokenizer; raises UserError where it does not fit ``spec``."""
    checkpoint = read_public(folder)
    cameras = match_cameras(checkpoint, spec, options.cameras)
    place = Path(options.statistics) if options.statistics else folder
    statistics = read_statistics(place, checkpoint.modes, options.statistics_key)
    cut = statistics.cut(spec.state.shape[-1], spec.action_dim)
    horizon = options.horizon or min(checkpoint.executed, spec.max_chunk)
    sampler = options.sampler
    if checkpoint.steps and sampler == VLAOptions().sampler:
        sampler = replace(sampler, steps=checkpoint.steps)
    relative = options.relative or checkpoint.relative
    chosen = replace(options, horizon=horizon, sampler=sampler, relative=relative)
    return OpenedFolder(checkpoint, cut.state, cut.action, cameras, chosen)


def flow_from_public(
    kind: Callable[..., F],
    folder: str | Path,
    spec: EnvSpec,
    options: VLAOptions,
    shape: Callable[[PublicCheckpoint], NetworkShape],
    prompts: Callable[[PublicCheckpoint], Any],
) -> F:
    """The policy of class ``kind`` in a public folder, for ``spec``.

    ``shape`` and ``prompts`` say what a family's folder describes.  Raises UserError for what is missing, damaged or
    does not fit the environment; the tokenizer is read before the weights, which take longest.
    """
    opened = open_public(Path(folder), spec, options)
    sizes = shape(opened.checkpoint)
    if opened.state is None:
        raise UserError(
            f"the statistics for {str(folder)!r} have none of a state, which the model reads, so it would be misread; "
            "name others with --vla.statistics FOLDER."
        )
    known = prompts(opened.checkpoint).learn(spec.tasks)
    network = filled(sizes, Path(folder))
    base = Base.of(Path(folder))
    made = kind(spec, network, known, opened.state, opened.action, opened.cameras, opened.options, base)
    made.eval()
    return made
