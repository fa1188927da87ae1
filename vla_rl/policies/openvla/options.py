"""How an OpenVLA is opened: beside what every vision-language-action model has, how its tokens are made."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vla_rl.contract.config import check_positive
from vla_rl.policies.likelihood_parts import LogprobPer, check_logprob_per
from vla_rl.policies.openvla.decoding import Autoregressive, Decoding
from vla_rl.policies.vla.options import VLAOptions


@dataclass(frozen=True)
class OpenVLAOptions(VLAOptions):
    """Choices that an OpenVLA checkpoint leaves to whoever opens it; ``sampler`` is not read.

    Raises UserError for a choice that does not exist.
    """

    decoding: Decoding = Autoregressive()  # or Parallel(): OpenVLA-OFT
    temperature: float = 1.0  # of exploration and of its likelihood alike; SimpleVLA-RL: 1.6
    logprob_per: LogprobPer = "chunk"  # or "action", "token": what has a ratio of its own in PPO and GRPO
    crop: float = 1.0  # the share of a picture's area that is seen; .9 for checkpoints fine-tuned with random crops
    # The environment's last entry where the gripper is closed and open; 0 and 1 in OpenVLA's data.
    gripper: tuple[float, float] = (0.0, 1.0)  # LIBERO: (1, -1), ManiSkill: (-1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature", "crop")
        check_logprob_per(self)


def own_options(options: VLAOptions | None) -> OpenVLAOptions:
    """``options`` with the defaults of what only an OpenVLA has."""
    if isinstance(options, OpenVLAOptions):
        return options
    shared = {} if options is None else {item.name: getattr(options, item.name) for item in fields(options)}
    return OpenVLAOptions(**shared)
