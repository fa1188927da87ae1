"""Small policies with LeRobot's interface and memories of all kinds; as a program, a process that runs one of them.

``python -m tests.policies.lerobot.small`` answers as LeRobot's process does, for a folder whose config.json says which.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.contract.child import serve_owner
from vla_rl.policies.lerobot.worker import Loaded, PolicyServer

STATE = "observation.state"


class Queued(nn.Module):
    """Reads the last two observations, draws noise, and keeps a queue of four actions, as diffusion policies do."""

    n_obs_steps = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()
        self.gain = nn.Parameter(torch.tensor(0.1))
        self.reset()

    def reset(self) -> None:
        self._queues = {STATE: deque(maxlen=2), "action": deque(maxlen=4)}

    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        seen, actions = self._queues[STATE], self._queues["action"]
        while len(seen) < 2:
            seen.append(batch[STATE])
        seen.append(batch[STATE])
        if not actions:
            both = self.layer(torch.stack([*seen], 1))  # [B,2,S]
            noise = torch.randn((len(both), 4, both.shape[2]))
            actions.extend((self.gain * (noise - both[:, :1] + 0.5 * both[:, 1:])).transpose(0, 1))
        return actions.popleft()


class Chunked(Queued):
    """Reads the last observation only, and draws nothing: as ACT and most vision-language-action models."""

    n_obs_steps = 1

    def reset(self) -> None:
        self._action_queue: deque[Tensor] = deque(maxlen=4)

    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        if not self._action_queue:
            state = self.layer(batch[STATE])
            self._action_queue.extend(-self.gain * (i + 1) * state for i in range(4))
        return self._action_queue.popleft()


class Average:
    """Sums in place over the last plans, with counts that all environments share, as ACT's ensemble."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total: Tensor | None = None
        self.count: Tensor | None = None

    def update(self, plan: Tensor) -> Tensor:
        if self.total is None or self.count is None:
            self.total, self.count = plan.clone(), torch.ones(plan.shape[1], 1)
        else:
            self.total += plan[:, : self.total.shape[1]]
            self.count += 1
        first, self.total = (self.total / self.count)[:, 0], self.total[:, [1, 2, 2]]
        return first


class Ensembled(Chunked):
    """An average that is an object of its own."""

    def __init__(self) -> None:
        self.average = Average()
        super().__init__()

    def reset(self) -> None:
        self.average.reset()

    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        state = self.layer(batch[STATE])
        return self.average.update(torch.stack([-self.gain * (i + 1) * state for i in range(3)], 1))


class Planned(Chunked):
    """The last plan [H,B,D], whose second axis is the batch, as in TD-MPC."""

    def reset(self) -> None:
        self._plan: Tensor | None = None

    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        wanted = -self.gain * self.layer(batch[STATE]).expand(3, *batch[STATE].shape)
        self._plan = wanted if self._plan is None else 0.5 * (wanted + self._plan.roll(-1, 0))
        return self._plan[0]


class Remembering(nn.Module):
    """A network that keeps something itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, state: Tensor) -> Tensor:
        self.last = state if self.last is None else 0.5 * (state + self.last)
        return self.last


class Hidden(Chunked):
    """What it keeps is inside a network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Remembering()

    def reset(self) -> None:
        super().reset()
        if isinstance(self.layer, Remembering):
            self.layer.last = None


KINDS = {kind.__name__: kind for kind in (Queued, Chunked, Ensembled, Planned, Hidden)}


def loaded(kind: str, inputs: Any = None, size: int = 2) -> Loaded:
    """The policy ``kind`` of ``size`` actions behind the processors "multiply by 2" and "halve"."""
    inputs = inputs or {STATE: {"type": "STATE", "shape": [size]}}
    described = {
        "type": kind.lower(),
        "n_obs_steps": KINDS[kind].n_obs_steps,
        "inputs": inputs,
        "outputs": {"action": {"type": "ACTION", "shape": [size]}},
    }
    return Loaded(KINDS[kind](), lambda batch: {**batch, STATE: 2 * batch[STATE]}, lambda action: action / 2, described)


def load(folder: str) -> Loaded:
    """What config.json of ``folder`` says."""
    config = json.loads(Path(folder, "config.json").read_text())
    return loaded(config["type"], config.get("inputs"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve_owner("policy", PolicyServer(load).answer)
