"""A world model: robot state dynamics, video prediction, outcome, uncertainty and inverse dynamics in one module.

The robot's state dynamics are trained separately (``robot.py``); the rest has one loss, given the robot's true states:

    video     E w |x^ - x|^2 over the frames whose actions are known; pixels that change weigh more
    outcome   cross-entropy of "done", "failed" and "will be done" at the last known action
    inverse   E |a^ - a|^2 from two recorded pictures
    reward    E |r^ - r|^2 of the known actions, normalised, for a model that has a head for rewards
    latents   E |decode(encode(w)) - w|^2, for a backbone that has an autoencoder to train

A call predicts ``F`` control steps, of which those with a known action count, as ``P`` pictures at equal distances; the
last picture that counts is at the last known action.  A picture depends only on the actions before it, because a call
is made for as many actions as are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from vla_rl.contract.env import EnvSpec
from world_models.backbones import ActionInput, ContextLatents, VideoModel
from world_models.canvas import Canvas
from world_models.config import WorldModelConfig
from world_models.heads import InverseDynamics, OutcomeHead, PoseMaps, RewardHead
from world_models.robot import (
    ModePrediction,
    ModeSelector,
    RobotPosition,
    StateDynamics,
    disagreement,
    mixture_nll,
    mode_classifier,
    sample_modes,
    select_modes,
    training_nll,
)
from world_models.types import (
    Context,
    Future,
    Target,
    mask_actions,
    normal,
    random_known,
    select_step,
    state_entries,
    to_unit_range,
    uniform,
)

Parameters: TypeAlias = dict[str, nn.Parameter]


class WorldModel(nn.Module):
    """Predicts pictures, state and outcome of the next control steps from those before."""

    state_mean: Tensor
    state_std: Tensor
    action_middle: Tensor
    action_reach: Tensor

    def __init__(self, spec: EnvSpec, config: WorldModelConfig, state_mean: Any = 0.0, state_std: Any = 1.0) -> None:
        """``spec`` of what is imagined; statistics [S] of its state, saved with the weights.

        Raises UserError for what :meth:`WorldModelConfig.check` and :meth:`Canvas.of` refuse.
        """
        super().__init__()
        config.check()
        self.spec, self.config = spec, config
        self.canvas = Canvas.of(spec, config.resolution, config.backbone.multiple)
        self.cameras, self.picture = tuple(self.canvas.cameras), self.canvas.shape
        self.call = CallSteps(config.frames, config.pictures)
        size, actions, frames = state_entries(spec), spec.action_dim, config.frames
        for name, value in (("state_mean", state_mean), ("state_std", state_std)):
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float32).expand(size).clone())
        low, high = (
            torch.as_tensor(bound, dtype=torch.float32).expand(actions) for bound in (spec.action.low, spec.action.high)
        )
        self.register_buffer("action_middle", (high + low) / 2, persistent=False)
        self.register_buffer("action_reach", (high - low) / 2, persistent=False)
        action_input = frames * (actions + 1)
        self.state_dynamics = StateDynamics(size, action_input, frames, config.modes)
        per_picture = self.call.stride * (actions + 1) + 2 * size
        self.video: VideoModel = config.backbone.build(
            self.picture, config.conditioning_frames, self.config.pictures, per_picture, 2 * config.pose_maps
        )
        self.poses = PoseMaps(size, config.pose_maps, self.video.latent)
        sides = self.video.latent[1:]
        self.robot_position = RobotPosition(len(self.cameras), size)
        classified = (len(self.cameras), self.canvas.sides, size, action_input, config.modes)
        self.mode_classifier = mode_classifier(*classified, config.robot_crop)
        self.outcome = OutcomeHead(self.video.width, sides, size, len(spec.tasks), frames)
        self.inverse = InverseDynamics(self.picture, frames * actions)
        read = (self.video.width, sides, size, actions, len(spec.tasks), frames)
        self.reward = None if config.reward is None else RewardHead(*read, config.reward)

    # -- predicting -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, context: Context, actions: Tensor, known: Tensor, noise: Tensor, steps: int = 0) -> Future:
        """The future under ``actions`` [B,F,D], physical units, of which the first ``known`` [B] (1 to F) count.

        ``noise`` float32 [B,P,c,y,x] is the only source of randomness.  ``steps`` of denoising, 0: as configured; one
        shows the mean of what may be there, which is enough for pictures that no call and no outcome goes on from.
        """
        with self._autocast():
            steps = steps or self.config.denoising_steps
            return self._predict(context, self.normalize_actions(actions), known, noise, sample_modes, steps)

    def _predict(
        self, context: Context, actions: Tensor, known: Tensor, noise: Tensor, selector: ModeSelector, steps: int
    ) -> Future:
        """``actions`` are normalised; ``selector`` chooses the robot's mode."""
        before = self.normalize(context.state)
        modes, log_probs = self._modes(context.pictures[:, -1], before, actions, known)
        state = select_modes(modes, selector(modes, log_probs, noise[:, 0].flatten(1)[:, : before.shape[1]]))
        latents = self._context_latents(context.pictures, before, self.call.at_pictures(state, known))
        action_input, noisy, level = self._action_input(before, state, actions, known), noise, 1.0
        estimates: list[Tensor] = []
        for step in range(steps):
            denoised = self.video(noisy, noisy.new_full(noisy.shape[:2], level), latents, action_input)
            next_level = 1.0 - (step + 1) / steps
            noisy, level = denoised.clean + next_level / level * (noisy - denoised.clean), next_level
            estimates.append(select_step(denoised.clean, self.call.slot(known)))
        end = select_step(state, known - 1)
        outcome = self.outcome(denoised.features, end, context.task, known - 1).sigmoid().float()
        reward = None
        if self.reward is not None:
            reward = self.reward.predict(denoised.features, (before, state, actions), context.task, known)
        pictures = ((self.video.decode(denoised.clean) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
        if self.config.uncertainty == "pictures":
            uncertainty = revision(estimates[0], estimates[-1])
        else:
            uncertainty = disagreement(select_step(modes.transpose(1, 2), known - 1), log_probs)
        return Future(pictures, self.state_mean + self.state_std * state, outcome, uncertainty, reward)

    @torch.no_grad()
    def predict_along(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The picture uint8 [B,C,h,w] at the end of a whole call in which the robot moves as it was recorded.

        ``batch``: pictures uint8 [B,1+context_frames,C,h,w], task [B], state [B,1+F,S] and actions [B,F,D].  The mode
        nearest to the recorded states is taken, since the pictures that follow were recorded with no other.
        """
        context = Context(batch["pictures"], batch["state"][:, 0], batch["task"])
        return self._predict_recorded(context, batch["actions"], batch["state"][:, 1:], generator).pictures[:, -1]

    def _predict_recorded(
        self, context: Context, actions: Tensor, recorded: Tensor, generator: torch.Generator
    ) -> Future:
        """The future whose modes are nearest to the ``recorded`` states [B,F,S]."""

        def nearest(modes: Tensor, log_probs: Tensor, noise: Tensor) -> Tensor:
            return (modes - self.normalize(recorded)[:, None]).square().sum(2).argmin(1)

        noise = normal((len(recorded), self.config.pictures, *self.video.latent), generator, recorded)
        known = torch.full((len(recorded),), self.config.frames, device=recorded.device)
        with self._autocast():
            actions, steps = self.normalize_actions(actions), self.config.denoising_steps
            return self._predict(context, actions, known, noise, nearest, steps)

    def _modes(
        self, picture: Tensor, before: Tensor, actions: Tensor, known: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Modes [B,K,F,S] of the robot's states and their log-probabilities [B,K,S].

        ``picture`` is uint8, the others are normalised; for ``generator`` see :class:`ModeClassifier`.
        """
        action_input = mask_actions(actions, self.call.flag(known)).flatten(1)
        with torch.no_grad(), torch.autocast(before.device.type, enabled=False):
            modes, log_probs = self.state_dynamics(before, action_input)  # trained separately
            prediction = ModePrediction.of(modes, log_probs, known)
        seen = to_unit_range(picture), self.robot_position(prediction.expected_end)
        return modes, self.mode_classifier(*seen, before, action_input, prediction, generator)

    @torch.no_grad()
    def inverse_dynamics_error(self, before: Tensor, after: Tensor, actions: Tensor) -> Tensor:
        """[B]: root mean square error of ``actions`` [B,F,D] as estimated from two pictures uint8 [B,C,h,w].

        In units of half the action range.
        """
        estimate = self.inverse(to_unit_range(before), to_unit_range(after))
        return (estimate - self.normalize_actions(actions).flatten(1)).square().mean(1).sqrt()

    @property
    def device(self) -> torch.device:
        """The device of the weights, inputs and predictions."""
        return self.state_mean.device

    def normalize(self, state: Tensor) -> Tensor:
        """``state`` [...,S] with mean 0 and standard deviation 1."""
        return (state - self.state_mean) / self.state_std

    def normalize_actions(self, actions: Tensor) -> Tensor:
        """``actions`` [...,D], -1 at the lower bound and 1 at the upper one."""
        return (actions - self.action_middle) / self.action_reach

    # -- training ---------------------------------------------------------------------------------------------------

    def parameters_of(self, part: Literal["state_dynamics", "poses", "mode_classifier", "video"]) -> Parameters:
        """What the loss of ``part`` trains; that of the video model all but the two networks of ``robot.py``."""
        apart, video = ("state_dynamics.", "mode_classifier."), part == "video"
        wanted = {name: item for name, item in self.named_parameters() if video or name.startswith(f"{part}.")}
        return {name: item for name, item in wanted.items() if not video or not name.startswith(apart)}

    def state_dynamics_loss(
        self, batch: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[Tensor, dict[str, float]]:
        """Negative log-likelihood of the recorded states under the modes; cheap, so large batches are possible.

        ``batch``: state [B,1+F,S], actions [B,F,D] and count [B], how many of these were recorded.
        """
        flag = self.call.flag(random_known(batch["count"], generator))
        state = self.normalize(batch["state"])
        action_input = mask_actions(self.normalize_actions(batch["actions"]), flag).flatten(1)
        modes, log_probs = self.state_dynamics(state[:, 0], action_input)
        loss = training_nll(modes, log_probs, state[:, 1:], flag).mean()
        return loss, {"state_dynamics": float(loss.detach())}

    @torch.no_grad()
    def mode_uncertainty(self, batch: Mapping[str, Tensor]) -> Tensor:
        """[B]: spread of the modes, without the picture, at the last recorded action: where a crop tells most.

        ``batch``: as for :meth:`state_dynamics_loss`.
        """
        before, known = self.normalize(batch["state"][:, 0]), batch["count"]
        action_input = mask_actions(self.normalize_actions(batch["actions"]), self.call.flag(known)).flatten(1)
        modes, log_probs = self.state_dynamics(before, action_input)
        return disagreement(select_step(modes.transpose(1, 2), known - 1), log_probs)

    @torch.no_grad()
    def fit_registration(self, batch: Mapping[str, Tensor]) -> None:
        """Find the robot in the pictures, once, where the prior is assumed; ``batch`` as for :meth:`pose_loss`."""
        if not self.config.robot_crop:
            return
        self.robot_position.fit(to_unit_range(batch["pictures"]), self.normalize(batch["state"]))

    def mode_classifier_loss(
        self, batch: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[Tensor, dict[str, float]]:
        """Negative log-likelihood of the recorded states with the picture; trained last, half on imagined pictures.

        ``batch``: as for :meth:`state_dynamics_loss`, and pictures uint8 [B,C,h,w].
        """
        known, state = random_known(batch["count"], generator), self.normalize(batch["state"])
        with self._autocast():
            actions = self.normalize_actions(batch["actions"])
            modes, log_probs = self._modes(batch["pictures"], state[:, 0], actions, known, generator)
        loss = mixture_nll(modes, log_probs, state[:, 1:], self.call.flag(known)).mean()
        return loss, {"mode_classifier": float(loss.detach())}

    def pose_loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Error of pictures predicted from the robot's state alone, which gives the video model a start.

        ``batch``: state [B,S] and pictures uint8 [B,C,h,w].
        """
        with self._autocast():
            latents = self.video.encode(to_unit_range(batch["pictures"]))
            loss = self.poses.loss(self.normalize(batch["state"]), latents)
        return loss, {"pose": float(loss.detach())}

    def loss(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """The loss of ``batch``, windows of two calls as ``trajectories.py`` cuts them, and metrics.

        Half of the windows whose first call is whole are trained on the second one, from the model's own prediction of
        the first (Huang et al. 2025, arXiv 2506.08009, in one step): that is its input in an imagined rollout.
        """
        frames, split = self.config.frames, 1 + self.config.context_frames
        context = Context(batch["pictures"][:, :split], batch["state"][:, 0], batch["task"])
        future, count = batch["pictures"][:, split:], batch["count"]
        later = (count > frames) & (uniform(count.shape, generator, count) < 0.5)
        if later.any():
            context = self._imagined_context(context, batch, later, generator)
        steps = torch.where(later, frames, 0)[:, None] + torch.arange(frames, device=count.device)
        windows = torch.arange(len(count), device=count.device)[:, None]
        known = random_known((count - torch.where(later, frames, 0)).clamp_max(frames), generator)
        pictured, _ = self.call.pictured(known)
        target = Target(
            future[windows, steps[:, :1] + pictured],
            batch["state"][windows, steps + 1],
            batch["actions"][windows, steps],
            known,
            batch["outcome"][windows[:, 0], steps[:, 0] + known - 1],
            None if self.reward is None else batch["reward"][windows, steps],
        )
        with self._autocast():
            return self._loss(context, target, generator)

    def _noise_level(self, count: Tensor, generator: torch.Generator) -> Tensor:
        """[B]: noise levels that sampling meets, one for each of ``count`` [B]."""
        steps = self.config.denoising_steps
        step = torch.randint(0, steps, count.shape, generator=generator, device=generator.device)
        return 1.0 - step.to(count.device) / steps

    def _imagined_context(
        self, context: Context, batch: Mapping[str, Tensor], later: Tensor, generator: torch.Generator
    ) -> Context:
        """``context``, where ``later`` [B] is true as the model itself predicts it one call later."""
        index, frames = later.nonzero()[:, 0], self.config.frames
        first = Context(context.pictures[index], context.state[index], context.task[index])
        with torch.no_grad():
            recorded = batch["state"][index, 1 : 1 + frames]
            future = self._predict_recorded(first, batch["actions"][index, :frames], recorded, generator)
        pictures, state = context.pictures.clone(), context.state.clone()
        pictures[index] = torch.cat([first.pictures[:, :1], first.pictures[:, 2:], future.pictures[:, -1:]], 1)
        state[index] = future.state[:, -1]
        return Context(pictures, state, context.task)

    def _loss(self, context: Context, target: Target, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        config, count = self.config, len(target.known)
        actions = self.normalize_actions(target.actions)
        before, states = self.normalize(context.state), self.normalize(target.state)
        clean = self.video.encode(to_unit_range(target.pictures))
        level = self._noise_level(target.known, generator)
        action_input = self._action_input(before, states, actions, target.known)
        noise = normal(clean.shape, generator, clean)
        share = level[:, None, None, None, None]
        noisy = (1.0 - share) * clean + share * noise
        after = self.call.at_pictures(states, target.known)
        latents = self._context_latents(context.pictures, before, after, generator)
        denoised = self.video(noisy, level[:, None].expand(count, self.config.pictures), latents, action_input)
        error = (denoised.clean - clean).square()
        moved = (clean - latents.frames[:, -1:]).abs().amax(2, keepdim=True) > 0.1
        per_frame = ((1.0 + config.change_weight * moved) * error).mean((2, 3, 4))
        counts = self.call.pictured(target.known)[1].float()
        video = (per_frame * counts).sum() / counts.sum()
        end = select_step(states, target.known - 1)
        logits = self.outcome(denoised.features, end, context.task, target.known - 1)
        outcome = nn.functional.binary_cross_entropy_with_logits(logits.float(), target.outcome)
        inverse = self._inverse_loss(context, target, actions)
        loss = video + config.outcome_weight * outcome + config.inverse_weight * inverse
        parts = {"video": video, "outcome": outcome, "inverse": inverse}
        if self.reward is not None and target.reward is not None:
            call = denoised.features, (before, states, actions), context.task, target.known
            parts["reward"] = self.reward.loss(*call, target.reward)
            loss = loss + self.reward.weight * parts["reward"]
        last = select_step(target.pictures, self.call.slot(target.known))
        latent_error = self.video.reconstruction(to_unit_range(last))
        if latent_error is not None:
            parts["latents"] = latent_error
            loss = loss + latent_error
        return loss, {name: float(part.detach()) for name, part in parts.items()}

    def _inverse_loss(self, context: Context, target: Target, actions: Tensor) -> Tensor:
        """Squared error of the estimated ``actions`` [B,F,D] of whole calls; 0 without any."""
        whole = target.known == self.config.frames
        if not whole.any():
            return actions.new_zeros(())
        before, after = to_unit_range(context.pictures[whole, -1]), to_unit_range(target.pictures[whole, -1])
        return (self.inverse(before, after) - actions[whole].flatten(1)).square().mean()

    # -- inputs of the video model ----------------------------------------------------------------------------------

    def _autocast(self) -> torch.autocast:
        """Matrix products with ``config.precision``."""
        half = self.config.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)

    def _context_latents(
        self, pictures: Tensor, before: Tensor, after: Tensor, generator: torch.Generator | None = None
    ) -> ContextLatents:
        """Latents of context ``pictures`` for a robot that goes from state ``before`` [B,S] to ``after`` [B,P,S].

        With the prior, the latest picture moved as the robot moves follows the first one.  In training a ``generator``
        is given: all but the first get noise of a random level.
        """
        seen = to_unit_range(pictures)
        if self.config.robot_crop:
            moved = self.robot_position.moved(seen[:, -1], before, after)
            seen = torch.cat([seen[:, :1], moved, seen[:, 1:]], 1)
        frames = self.video.encode(seen)
        level = torch.zeros(frames.shape[:2], device=frames.device)
        if generator is not None:
            level[:, 1:] = self.config.context_noise * uniform(level[:, 1:].shape, generator, level)
            share = level[..., None, None, None]
            frames = (1.0 - share) * frames + share * normal(frames.shape, generator, frames)
        return ContextLatents(frames, level)

    def _action_input(self, before: Tensor, state: Tensor, actions: Tensor, known: Tensor) -> ActionInput:
        """Input for each picture: the normalised state [B,S], the states to come [B,F,S] and the known actions."""
        counts = self.call.pictured(known)[1]
        after = self.call.at_pictures(state, known) * counts[..., None]  # later ones mean nothing
        masked = mask_actions(actions, self.call.flag(known)).unflatten(1, (self.config.pictures, -1)).flatten(2)
        vector = torch.cat([masked, after, before[:, None].expand_as(after)], -1)
        next_maps = self.poses(after.flatten(0, 1)).unflatten(0, after.shape[:2])
        maps = self.poses(before)[:, None]
        return ActionInput(vector, torch.cat([next_maps * counts[..., None, None, None], maps.expand_as(next_maps)], 2))


@dataclass(frozen=True)
class CallSteps:
    """A call of ``frames`` F control steps with ``pictures`` P at equal distances.

    Of its actions the first ``known`` [B] count, 1 to F.
    """

    frames: int
    pictures: int

    @property
    def stride(self) -> int:
        """Control steps from one picture to the next."""
        return self.frames // self.pictures

    def slot(self, known: Any) -> Any:
        """Index [B] of the picture at the last known action; tensors or arrays."""
        return (known - 1) // self.stride

    def flag(self, known: Tensor) -> Tensor:
        """[B,F]: 1.0 for the known control steps."""
        return (torch.arange(self.frames, device=known.device) < known[:, None]).float()

    def pictured(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """Each picture's control step from 0 [B,P], at most the last known one; and whether the picture counts."""
        first = torch.arange(0, self.frames, self.stride, device=known.device)
        return torch.minimum(first + self.stride, known[:, None]) - 1, first < known[:, None]

    def at_pictures(self, state: Tensor, known: Tensor) -> Tensor:
        """[B,P,S]: which of the states [B,F,S] the robot is in at each picture."""
        index = torch.arange(len(known), device=known.device)[:, None]
        return state[index, self.pictured(known)[0]]


def revision(first: Tensor, last: Tensor) -> Tensor:
    """[B]: root mean square difference of two estimates [B,c,y,x] of the same latents."""
    return (last - first).float().square().mean((1, 2, 3)).sqrt()
