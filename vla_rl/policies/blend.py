"""How much of a correction is executed while exploring, and how large it may be: little at first, everything later.

    corrected with probability  p = start + (1 - start) min(n / H, 1),    |u| <= g = size + (1 - size) min(n / H, 1)

``n`` counts the decisions since the actor was released.  Of steps, this is Policy Decorator's schedule (Yuan et al.
2024, arXiv 2412.13630), whose probability starts at 0 and whose scale is constant; of episodes, whoever compares them
knows what the correction is worth beside the base.  ``delay`` is PLD's (Xiao et al. 2025, arXiv 2511.00091): the base
alone plays a random number of an episode's first steps, so that the correction meets states from all of it.  What is
not corrected has no exploration noise either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla_rl.contract.limits import check_limits
from vla_rl.contract.policy import State
from vla_rl.policies.noise import Generators, uniform


@dataclass(frozen=True)
class BlendConfig:
    """Schedule of the correction while collecting.  Raises UserError for shares outside [0, 1]."""

    decisions: int = 20_000  # H: of the free actor, until the correction is whole
    start: float = 0.0  # probability of the correction at first
    per: Literal["step", "episode"] = "step"  # what the probability is of: a decision, or a whole episode
    size: float = 1.0  # largest |u| at first, deployed too
    delay: float = 0.0  # of the time limit: the base alone plays up to this share of an episode, uniformly drawn

    def __post_init__(self) -> None:
        check_limits(self, decisions=(1, math.inf), start=(0, 1), size=(0, 1), delay=(0, 1))

    def grown(self, first: float, released: int) -> float:
        """A share that starts at ``first`` and is 1 after ``decisions`` released ones."""
        return first + (1.0 - first) * min(released / self.decisions, 1.0)


class Blend:
    """Draws where the correction acts; its state is the policy's: ``blend_*``, one entry an environment."""

    def __init__(self, config: BlendConfig, time_limit: int, horizon: int = 1) -> None:
        """``time_limit`` of an episode in control steps, of which a decision takes ``horizon``."""
        self.config, self.time_limit, self.horizon = config, time_limit, horizon

    def initial_state(self, num_envs: int, device: torch.device) -> State:
        """Steps so far, the step at which the correction may begin (-1: not drawn), whether the episode is its."""
        steps = torch.zeros(num_envs, dtype=torch.long, device=device)
        return {"blend_steps": steps, "blend_begin": steps - 1, "blend_mine": torch.zeros_like(steps, dtype=torch.bool)}

    def reset_state(self, state: State, env_ids: Tensor) -> State:
        """New episodes in ``env_ids`` [R]."""
        steps, begin = state["blend_steps"].clone(), state["blend_begin"].clone()
        steps[env_ids], begin[env_ids] = 0, -1
        return {**state, "blend_steps": steps, "blend_begin": begin}

    def draw(self, state: State, probability: float, generator: Generators) -> tuple[Tensor, State]:
        """Where the correction acts in this step, bool [E], and the state after it.

        Three numbers are drawn for every environment and step, used or not: an episode then draws the same whatever
        happens beside it.
        """
        steps, begin, mine = state["blend_steps"], state["blend_begin"], state["blend_mine"]
        drawn = uniform((len(steps), 3), generator, like=torch.empty(0, device=steps.device))
        new = begin < 0
        waits = drawn[:, 0] * (self.config.delay * self.time_limit)
        begin = torch.where(new, waits.long(), begin)
        mine = torch.where(new, drawn[:, 1] < probability, mine)
        acts = mine if self.config.per == "episode" else drawn[:, 2] < probability
        after = {**state, "blend_steps": steps + self.horizon, "blend_begin": begin, "blend_mine": mine}
        return acts & (steps >= begin), after
