"""How a vision-language-action checkpoint is opened: its cameras, what it executes, what is trained and kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from vla_rl.contract.config import check_choice, check_limits
from vla_rl.policies.flow import AllSteps, FlowSampler
from vla_rl.policies.flow_schedules import Ode
from vla_rl.policies.vla.inference import Eager, Inference
from vla_rl.policies.vla.trainable import TrainExpert, Trains

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class VLAOptions:
    """Choices that a public checkpoint leaves to whoever opens it; a checkpoint of ours holds them.

    What is trained is stored in float32 in any case, or an optimizer's small steps would be lost.

    Raises UserError for a choice that does not exist.
    """

    cameras: Mapping[str, str] = field(default_factory=dict)  # checkpoint's camera: environment's; {}: equal names
    horizon: int = 0  # H, actions executed of a chunk; 0: the checkpoint's, at most the environment's longest chunk
    statistics: str = ""  # a folder or file with the statistics of state and action; "": the checkpoint's own
    statistics_key: str = ""  # the dataset or robot among several in there
    sampler: FlowSampler = FlowSampler(Ode(), AllSteps(), steps=10)  # this one: as many steps as the folder says
    trains: Trains = TrainExpert()
    kept: str = "auto"  # of an observation, for learning: "prefix", "pictures", or the one that features.py says
    inference: Inference = Eager()  # how the network runs when it acts: or Compiled(), CudaGraph()
    dtype: str = "float32"  # that layers compute in, and what is frozen is stored in: or "bfloat16"; see below
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: less memory, more time

    def __post_init__(self) -> None:
        check_limits(self, horizon=(0, math.inf))
        check_choice(self, "kept", "auto", "prefix", "pictures")
        check_choice(self, "dtype", *_DTYPES)

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch names it."""
        return _DTYPES[self.dtype]
