"""Where Wan's networks come from: a folder that diffusers wrote, or random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json


class WanWeights(Protocol):
    """A frozen dataclass that knows where the networks are."""

    def load(self) -> tuple[Any, Any]:
        """A ``WanTransformer3DModel`` and an ``AutoencoderKLWan``; raises UserError when there are none."""


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
