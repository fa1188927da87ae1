"""Imagination: the small world model against its simulator, and frames of a Wan-sized model on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.catalog import make
from tests.benchmarks.measure import COMMAND, Contender, Row, interleave, rate_row
from world_models.backbones import ActionInput, ContextLatents
from world_models.backbones.wan import WanConfig, WanSizes, WanVideo, WanWeights
from world_models.config import ImaginationConfig, WorldModelConfig
from world_models.env import ImaginedEnv
from world_models.initial_states import InitialStatePool, InitialStates
from world_models.model import WorldModel

CHUNK = 5
WOVR = 23.0  # frames/s at 256 x 256 that WoVR publishes (arXiv 2602.13977): Wan2.2-5B, 5 denoising steps
WOVR_STEPS, WOVR_FRAMES = 5, 8
ACTION_WIDTH, MAPS = 22, 32  # per frame: entries of the action input on lift, and pose maps
CONTEXT = 3  # context frames: the first one and the last two


def imagined_vs_simulator(quick: bool = False) -> list[Row]:
    """Control steps per second, pictures of 64x64 included, of imagination against lift in MuJoCo, one thread each.

    Both play the same random chunks of five; weights are random, which costs what trained ones do; no rollout ends
    early.  The simulator has ``threads=1`` and renders one picture a chunk, as the model predicts one.
    """
    num_envs, chunks, repeats = (2, 1, 1) if quick else (64, 5, 7)
    env = make("lift", num_envs=num_envs, threads=1)
    env_ids, shape = np.arange(num_envs), (chunks, num_envs, CHUNK, env.spec.action_dim)
    actions = np.random.default_rng(0).uniform(env.spec.action.low, env.spec.action.high, shape).astype(np.float32)
    imagined = {name: _imagined_env(env, WorldModelConfig(precision=name), chunks) for name in ("float32", "bfloat16")}  # type: ignore[arg-type]
    contenders = {
        name: Contender(partial(_play, player, actions), partial(player.reset, env_ids, env_ids))
        for name, player in {"simulator": env, **imagined}.items()
    }
    with closing(env):
        seconds = interleave(contenders, repeats)
    steps = num_envs * chunks * CHUNK
    return [
        rate_row(
            f"imagined_vs_simulator, {name}",
            "imagined_vs_simulator",
            steps,
            (seconds[name], seconds["simulator"]),
            "steps/s",
            num_envs=num_envs,
            chunk=CHUNK,
            denoising_steps=player.model.config.denoising_steps,
            parameters=sum(item.numel() for item in player.model.parameters()),
        )
        for name, player in imagined.items()
    ]


def _play(env: Any, actions: np.ndarray) -> None:
    for chunk in actions:
        step = env.step(chunk)
    assert step.valid.all(), "an episode ended, so less work was done; take fewer chunks"


def _imagined_env(env: Any, config: WorldModelConfig, chunks: int) -> ImaginedEnv:
    """As many imagined environments as ``env`` has, from its initial states; no rollout ends."""
    torch.manual_seed(0)
    model, env_ids = WorldModel(env.spec, config), np.arange(env.num_envs)
    obs = env.reset(env_ids, env_ids)
    pictures = np.moveaxis(np.concatenate([obs.images[name] for name in model.cameras], -1), -1, 1)
    frames = np.repeat(pictures[:, None], 1 + config.context_frames, 1)
    first = InitialStates(frames, obs.state, obs.task, np.asarray(obs.time))
    # Random weights predict no outcome: there are no uncertainty limits, and no probability reaches a threshold.
    endless = ImaginationConfig(horizon=chunks * CHUNK + 1, success_threshold=2.0, failure_threshold=2.0, resamples=0)
    return ImaginedEnv(model, InitialStatePool(first, first.select(env_ids[:0])), env.num_envs, None, endless)


def wan_frames(quick: bool = False) -> list[Row]:
    """Frames per second at 256x256 of a Wan-sized video model on a GPU beside WoVR's; nothing where there is no GPU.

    One call of an imagined rollout: three pictures are encoded, eight frames denoised in five steps and decoded; all in
    bfloat16, neither compiled nor quantised.  The shape of Wan2.2-5B where memory allows, else of Wan2.1-1.3B; random
    weights.  WoVR's rate is the published one of its machine, not measured here.  ``quick``: a tiny one on the CPU.
    """
    if quick:
        return wan_rows("tiny", WanSizes(), 16, (1, 2), torch.device("cpu"), 1)
    if not torch.cuda.is_available():
        return []
    device = torch.device("cuda")
    free = torch.cuda.mem_get_info(device)[0] / 2**30
    name = next(name for name, shape in PUBLISHED.items() if free >= shape.gibibytes)
    return wan_rows(name, PUBLISHED[name], 256, (1, 2, 4, 8, 16, 32), device, 5)


def wan_rows(
    name: str, weights: WanWeights, side: int, batches: Sequence[int], device: torch.device, repeats: int
) -> list[Row]:
    """One row for each of ``batches`` that fits the memory of ``device``."""
    video = wan(weights, side, device)
    calls = {batch: partial(call, video, random_call(video, side, batch)) for batch in batches}
    fitting = {str(batch): Contender(once) for batch, once in calls.items() if _fits(once)}
    detail = {
        "side": side,
        "parameters": sum(item.numel() for item in video.parameters()),
        "frames": WOVR_FRAMES,
        "denoising_steps": WOVR_STEPS,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "other_is": "WoVR as published",
    }
    rates = {batch: int(batch) * WOVR_FRAMES / seconds for batch, seconds in interleave(fitting, repeats).items()}
    label, command = f"wan_frames, {name}", f"{COMMAND} wan_frames"
    return [
        Row(f"{label}, batch {batch}", rate, WOVR, rate / WOVR, "frames/s", command, detail)
        for batch, rate in rates.items()
    ]


def wan(weights: WanWeights, side: int, device: torch.device) -> WanVideo:
    """The video model in bfloat16, built on ``device``, because as float32 it may not fit on the host."""
    torch.manual_seed(0)
    with device:
        made = WanConfig(weights, lora=None).build((3, side, side), CONTEXT, WOVR_FRAMES, ACTION_WIDTH, MAPS)
    return made.to(torch.bfloat16).eval()


@dataclass(frozen=True)
class Given:
    """The inputs of one call for ``B`` imagined rollouts."""

    pictures: Tensor  # [B,M,3,h,w]
    noise: Tensor  # [B,F,c,y,x]
    moves: ActionInput


def random_call(video: WanVideo, side: int, batch: int) -> Given:
    """Random inputs of the right shapes, on the device of the weights."""
    like, generator = video.mean, torch.Generator().manual_seed(batch)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator).to(like)

    moves = ActionInput(uniform(WOVR_FRAMES, ACTION_WIDTH), uniform(WOVR_FRAMES, MAPS, *video.latent[1:]))
    return Given(2 * uniform(CONTEXT, 3, side, side) - 1, uniform(WOVR_FRAMES, *video.latent), moves)


@torch.no_grad()
def call(video: WanVideo, given: Given) -> Tensor:
    """Pictures [B,F,3,h,w] by Euler steps, as ``WorldModel.predict`` takes them; waits until they are there."""
    noisy, batch = given.noise, len(given.noise)
    context = ContextLatents(video.encode(given.pictures), given.noise.new_zeros(batch, CONTEXT))
    for step in range(WOVR_STEPS):
        level, next_level = (1.0 - (step + i) / WOVR_STEPS for i in (0, 1))
        clean = video(noisy, noisy.new_full((batch, WOVR_FRAMES), level), context, given.moves).clean
        noisy = clean + next_level / level * (noisy - clean)
    pictures = video.decode(clean)
    if pictures.device.type == "cuda":
        torch.cuda.synchronize(pictures.device)
    return pictures


def _fits(once: Callable[[], object]) -> bool:
    try:
        once()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


@dataclass(frozen=True)
class Published:
    """Random networks in the shape of a published Wan: what its ``config.json`` files say."""

    heads: int
    hidden: int
    depth: int
    autoencoder: tuple[tuple[str, Any], ...]
    gibibytes: float  # of free memory that it takes while it is made, and a batch

    def load(self) -> tuple[Any, Any]:
        """A ``WanTransformer3DModel`` and an ``AutoencoderKLWan``."""
        import diffusers

        vae = diffusers.AutoencoderKLWan(**dict(self.autoencoder))
        channels = vae.config.z_dim
        network = diffusers.WanTransformer3DModel(
            num_attention_heads=self.heads,
            attention_head_dim=128,
            in_channels=channels,
            out_channels=channels,
            ffn_dim=self.hidden,
            num_layers=self.depth,
        )
        return network, vae


_WAN_22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
# Largest first.
PUBLISHED = {
    "5B": Published(24, 14336, 30, tuple(_WAN_22.items()), 40.0),
    "1.3B": Published(12, 8960, 30, (("z_dim", 16),), 0.0),
}
