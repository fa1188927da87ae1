"""What all policies of OpenVLA share: observations, what is kept of them, and folders as its authors publish them."""

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
from vla_rl.contract.policy import Features
from vla_rl.policies.normalization import Affine
from vla_rl.policies.openvla.decoding import STOP, OpenVLAOptions, own_options
from vla_rl.policies.openvla.heads import FILES, FILM, HeadShape, head_of
from vla_rl.policies.openvla.network import VISION, OpenVLANetwork, OpenVLAShape, Prefix, ViTShape
from vla_rl.policies.vla.checkpoint import match_cameras, read_public
from vla_rl.policies.vla.dataset_statistics import read_statistics
from vla_rl.policies.vla.features import PICTURE, KeepPictures, KeepPrefix, Views, picture_bytes
from vla_rl.policies.vla.options import VLAOptions, cast_frozen, checkpoint_gradients
from vla_rl.policies.vla.saving import Base, SavedVLA
from vla_rl.policies.vla.tokenizer import Prompts, TokenizerPrompts, Vocabulary, WordPrompts
from vla_rl.policies.vla.weights import load_public_weights, open_tensors, weight_files, without_weights

_PICTURES = KeepPictures()  # of imitation, which encodes nothing beforehand


class OpenVLABase(SavedVLA):
    """A policy around an :class:`OpenVLANetwork`; subclasses say how it makes its actions and learns them."""

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
        self.spec, self.prompts, self.cameras, self.config = spec, prompts, tuple(cameras), self._configure(options)
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

    def _configure(self, options: OpenVLAOptions) -> OpenVLAOptions:
        """``options`` as this kind of head takes them; raises UserError for one that it cannot."""
        if options.critics == "hidden":
            raise UserError(
                f"critics of {type(self).__name__} cannot read hidden states, which depend on what was drawn, so "
                "nothing was made; leave critics at 'patches', or take an L1 head."
            )
        return options

    @property
    def horizon(self) -> int:
        """``H``: actions of a chunk that are executed."""
        return int(self.config.horizon or min(self.chunk_length, self.spec.max_chunk))

    @property
    def feature_sizes(self) -> dict[str, int]:
        return {"pooled": self.network.pooled_size, "state": self.spec.state.shape[0]}

    @property
    def chunk_length(self) -> int:
        """``C``: actions of a chunk that imitation learns."""
        return int(self.config.decoding.actions)

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
        """What the language model reads."""
        patches, task = self._patches(features), features["task"]
        return self.network.prefix(patches, self.tokens[task], self.token_mask[task], features["state"])

    def _patches(self, features: Features) -> Tensor:
        """[B,N,W]; features without ``pooled`` are those of :meth:`imitation_features`."""
        kept = self.kept if "pooled" in features else _PICTURES
        return kept.prefix(self.network, self._views(), features)["patches"]

    def trainable(self) -> dict[str, nn.Parameter]:
        every = self.network.named_parameters()
        return {f"network.{name}": item for name, item in every if name in self.trained_names}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @classmethod
    def opened(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions | None = None) -> Self:
        """The policy of this class in a downloaded OpenVLA folder, for an environment.

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
        sizes = cls.with_head(shape or OpenVLAShape.small(), spec.action_dim)
        sizes = sizes.with_words(max(len(vocabulary.words), STOP) + 1)
        action_scale, cameras = Affine.from_bounds(spec.action), sorted(spec.images)
        prompts = WordPrompts(vocabulary)
        return cls(spec, sizes.build(), prompts, state_scale, action_scale, cameras, own_options(options)).eval()

    @classmethod
    def with_head(cls, shape: OpenVLAShape, entries: int) -> OpenVLAShape:
        """``shape`` with the head that an untrained policy of this class has, for actions of ``entries`` numbers."""
        return shape

    @classmethod
    def filled_network(cls, shape: OpenVLAShape, folder: Path, options: VLAOptions) -> OpenVLANetwork:
        """The network of a public ``folder``, read in the dtype of the options."""
        return filled_network(shape, folder, options.torch_dtype)


def _choose_kept(policy: OpenVLABase) -> KeepPrefix | KeepPictures:
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


def _check_sizes(policy: OpenVLABase) -> None:
    spec, known = policy.spec, (len(policy.state_scale.offset), len(policy.action_scale.offset))
    sizes = (spec.state.shape[0], spec.action_dim)
    if sizes != known or policy.network.shape.state not in (0, sizes[0]):
        raise ContractError(
            f"environment {spec.name!r} has states of {sizes[0]} and actions of {sizes[1]} numbers but the "
            f"checkpoint's statistics are of {known[0]} and {known[1]}, so they would be misread; use the environment "
            "that it was trained for, or imitate a dataset of this one first."
        )
    head, made = policy.network.shape.head, policy.chunk_length
    if head and head.entries != policy.spec.action_dim:
        raise ContractError(
            f"the continuous head makes actions of {head.entries} numbers and those of {policy.spec.name!r} have "
            f"{policy.spec.action_dim}, so they would be misread; use the environment that it was trained for."
        )
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
_STATE = FILES[0]


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

    Raises UserError, naming the key, for a model that differs from OpenVLA's in what is computed.
    """
    if film := sorted(path.name for path in folder.glob(f"{FILM}--*")):
        raise UserError(
            f"{str(folder)!r} lets the instruction change what its vision model sees (FiLM, {film[0]}), which vla-rl "
            "does not, so pictures would be misread; use an OpenVLA-OFT checkpoint without FiLM."
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
        state=_part_shapes(folder, _STATE).get("fc1.weight", (0, 0))[1],
        head=head_shape(folder),
        crop=crop,
    )


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with open_tensors(path) as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def head_shape(folder: Path) -> HeadShape | None:
    """The shape of OFT's continuous head in ``folder``; None where actions are tokens."""
    shapes = _part_shapes(folder, "action_head")
    found = head_of(shapes)
    if shapes and found is None:
        raise UserError(
            f"{str(_part_file(folder, 'action_head'))!r} holds neither an L1 regression nor a diffusion head of "
            "OpenVLA-OFT, so its actions would be misread; write the tensors of action_head--....pt into it again."
        )
    return found


def filled_network(shape: OpenVLAShape, folder: Path, dtype: torch.dtype) -> OpenVLANetwork:
    """The network of ``shape`` with the weights of ``folder`` in ``dtype``; it is never in memory twice.

    OFT's projectors and heads are in files of their own and stay float32.
    """
    with without_weights():
        network = shape.build()
    parts = [part for part in FILES if hasattr(network, part)]
    own = [name for name in network.state_dict() if name.partition(".")[0] in parts]
    load_public_weights(network, folder, dtype=dtype, absent=own)
    for part in parts:
        module = network.get_submodule(part)
        wanted = {name: tuple(item.shape) for name, item in module.state_dict().items()}
        if _part_shapes(folder, part) != wanted:
            raise UserError(
                f"{str(_part_file(folder, part) or folder / part)!r} does not hold the tensors of OpenVLA-OFT's {part} "
                "for this model, so they would stay undefined; write those of the checkpoint's own file into "
                f"{part}--....safetensors (docs/bring/vla.md)."
            )
        module.load_state_dict(_part_tensors(folder, part), assign=True)
    return network


def _part_file(folder: Path, part: str) -> Path | None:
    """The file of what OFT saves as ``part`` beside the model; None when the folder has none.

    Raises UserError for a pickle, as OFT writes it, and for several files.
    """
    files = sorted(folder.glob(f"{part}*"))
    readable = [path for path in files if path.suffix == ".safetensors"]
    if len(readable) > 1:
        raise UserError(
            f"{str(folder)!r} has {readable[0].name} and {readable[1].name}, so which weights to read is not known; "
            "leave one of them there."
        )
    if files and not readable:
        raise UserError(
            f"{str(files[0])!r} is a pickle, which could run code, so it is not read; write its tensors into "
            f"{files[0].stem}.safetensors with safetensors.torch.save_file (docs/bring/vla.md has the command)."
        )
    return readable[0] if readable else None


def _part_shapes(folder: Path, part: str) -> dict[str, tuple[int, ...]]:
    """Shapes by name, saved with or without DDP's ``module.``; {} when the folder has no such part."""
    path = _part_file(folder, part)
    if path is None:
        return {}
    with open_tensors(path) as tensors:
        names = list(tensors.keys())
        return {name.removeprefix("module."): tuple(tensors.get_slice(name).get_shape()) for name in names}


def _part_tensors(folder: Path, part: str) -> dict[str, Tensor]:
    """The same tensors, in float32."""
    path = _part_file(folder, part)
    assert path is not None, "its shapes were read"
    with open_tensors(path) as tensors:
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
