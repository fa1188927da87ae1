"""A Gymnasium environment that is only seen: catch a falling ball (the Catch of bsuite, Osband et al. 2020).

``gymnasium.make("sims.catch:vla_rl/Catch-v0")``
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

_CELLS, _PIXELS = 10, 2  # cells a side; pixels per cell and side


class CatchEnv(gymnasium.Env[np.ndarray, np.int64]):
    """A ball falls by a cell a step from a random column; a paddle in the lowest row moves left, stays or moves right.

    observation  uint8 [20,20,1], white ball and paddle on black
    action       0 left, 1 stay, 2 right

    The episode terminates after 9 steps, when the ball is in the lowest row: reward 1 if the paddle is there, else -1.
    The best policy always catches it: from the middle, every column is at most 5 moves away.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # as Gymnasium declares it
    observation_space = Box(0, 255, (_CELLS * _PIXELS, _CELLS * _PIXELS, 1), np.uint8)
    action_space = Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._row, self._ball, self._paddle = 0, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._row, self._ball, self._paddle = 0, int(self.np_random.integers(_CELLS)), _CELLS // 2
        return self._picture(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._row += 1
        self._paddle = min(max(self._paddle + int(action) - 1, 0), _CELLS - 1)
        landed = self._row == _CELLS - 1
        reward = (1.0 if self._ball == self._paddle else -1.0) if landed else 0.0
        return self._picture(), reward, landed, False, {}

    def render(self) -> Any:
        """uint8 [20,20,3]."""
        return np.repeat(self._picture(), 3, axis=2)

    def _picture(self) -> np.ndarray:
        board = np.zeros((_CELLS, _CELLS), np.uint8)
        board[self._row, self._ball] = board[-1, self._paddle] = 255
        return board.repeat(_PIXELS, 0).repeat(_PIXELS, 1)[..., None]


gymnasium.register("vla_rl/Catch-v0", f"{__name__}:CatchEnv", max_episode_steps=_CELLS)
