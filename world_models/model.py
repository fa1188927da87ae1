"""A world model: dynamics, outcome, doubt and inverse dynamics in one module.

Where the robot goes is learnt by itself (``robot.py``); the rest by one loss, given where it went:

    frames     E w |x^ - x|^2 over the frames whose actions are known; pixels that change weigh more
    outcome    cross-entropy of "done", "failed" and "will be done" at the last known frame
    inverse    E |a^ - a|^2 from two recorded pictures
    latents    E |decode(encode(w)) - w|^2, where the backbone has an autoencoder to teach

A call covers ``F`` control steps, of which those whose actions are known count, and paints ``P`` pictures of them at
equal distances; the last that counts is at the last known step, wherever that lies.  A picture depends on the actions
before it only, because a call is made for as many actions as are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec
from world_models.backbones.unet import UNetConfig
from world_models.backbones.video_model import Autoencoded, Moves, Seen, VideoModel
from world_models.heads import InverseDynamics, OutcomeHead, PoseMaps
from world_models.image_registration import register
from world_models.robot import Choose, Guessed, Motion, Touch, by_chance, lesson, of_them, surprise
from world_models.types import Aim, Future, Now, at, flagged, floats, normal, some, uniform
from world_models.uncertainty import disagreement


class BackboneConfig(Protocol):
    """The frozen dataclass of one backbone's sizes, which knows its class."""

    def build(self, picture: tuple[int, int, int], memory: int, frames: int, moves: int, maps: int) -> VideoModel: ...


@dataclass(frozen=True)
class WorldConfig:
    """What a call predicts and from what, and what the losses weigh."""

    frames: int = 5  # F: control steps in a call
    pictures: int = 1  # P: painted in a call, at equal distances, the last one at the last known control step
    memory: int = 2  # latest frames seen, F control steps apart; the episode's first is always seen as well
    candidates: int = 3  # for each entry of where the robot will be: freely, stopped, and one more
    steps: int = 2  # denoising steps that paint what is seen then
    maps: int = 16  # learned maps of where in the picture the robot is, now and then
    backbone: UNetConfig = field(default_factory=UNetConfig)
    context_noise: float = 0.1  # highest level of noise in the memory while training: dreams are not clean, either
    changed: float = 9.0  # additional weight of pixels that change
    outcome_weight: float = 1.0
    inverse_weight: float = 0.1
    precision: Literal["float32", "bfloat16"] = "float32"  # of the products; weights and sums stay float32


class WorldModel(nn.Module):
    """Predicts pictures, state and outcome of the next control steps from those before."""

    state_mean: Tensor
    state_std: Tensor
    action_middle: Tensor
    action_reach: Tensor

    def __init__(self, spec: EnvSpec, config: WorldConfig, state_mean: Any = 0.0, state_std: Any = 1.0) -> None:
        """``spec`` of what is imagined; statistics [S] of its state, saved with the weights.

        Raises UserError for pictures that cannot lie at equal distances.
        """
        super().__init__()
        if config.frames % config.pictures:
            raise UserError(
                f"{config.pictures} pictures cannot lie at equal distances in {config.frames} control steps, so a call "
                "would not end with one; choose a divisor."
            )
        self.spec, self.config = spec, config
        self.cameras = tuple(sorted(spec.images))
        height, width, _ = spec.images[self.cameras[0]].shape
        self.picture = (3 * len(self.cameras), height, width)
        size, actions = spec.state.shape[0], spec.action_dim
        for name, value in (("state_mean", state_mean), ("state_std", state_std)):
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float32).expand(size).clone())
        low, high = (torch.as_tensor(bound, dtype=torch.float32).expand(actions) for bound in _bounds(spec))
        self.register_buffer("action_middle", (high + low) / 2, persistent=False)
        self.register_buffer("action_reach", (high - low) / 2, persistent=False)
        frames = config.frames
        told = frames * (actions + 1)
        self.motion = Motion(size, told, frames, config.candidates)
        moves = self.stride * (actions + 1) + 2 * size
        self.video: VideoModel = config.backbone.build(
            self.picture, 1 + config.memory, self.config.pictures, moves, 2 * config.maps
        )
        self.poses = PoseMaps(size, config.maps, self.video.latent)
        sides = self.video.latent[1:]
        self.touch = Touch(len(self.cameras), (height, width), size, told, config.candidates)
        self.outcome = OutcomeHead(self.video.width, sides, size, len(spec.tasks), frames)
        self.inverse = InverseDynamics(self.picture, frames * actions)

    # -- predicting -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, now: Now, actions: Tensor, known: Tensor, noise: Tensor) -> Future:
        """The future under ``actions`` [B,F,D], physical units, of which the first ``known`` [B] (1 to F) count.

        ``noise`` float32 [B,P,c,y,x] is all the randomness there is.
        """
        with self._products():
            return self._predicted(now, self.normalized(actions), known, noise, by_chance)

    def _predicted(self, now: Now, told: Tensor, known: Tensor, noise: Tensor, choose: Choose) -> Future:
        seen, before = self._seen(now.pictures), self.normalize(now.state)
        candidates, odds = self._candidates(now.pictures[:, -1], before, told, known)
        chance = noise[:, 0].flatten(1)[:, : before.shape[1]]
        state = of_them(candidates, choose(candidates, odds, chance))
        moves, noisy, level = self._moves(before, state, told, known), noise, 1.0
        for step in range(self.config.steps):
            guess = self.video(noisy, noisy.new_full(noisy.shape[:2], level), seen, moves)
            following = 1.0 - (step + 1) / self.config.steps
            noisy, level = guess.clean + following / level * (noisy - guess.clean), following
        outcome = self.outcome(guess.features, at(state, known - 1), now.task, known - 1).sigmoid().float()
        pictures = ((self.video.decode(guess.clean) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
        doubt = disagreement(at(candidates.transpose(1, 2), known - 1), odds)
        return Future(pictures, self.state_mean + self.state_std * state, outcome, doubt)

    @torch.no_grad()
    def follow(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The picture uint8 [B,C,h,w] at the end of a whole call in which the robot goes as it did go.

        ``batch``: pictures uint8 [B,1+memory,C,h,w], task [B], state [B,1+F,S] and actions [B,F,D].  Of its candidates
        the model takes the one that came true: what is learnt next happened to no other.
        """
        now = Now(batch["pictures"], batch["state"][:, 0], batch["task"])
        return self._followed(now, batch["actions"], batch["state"][:, 1:], generator).pictures[:, -1]

    def _followed(self, now: Now, actions: Tensor, came: Tensor, generator: torch.Generator) -> Future:
        def choose(candidates: Tensor, odds: Tensor, chance: Tensor) -> Tensor:
            return (candidates - self.normalize(came)[:, None]).square().sum(2).argmin(1)

        noise = normal((len(came), self.config.pictures, *self.video.latent), generator, came)
        known = torch.full((len(came),), self.config.frames, device=came.device)
        with self._products():
            return self._predicted(now, self.normalized(actions), known, noise, choose)

    def _candidates(
        self, picture: Tensor, before: Tensor, told: Tensor, known: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Where the robot may be and the log-odds of that; ``picture`` uint8, the others normalised.  See `Touch`."""
        given = flagged(told, self._flag(known)).flatten(1)
        with torch.no_grad(), torch.autocast(before.device.type, enabled=False):
            candidates, odds = self.motion(before, given)  # learnt by itself
            guess = Guessed.of(candidates, odds, known)
        return guess.candidates, self.touch(floats(picture), before, given, guess, generator)

    @torch.no_grad()
    def slip(self, before: Tensor, after: Tensor, actions: Tensor) -> Tensor:
        """The inverse-dynamics residual [B]: how far ``actions`` [B,F,D] are from what pictures uint8 [B,C,h,w] show.

        Root mean square, in units of half the action range.
        """
        told = self.inverse(floats(before), floats(after))
        return (told - self.normalized(actions).flatten(1)).square().mean(1).sqrt()

    @property
    def device(self) -> torch.device:
        """Where the weights are, and so all that is given and predicted."""
        return self.state_mean.device

    @property
    def stride(self) -> int:
        """Control steps from one painted picture to the next."""
        return self.config.frames // self.config.pictures

    def slot(self, known: Any) -> Any:
        """Which of a call's pictures [B] is at the last of its ``known`` [B] control steps; tensors or arrays."""
        return (known - 1) // self.stride

    def normalize(self, state: Tensor) -> Tensor:
        """``state`` [...,S] with mean 0 and standard deviation 1."""
        return (state - self.state_mean) / self.state_std

    def normalized(self, actions: Tensor) -> Tensor:
        """``actions`` [...,D] in units of the bounds."""
        return (actions - self.action_middle) / self.action_reach

    # -- learning ---------------------------------------------------------------------------------------------------

    def motion_parameters(self) -> dict[str, nn.Parameter]:
        """What :meth:`motion_loss` trains."""
        return {f"motion.{name}": item for name, item in self.motion.named_parameters()}

    def pose_parameters(self) -> dict[str, nn.Parameter]:
        """What :meth:`pose_loss` trains."""
        return {f"poses.{name}": item for name, item in self.poses.named_parameters()}

    def motion_loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """How unexpected the robot's way is to the blind: cheap, so it is learnt first, and from large batches.

        ``batch``: state [B,1+F,S], actions [B,F,D] and count [B], how many of these count.
        """
        flag = self._flag(some(batch["count"], generator))
        state = self.normalize(batch["state"])
        candidates, odds = self.motion(state[:, 0], flagged(self.normalized(batch["actions"]), flag).flatten(1))
        loss = lesson(candidates, odds, state[:, 1:], flag).mean()
        return loss, {"motion": float(loss.detach())}

    @torch.no_grad()
    def unsure(self, batch: Mapping[str, Tensor]) -> Tensor:
        """How much the blind doubt where they will be, [B], at the end of what counts: where a look can tell most.

        ``batch``: as for :meth:`motion_loss`.
        """
        before, known = self.normalize(batch["state"][:, 0]), batch["count"]
        candidates, odds = self.motion(before, flagged(self.normalized(batch["actions"]), self._flag(known)).flatten(1))
        return disagreement(at(candidates.transpose(1, 2), known - 1), odds)

    @torch.no_grad()
    def aim(self, batch: Mapping[str, Tensor]) -> None:
        """Find where to look, unless that is known: ``batch`` as for :meth:`pose_loss`."""
        if self.touch.where.any():
            return  # what was learnt since begins there
        state = self.normalize(batch["state"])
        found = [register(item, state) for item in floats(batch["pictures"]).split(3, 1)]
        self.touch.where.copy_(torch.cat([weight for weight, _ in found]))
        self.touch.middle.copy_(torch.cat([bias for _, bias in found]))

    def touch_parameters(self) -> dict[str, nn.Parameter]:
        """What :meth:`touch_loss` trains."""
        return {f"touch.{name}": item for name, item in self.touch.named_parameters()}

    def touch_loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """How unexpected it is after a look; learnt last, from pictures and dreams of them.

        ``batch``: as for :meth:`motion_loss`, and pictures uint8 [B,C,h,w].
        """
        known, state = some(batch["count"], generator), self.normalize(batch["state"])
        with self._products():
            told = self.normalized(batch["actions"])
            candidates, odds = self._candidates(batch["pictures"], state[:, 0], told, known, generator)
        loss = surprise(candidates, odds, state[:, 1:], self._flag(known)).mean()
        return loss, {"touch": float(loss.detach())}

    def other_parameters(self) -> dict[str, nn.Parameter]:
        """What :meth:`loss` trains: all that is not told where the robot goes."""
        return {name: item for name, item in self.named_parameters() if not name.startswith(("motion.", "touch."))}

    def pose_loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """How much of a picture is not told by the robot's state: learnt first, so that the video model need not.

        ``batch``: state [B,S] and pictures uint8 [B,C,h,w].
        """
        with self._products():
            loss = self.poses.loss(self.normalize(batch["state"]), self.video.encode(floats(batch["pictures"])))
        return loss, {"pose": float(loss.detach())}

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """The loss of ``batch``, windows of two calls as ``trajectories.py`` cuts them, and metrics.

        Half of the rows whose first call is whole are trained on the second one, from what the model itself predicts
        for the first (Huang et al. 2025, arXiv 2506.08009, in one step): that is what it meets in a dream.
        """
        frames = self.config.frames
        now = Now(batch["pictures"][:, : 1 + self.config.memory], batch["state"][:, 0], batch["task"])
        future, count = batch["pictures"][:, 1 + self.config.memory :], batch["count"]
        later = (count > frames) & (uniform(count.shape, generator, count) < 0.5)
        if later.any():
            now = self._dreamt(now, batch, later, generator)
        part = torch.where(later, frames, 0)[:, None] + torch.arange(frames, device=count.device)
        rows = torch.arange(len(count), device=count.device)[:, None]
        left = (count - torch.where(later, frames, 0)).clamp_max(frames)
        known = some(left, generator)
        steps, _ = self._painted_at(known)
        aim = Aim(
            future[rows, part[:, :1] + steps],
            batch["state"][rows, part + 1],
            batch["actions"][rows, part],
            known,
            batch["outcome"][rows[:, 0], part[:, 0] + known - 1],
        )
        with self._products():
            return self._loss(now, aim, generator)

    def _level(self, count: Tensor, generator: torch.Generator) -> Tensor:
        """Levels of noise that sampling meets, one for each of ``count`` [B]."""
        step = torch.randint(0, self.config.steps, count.shape, generator=generator, device=generator.device)
        return 1.0 - step.to(count.device) / self.config.steps

    def _dreamt(self, now: Now, batch: Mapping[str, Tensor], later: Tensor, generator: torch.Generator) -> Now:
        """``now`` with the rows ``later`` moved on by a whole call, by the model itself."""
        rows, frames = later.nonzero()[:, 0], self.config.frames
        first = Now(now.pictures[rows], now.state[rows], now.task[rows])
        with torch.no_grad():
            came = batch["state"][rows, 1 : 1 + frames]
            future = self._followed(first, batch["actions"][rows, :frames], came, generator)
        pictures, state = now.pictures.clone(), now.state.clone()
        pictures[rows] = torch.cat([first.pictures[:, :1], first.pictures[:, 2:], future.pictures[:, -1:]], 1)
        state[rows] = future.state[:, -1]
        return Now(pictures, state, now.task)

    def _loss(self, now: Now, aim: Aim, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        config, count = self.config, len(aim.known)
        told = self.normalized(aim.actions)
        before, wanted = self.normalize(now.state), self.normalize(aim.state)
        clean = self.video.encode(floats(aim.pictures))
        level = self._level(aim.known, generator)
        moves = self._moves(before, wanted, told, aim.known)
        noise = normal(clean.shape, generator, clean)
        share = level[:, None, None, None, None]
        noisy = (1.0 - share) * clean + share * noise
        seen = self._seen(now.pictures, config.context_noise, generator)
        guess = self.video(noisy, level[:, None].expand(count, self.config.pictures), seen, moves)
        error = (guess.clean - clean).square()
        moved = (clean - seen.frames[:, -1:]).abs().amax(2, keepdim=True) > 0.1
        per_frame = ((1.0 + config.changed * moved) * error).mean((2, 3, 4))
        painted = self._painted_at(aim.known)[1].float()
        video = (per_frame * painted).sum() / painted.sum()
        logits = self.outcome(guess.features, at(wanted, aim.known - 1), now.task, aim.known - 1)
        right = nn.functional.binary_cross_entropy_with_logits(logits.float(), aim.outcome, reduction="none")
        outcome = right.mean()
        whole = aim.known == config.frames
        inverse = video.new_zeros(())
        if whole.any():
            shown = self.inverse(floats(now.pictures[whole, -1]), floats(aim.pictures[whole, -1]))
            inverse = (shown - told[whole].flatten(1)).square().mean()
        loss = video + config.outcome_weight * outcome
        loss = loss + config.inverse_weight * inverse
        parts = {"video": video, "outcome": outcome, "inverse": inverse}
        if isinstance(self.video, Autoencoded):
            parts["latents"] = self.video.reconstruction(floats(at(aim.pictures, self.slot(aim.known))))
            loss = loss + parts["latents"]
        return loss, {name: float(part.detach()) for name, part in parts.items()}

    # -- parts ------------------------------------------------------------------------------------------------------

    def _products(self) -> torch.autocast:
        """Where products are made with ``config.precision``."""
        half = self.config.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)

    def _seen(self, pictures: Tensor, noise: float = 0.0, generator: torch.Generator | None = None) -> Seen:
        """What is seen; the reference stays clean, the others get noise of a level up to ``noise`` that is told."""
        frames = self.video.encode(floats(pictures))
        level = torch.zeros(frames.shape[:2], device=frames.device)
        if noise and generator is not None:
            level[:, 1:] = noise * uniform(level[:, 1:].shape, generator, level)
            share = level[..., None, None, None]
            frames = (1.0 - share) * frames + share * normal(frames.shape, generator, frames)
        return Seen(frames, level)

    def _moves(self, before: Tensor, state: Tensor, actions: Tensor, known: Tensor) -> Moves:
        """What the backbone is told: the normalised state [B,S], where it leads [B,F,S], and the known actions."""
        steps, counts = self._painted_at(known)
        rows = torch.arange(len(known), device=known.device)[:, None]
        sure = state[rows, steps] * counts[..., None]  # later ones mean nothing
        told = flagged(actions, self._flag(known)).unflatten(1, (self.config.pictures, -1)).flatten(2)
        vector = torch.cat([told, sure, before[:, None].expand_as(sure)], -1)
        then = self.poses(sure.flatten(0, 1)).unflatten(0, sure.shape[:2])
        now = self.poses(before)[:, None]
        return Moves(vector, torch.cat([then * counts[..., None, None, None], now.expand_as(then)], 2))

    def _flag(self, known: Tensor) -> Tensor:
        """1.0 for the ``known`` [B] control steps of a call, [B,F]."""
        return (torch.arange(self.config.frames, device=known.device) < known[:, None]).float()

    def _painted_at(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """At which control step of a call, from 0, each picture [B,P] is, and whether it counts."""
        first = torch.arange(0, self.config.frames, self.stride, device=known.device)
        return torch.minimum(first + self.stride, known[:, None]) - 1, first < known[:, None]


def _bounds(spec: EnvSpec) -> tuple[Any, Any]:
    return spec.action.low, spec.action.high
