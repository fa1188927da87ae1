"""Length, ends and noise of imagined rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field

from world_models.payment import Payment, SuccessReward


@dataclass(frozen=True)
class ImaginationConfig:
    """Length, ends and noise of imagined rollouts.

    A success that lasts, like that of a cube in the air, may be read at the end of each call.  One that ends episodes
    as soon as it is there was never recorded a few control steps later, and is missed so: look at every control step
    (``outcome_every=1``), which takes three times as long.
    """

    horizon: int = 25  # control steps at most from where it begins; a rollout that gets there is truncated
    longest: int = 0  # a renewed environment's horizon may become so long; snapshots fit every horizon up to it
    deadline: int | None = None  # control steps of the episode after which it has failed unless it is finished
    keyframe_share: float = 0.0  # of the rollouts begin at a keyframe, whose episode's clock goes on
    success_threshold: float = 0.5  # predicted probability from which on the task counts as done
    failure_threshold: float = 0.5  # and as failed
    batch_size: int = 16  # environments predicted together
    noise_seed: int = 0  # chooses other noise for the same seeds
    outcome_every: int = 0  # control steps between looks at the outcome inside a call; 0: it is read at its end alone
    mid_call_steps: int = 1  # of denoising, for pictures that no call goes on from; 0: as for the others
    resamples: int = 0  # how often a success is predicted again with other noise before it counts
    reward: Payment = field(default_factory=SuccessReward)  # or PredictedReward, of a model with a head for rewards

    @property
    def reach(self) -> int:
        """The longest horizon of an environment with these numbers, whatever it is renewed with."""
        return max(self.horizon, self.longest)
