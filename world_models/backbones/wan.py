"""Wan, a video model trained on the world's videos, conditioned on a robot's actions (diffusers' implementation).

``WanTransformer3DModel`` is as it comes, only that

- its text is replaced by the actions, in two ways: added to each frame's time embedding, which scales and shifts its
  tokens (adaptive norm), and as the tokens of the cross-attention (WoVR, "dual channel");
- maps of the robot's position are further channels of the patch embedding, with weights of zero at first (the best of
  the methods that GigaWorld-1 compared);
- every frame has its own time, by the token-wise timesteps that Wan 2.2 brought (Chen et al. 2024, arXiv 2407.01392):
  context frames are given as clean or slightly noisy, predicted ones at the level that is being denoised.

``AutoencoderKLWan`` stays frozen and **encodes every frame by itself**, as it does with the first one of a video.  Its
compression of four frames into one latent is not used: context frames lie ``F`` control steps apart, a latent of four
frames would mix known and unknown actions, and every frame has its own level and its own weight in the loss.  So any
``F`` and number of context frames will do, as long as ``1 + context_frames + F`` fit the transformer's rotary positions
(1024 in the published ones); the price is up to four times as many tokens as a clip of the same length has in Wan, and
a pretrained transformer has to learn that neighbouring latents are single steps.

Wan's flow matching is ours: ``x_t = (1-t) x + t eps``, the network says ``v = eps - x``, timestep ``1000 t``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json
from world_models.backbones import ActionInput, ContextLatents, Denoised, VideoModel, zero_init


@dataclass(frozen=True)
class WanSizes:
    """Random networks of these sizes: for tests, and for training from scratch where an autoencoder is put in later."""

    heads: int = 2
    head: int = 12  # entries of a head, even; a third each for time, height and width
    depth: int = 2
    hidden: int = 48
    channels: int = 4  # of the latents
    lens: int = 8  # channels inside the autoencoder
    halvings: int = 2  # of the sides of pictures
    positions: int = 64  # frames, and cells per side, that have a position of their own

    def load(self) -> tuple[Any, Any]:
        package = _diffusers()
        network = package.WanTransformer3DModel(
            num_attention_heads=self.heads,
            attention_head_dim=self.head,
            in_channels=self.channels,
            out_channels=self.channels,
            text_dim=8,
            freq_dim=32,
            ffn_dim=self.hidden,
            num_layers=self.depth,
            rope_max_seq_len=self.positions,
        )
        vae = package.AutoencoderKLWan(
            base_dim=self.lens,
            z_dim=self.channels,
            dim_mult=[1] + [2] * self.halvings,
            num_res_blocks=1,
            temperal_downsample=[True] * self.halvings,
            latents_mean=[0.0] * self.channels,
            latents_std=[1.0] * self.channels,
            scale_factor_temporal=2**self.halvings,
            scale_factor_spatial=2**self.halvings,
        )
        return network, vae


@dataclass(frozen=True)
class WanFolder:
    """A folder as diffusers' ``WanPipeline`` has it: ``transformer/`` and ``vae/`` with config.json and safetensors.

    Nothing is downloaded, no pickle is read and no code in the folder is run.  The folder must still be there when a
    checkpoint of a world model is loaded, though its weights are then replaced.
    """

    path: str

    def load(self) -> tuple[Any, Any]:
        package = _diffusers()
        parts = (("transformer", package.WanTransformer3DModel), ("vae", package.AutoencoderKLWan))
        network, vae = (_read(Path(self.path).expanduser() / name, made_by) for name, made_by in parts)
        return network, vae


WanWeights: TypeAlias = WanSizes | WanFolder
"""Where the networks come from; ``load()`` gives a ``WanTransformer3DModel`` and an ``AutoencoderKLWan``."""


@dataclass(frozen=True)
class Lora:
    """Which linear layers get a correction of which rank."""

    rank: int = 16
    scale: float = 1.0  # what the correction is multiplied by: the paper's alpha / rank
    layers: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")  # ends of names

    def adapt(self, network: nn.Module) -> None:
        """Freeze ``network`` and correct its layers, which changes nothing until the corrections have learnt.

        Raises UserError when no layer has such a name, or for a rank below 1.
        """
        found = [
            name
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear) and f".{name}".endswith(tuple(f".{end}" for end in self.layers))
        ]
        if not found or self.rank < 1:
            raise UserError(
                f"corrections of rank {self.rank} of layers named {', '.join(self.layers) or '(none)'} leave nothing "
                "to train; give a rank of at least 1 and the ends of names of linear layers."
            )
        network.requires_grad_(False)
        for name in found:
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, LoraLinear(network.get_submodule(name), self))


class LoraLinear(nn.Module):
    """``W x + b + scale * B A x`` with ``A`` [rank, in] and ``B`` [out, rank]; ``B`` is zero at first."""

    def __init__(self, linear: nn.Module, config: Lora) -> None:
        """``linear``: an ``nn.Linear``, which stays as it is."""
        super().__init__()
        assert isinstance(linear, nn.Linear)
        self.linear, self.scale = linear, config.scale
        self.down = nn.Linear(linear.in_features, config.rank, bias=False)
        self.up = zero_init(nn.Linear(config.rank, linear.out_features, bias=False))
        nn.init.normal_(self.down.weight, std=linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * self.up(self.down(x))


_TIMESTEPS = 1000.0
# Of the sides of pictures, in the published networks: their autoencoder halves thrice, then a patch of 2.
_MULTIPLE = 16


@dataclass(frozen=True)
class WanConfig:
    """Where the networks come from and what of them is trained."""

    weights: WanWeights = field(default_factory=WanSizes)
    lora: Lora | None = field(default_factory=Lora)  # None trains the whole transformer
    width: int = 256  # entries of a feature

    @property
    def multiple(self) -> int:
        return _MULTIPLE

    def build(self, picture: tuple[int, int, int], context: int, frames: int, actions: int, maps: int) -> WanVideo:
        return WanVideo(picture, context, frames, actions, maps, self)


class WanVideo(VideoModel):
    """A video model; cameras lie side by side in one wide picture, so that any number suits the same weights."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, picture: tuple[int, int, int], context: int, frames: int, actions: int, maps: int, config: WanConfig
    ) -> None:
        """``picture`` (C, h, w); ``context`` M frames; ``frames`` F to predict; sizes of ``ActionInput``: A and P.

        Raises UserError for pictures and numbers of frames that do not suit the networks, and whatever loading raises.
        """
        super().__init__()
        network, vae = config.weights.load()
        channels, height, breadth = picture
        fold, self.patch = vae.config.scale_factor_spatial, tuple(network.config.patch_size[1:])
        self.num_context, self.frames, self.width, self.cameras = context, frames, config.width, channels // 3
        _check(picture, context + frames, network, vae)
        self.latent = (vae.config.z_dim, height // fold, self.cameras * breadth // fold)
        self.cells = tuple(side // part for side, part in zip(self.latent[1:], self.patch, strict=True))
        for name, values in (("mean", vae.config.latents_mean), ("std", vae.config.latents_std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)
        if config.lora is not None:
            config.lora.adapt(network)
        width = network.config.num_attention_heads * network.config.attention_head_dim
        network.patch_embedding = MappedPatches(network.patch_embedding, maps)
        network.condition_embedder = ActionEmbedder(network.condition_embedder, width, actions, context + frames)
        # Left out of the network, so that what it returns is what heads read.
        self.leave, network.proj_out = network.proj_out, nn.Identity()
        self.network, self.vae = network, vae.requires_grad_(False)
        places = self.patch[0] * self.patch[1]
        self.mix = nn.Linear(frames * width, places * config.width)

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        lead = pictures.shape[:-3]
        views = pictures.flatten(0, -4).unflatten(1, (self.cameras, 3)).flatten(0, 1)
        latents = self.vae.encode(views[:, :, None], return_dict=False)[0].mode()[:, :, 0]
        latents = ((latents - self.mean) / self.std).unflatten(0, (-1, self.cameras))
        return latents.movedim(1, 3).flatten(3).unflatten(0, lead)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        lead = latents.shape[:-3]
        views = latents.flatten(0, -4).unflatten(3, (self.cameras, -1)).movedim(3, 1).flatten(0, 1)
        views = self.vae.decode((views * self.std + self.mean)[:, :, None], return_dict=False)[0][:, :, 0]
        return views.unflatten(0, (-1, self.cameras)).flatten(1, 2).unflatten(0, lead)

    def forward(self, noisy: Tensor, level: Tensor, context: ContextLatents, action_input: ActionInput) -> Denoised:
        maps = functional.pad(action_input.maps, (0, 0, 0, 0, 0, 0, self.num_context, 0))
        video = torch.cat([torch.cat([context.frames, noisy], 1), maps], 2).transpose(1, 2)
        time = _TIMESTEPS * torch.cat([context.level, level], 1)
        time = time.repeat_interleave(self.cells[0] * self.cells[1], 1)
        condition = functional.pad(action_input.vector, (0, 0, self.num_context, 0))
        tokens = self._tokens(self.network(video, time, condition, return_dict=False)[0])[:, self.num_context :]
        velocity = self._unpatchify(self.leave(tokens))
        features = self._unpatchify(self.mix(tokens.permute(0, 2, 3, 1, 4).flatten(3))[:, None])
        clean = noisy - level[..., None, None, None] * velocity
        # Contiguous: where a mean over strided places is rounded depends on the row.
        return Denoised(clean, features.flatten(3)[:, 0].transpose(1, 2).contiguous())

    def _tokens(self, hidden: Tensor) -> Tensor:
        """Tokens [B,T,Y,X,d] of what the network returns without its last layer, [B,d/pq,T,Yp,Xq]."""
        high, wide = self.patch
        cells = hidden.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))
        return cells.permute(0, 2, 3, 5, 4, 6, 1).flatten(4)

    def _unpatchify(self, tokens: Tensor) -> Tensor:
        """Places [B,T,c,Yp,Xq] of ``tokens`` [B,T,Y,X,pqc]."""
        cells = tokens.unflatten(-1, (*self.patch, -1))
        return cells.permute(0, 1, 6, 2, 4, 3, 5).flatten(5).flatten(3, 4)


class MappedPatches(nn.Module):
    """Wan's patch embedding for ``maps`` more channels, which add nothing at first."""

    def __init__(self, embedding: nn.Conv3d, maps: int) -> None:
        super().__init__()
        size, stride = tuple(embedding.kernel_size), tuple(embedding.stride)
        self.latents, self.sizes = embedding, (embedding.in_channels, maps)
        maps_in = nn.Conv3d(maps, embedding.out_channels, size, stride, bias=False)  # type: ignore[arg-type]
        self.maps = zero_init(maps_in)

    def forward(self, video: Tensor) -> Tensor:
        """[B,d,T,Y,X] of ``video`` [B,c+P,T,y,x]."""
        latents, maps = video.split(self.sizes, 1)
        return self.latents(latents) + self.maps(maps)


class ActionEmbedder(nn.Module):
    """Takes the place of Wan's embedding of time and text: time and action, frame by frame.

    The addition to the time embedding is zero at first; the tokens of the cross-attention are new and must be learnt.
    """

    def __init__(self, embedder: Any, width: int, actions: int, frames: int) -> None:
        """``embedder``: Wan's own, for its parts that know time; ``frames``: M + F."""
        super().__init__()
        self.waves, self.time, self.steer = embedder.timesteps_proj, embedder.time_embedder, embedder.time_proj
        self.action = nn.Sequential(nn.Linear(actions, width), nn.SiLU(), zero_init(nn.Linear(width, width)))
        self.token = nn.Sequential(nn.Linear(actions, width), nn.SiLU(), nn.Linear(width, width))
        self.slots = nn.Parameter(0.02 * torch.randn(frames, width))  # cross-attention knows no order by itself

    def forward(
        self, timestep: Tensor, action_input: Tensor, image: Tensor | None = None, timestep_seq_len: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Called by diffusers: ``timestep`` [B*tokens], equal within a frame; ``action_input`` [B,M+F,A] as the text.

        Returns the time embedding [B,tokens,d], six of it for the blocks' norms [B,tokens,6d], and the text [B,M+F,d].
        """
        time = timestep.unflatten(0, (*action_input.shape[:2], -1))
        waves = self.waves(time[..., 0].flatten()).to(action_input)
        embedded = self.time(waves).unflatten(0, action_input.shape[:2]) + self.action(action_input)
        steer = self.steer(functional.silu(embedded))
        tokens = time.shape[2]
        return (
            embedded.repeat_interleave(tokens, 1),
            steer.repeat_interleave(tokens, 1),
            self.token(action_input) + self.slots,
            None,
        )


def _check(picture: tuple[int, int, int], frames: int, network: Any, vae: Any) -> None:
    """Raise UserError when ``frames`` of ``picture`` (C, h, w) cannot go through ``vae`` and ``network``."""
    sizes, fold = network.config, vae.config.scale_factor_spatial
    channels, height, breadth = picture
    if not sizes.in_channels == sizes.out_channels == vae.config.z_dim:
        raise UserError(
            f"Wan's transformer takes {sizes.in_channels} channels and gives {sizes.out_channels}, its autoencoder has "
            f"{vae.config.z_dim}, so they do not fit; give a text-to-video folder (image-to-video ones take more)."
        )
    if sizes.patch_size[0] != 1:
        raise UserError(
            f"Wan's transformer joins {sizes.patch_size[0]} frames in a token, so frames would have no level of their "
            "own; give one whose patch_size begins with 1."
        )
    sides = [fold * part for part in sizes.patch_size[1:]]
    if channels % 3 or height % sides[0] or breadth % sides[1]:
        raise UserError(
            f"pictures of {channels} x {height} x {breadth} do not fit Wan, so they cannot be imagined by it; give RGB "
            f"pictures whose sides are multiples of {sides[0]} and {sides[1]}."
        )
    longest = max(frames, height // sides[0], channels // 3 * breadth // sides[1])
    if longest > sizes.rope_max_seq_len:
        raise UserError(
            f"{frames} frames of {channels // 3} cameras need {longest} positions where Wan's transformer knows "
            f"{sizes.rope_max_seq_len}, so it cannot tell them apart; take fewer frames, less context or smaller "
            "pictures."
        )


def _read(folder: Path, made_by: Any) -> Any:
    """The network in ``folder``, float32; raises UserError when it is missing, foreign, damaged or incomplete."""
    try:
        named = read_json(folder / "config.json")["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(folder)!r} has no config.json of diffusers ({error!r}), so there is no Wan to load; give the folder "
            "that holds transformer/ and vae/, downloaded beforehand."
        ) from error
    if named != made_by.__name__:
        raise UserError(
            f"{str(folder)!r} holds a {named}, so it would be misread as Wan; give one with a {made_by.__name__}."
        )
    # All of it is float32, so that nothing has to be kept so: with a list of what has, diffusers demands accelerate.
    kind: Any = type(named, (made_by,), {"_keep_in_fp32_modules": None})
    try:
        network, loading = kind.from_pretrained(
            str(folder),
            local_files_only=True,
            use_safetensors=True,
            low_cpu_mem_usage=False,
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the weights in {str(folder)!r} cannot be loaded ({error}), so there is no Wan; download its safetensors "
            "again (pickled weights are not read)."
        ) from error
    if loading["missing_keys"]:
        raise UserError(
            f"{loading['missing_keys'][0]!r} is missing from the weights in {str(folder)!r}, so it would stay random; "
            "download them again."
        )
    return network


def _diffusers() -> Any:
    """The package; raises UserError, naming the extra, when it or a part of it is not installed."""
    try:
        import diffusers as package

        package.WanTransformer3DModel  # noqa: B018  (diffusers imports its parts when they are asked for)
        package.AutoencoderKLWan  # noqa: B018
    except (ImportError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"diffusers with Wan is not installed ({error}), so this video model cannot be made; "
            "pip install 'vla-rl[world]'."
        ) from error
    return package
