"""Filling a replay buffer: whole columns at once against one episode at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.benchmarks.measure import Contender, Row, interleave, time_row
from vla_rl.contract.batch import Rollout
from vla_rl.experience.replay import Replay

GAMMA = 0.99


def replay_add(quick: bool = False) -> list[Row]:
    """One rollout of 12,288 decisions into a replay buffer, against a loop over its episodes and columns."""
    decisions, num_envs, repeats = (6, 4, 1) if quick else (96, 128, 5)
    rollout = _rollout(decisions, num_envs, torch.Generator().manual_seed(0))
    capacity = 3 * decisions * num_envs
    buffers: dict[str, Replay | _Loop] = {}

    def fill(name: str, kind: type[Replay] | type[_Loop]) -> Contender:
        def prepare() -> None:
            buffers[name] = kind(capacity, GAMMA)

        return Contender(lambda: buffers[name].add(rollout), prepare)

    seconds = interleave({"ours": fill("ours", Replay), "other": fill("other", _Loop)}, repeats)
    ours, other = buffers["ours"], buffers["other"]
    decisions_of_ended = other.columns["remaining"].nonzero().flatten()
    for name in other.columns:
        mine, theirs = ours.columns[name][decisions_of_ended], other.columns[name][decisions_of_ended]
        assert torch.allclose(mine, theirs), f"{name} differs"
    return [time_row("replay_add", "replay_add", (seconds["ours"], seconds["other"]), decisions=decisions * num_envs)]


class _Loop:
    """The same slots for episodes that end within the rollout, written one by one."""

    def __init__(self, capacity: int, gamma: float) -> None:
        self.capacity, self.gamma, self.cursor = capacity, gamma, 0
        self.columns: dict[str, Tensor] = {}

    def add(self, rollout: Rollout) -> None:
        begin = [0] * rollout.seeds.shape[1]
        powers = self.gamma ** torch.arange(rollout.valid.shape[-1])
        for end, env_id in (rollout.terminated | rollout.truncated).nonzero().tolist():
            span = slice(begin[env_id], end + 1)
            reward = (rollout.reward[span, env_id] * powers).sum(-1)
            count = rollout.valid[span, env_id].sum(-1)
            total, returns = torch.zeros(()), torch.full_like(reward, -torch.inf)
            for i in range(len(reward) - 1, -1, -1) if rollout.terminated[end, env_id] else ():
                total = reward[i] + self.gamma ** count[i] * total
                returns[i] = total
            episode = {f"features/{name}": item[span, env_id] for name, item in rollout.features.items()}
            episode |= {name: getattr(rollout, name)[span, env_id] for name in ("sample", "executed", "version")}
            remaining = torch.arange(len(reward), 0, -1)
            self._write(episode | {"reward": reward, "count": count, "returns": returns, "remaining": remaining})
            begin[env_id] = end + 1

    def _write(self, episode: dict[str, Tensor]) -> None:
        slots = self.cursor + torch.arange(len(episode["reward"]))
        for name, item in episode.items():
            shape = (self.capacity, *item.shape[1:])
            self.columns.setdefault(name, torch.zeros(shape, dtype=item.dtype))[slots] = item
        self.cursor += len(slots) + 1


def _rollout(decisions: int, num_envs: int, generator: torch.Generator) -> Rollout:
    """Random chunks of five actions; one decision in fourteen ends its episode."""
    shape = (decisions, num_envs)
    over = torch.rand(shape, generator=generator) < 1 / 14
    over[decisions // 2] = True
    no, chunk = torch.zeros(*shape, 5, dtype=torch.bool), torch.randn(*shape, 5, 4, generator=generator)
    widths = {"state": 48, "base_action": 20}
    truncated = over & (torch.rand(shape, generator=generator) < 0.5)
    final = truncated.nonzero()
    return Rollout(
        features={name: torch.randn(decisions + 1, num_envs, n, generator=generator) for name, n in widths.items()},
        sample=chunk,
        executed=chunk,
        aux={},
        logprob=torch.zeros(shape),
        reward=torch.randn(*shape, 5, generator=generator),
        valid=~no,
        intervened=no,
        terminated=over & ~truncated,
        truncated=truncated,
        success=over & ~truncated,
        version=torch.zeros(shape, dtype=torch.long),
        final_index=final,
        final_features={name: torch.randn(len(final), n, generator=generator) for name, n in widths.items()},
        seeds=torch.zeros(shape, dtype=torch.long),
    )
