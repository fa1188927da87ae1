"""Roll a policy out in an environment: the one place where numpy arrays become torch tensors (without copying)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import PRIVILEGED, Observation, Snapshots, Step, VecEnv, on_host, to_env
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.policy import ActionOut, Features, Policy, State, encode_observation, public
from vla_rl.contract.spec import EnvSpec


class SeedStream(Iterator[int]):
    """Every ``step``-th seed from ``start`` to before ``stop`` once, in order, then again from the start."""

    def __init__(self, start: int, stop: int, step: int = 1) -> None:
        self._range = range(start, stop, step)
        self.drawn = 0

    def __next__(self) -> int:
        seed = self._range[self.drawn % len(self._range)]
        self.drawn += 1
        return seed


@dataclass
class _Decision:
    features: Features
    out: ActionOut
    step: Step
    seeds: Tensor


@dataclass
class _Window:
    """What has been collected so far towards one rollout."""

    decisions: list[_Decision] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)
    final: list[Features] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"env_s": 0.0, "perception_s": 0.0, "act_s": 0.0})


@dataclass(frozen=True)
class WindowConfig:
    """Experience as windows of decisions, side by side."""

    num_envs: int = 128  # environments
    decisions: int = 5  # per row and rollout
    privileged: tuple[str, ...] = ()  # "privileged/..." extras that are kept for critics

    def __str__(self) -> str:
        return f"{self.num_envs} rows x {self.decisions} decisions = {self.num_envs * self.decisions:,}"

    def split(self, parts: int) -> WindowConfig:
        """What each of ``parts`` processes collects, so that together they have these rows."""
        if self.num_envs % parts:
            raise UserError(
                f"{self.num_envs} rows cannot be shared equally by {parts} processes, so nothing was started; choose a "
                "multiple of the processes."
            )
        return replace(self, num_envs=self.num_envs // parts)

    def build(self, env: VecEnv, policy: Policy, seeds: SeedStream, generator: torch.Generator) -> RolloutSource:
        """The source with these numbers."""
        return RolloutSource(env, policy, self.decisions, seeds, generator, self.privileged)


class RolloutSource:
    """Windows of ``decisions`` per row; a row whose episode ended starts its next seed at once, so no row idles.

    Episodes run on across windows, so the last decision of a window is bootstrapped by whoever computes advantages.
    The policy is stepped in mode "sample" with ``generator``; ``env`` and ``policy`` belong to the source meanwhile.
    ``privileged`` names extras that are kept beside what the policy stores and that the policy never sees.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        decisions: int,
        seeds: SeedStream,
        generator: torch.Generator,
        privileged: Sequence[str] = (),
    ) -> None:
        _require_privileged(privileged, env.spec)
        self.env, self.policy, self.decisions = env, policy, decisions
        self.seeds, self.generator, self.privileged = seeds, generator, tuple(privileged)
        self._stored: Features | None = None
        self._window = _Window()
        self._state = policy.initial_state(env.num_envs)
        self._seed = torch.zeros(env.num_envs, dtype=torch.long)

    def next(self) -> Rollout:
        """Collect one window.

        Raises NonFiniteError when the policy produced a NaN: that decision moved nothing, and those before it are kept,
        so that a next call with mended weights goes on where this one stopped.
        """
        if self._stored is None:
            self._stored, self._state = self._encode(self._reset(np.arange(self.env.num_envs)), self._state)
        while len(self._window.decisions) < self.decisions:
            self._stored = self._decide(self._window, self._stored)
        window, self._window = self._window, _Window()
        return _stack(window, self._stored, self.env.spec)

    def state_dict(self) -> dict[str, Any]:
        """Where the rows, the generator, the seeds and the policy's own state stand (see ``Resumable``).

        An environment without snapshots cannot say where its rows stand: after loading, they start new episodes.
        """
        if self._window.decisions:
            raise ContractError(
                f"{len(self._window.decisions)} decisions of an unfinished window would be lost, so the source has no "
                "state to save now; ask between two calls of next()."
            )
        state = {"seeds": self.seeds.drawn, "generator": self.generator.get_state(), "features": None}
        if self._stored is not None and isinstance(self.env, Snapshots):
            snapshot = self.env.snapshot(np.arange(self.env.num_envs))
            state |= {"env": snapshot, "features": dict(self._stored), "policy": self._state, "seed": self._seed}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seeds.drawn, self._stored = state["seeds"], state["features"]
        self.generator.set_state(state["generator"])
        if self._stored is not None:
            self.env.restore(np.arange(self.env.num_envs), state["env"])  # type: ignore[attr-defined]
            self._state, self._seed = state["policy"], state["seed"]

    def _encode(self, obs: Observation, state: State) -> tuple[Features, State]:
        features, state = encode_observation(self.policy, obs, state, self.generator)
        return {**features, **{name: to_tensor(obs.extras[name]) for name in self.privileged}}, state

    def _reset(self, rows: np.ndarray) -> Observation:
        seeds = np.array([next(self.seeds) for _ in rows], dtype=np.int64)
        self._seed[torch.as_tensor(rows)] = torch.as_tensor(seeds)
        self._state = self.policy.reset_state(self._state, rows)
        return self.env.reset(rows, seeds)

    def _decide(self, window: _Window, features: Features) -> Features:
        start = time.perf_counter()
        out, state = self.policy.act(public(features), self._state, "sample", self.generator)
        check_finite(out)
        self._state = state
        acted = time.perf_counter()
        step = play(self.env, out)
        window.decisions.append(_Decision(features, out, step, self._seed.clone()))
        obs = self._restart(window, step)
        stepped = time.perf_counter()
        following, self._state = self._encode(obs, self._state)
        for name, seconds in zip(
            ("act_s", "env_s", "perception_s"),
            (acted - start, stepped - acted, time.perf_counter() - stepped),
            strict=True,
        ):
            window.seconds[name] += seconds
        return following

    def _restart(self, window: _Window, step: Step) -> Observation:
        """Reset the rows that ended, after keeping what truncated ones saw last."""
        done = on_host(step.done)
        truncated = np.flatnonzero(on_host(step.truncated))
        if len(truncated):
            then = {name: item[truncated] for name, item in self._state.items()}
            window.final.append(self._encode(step.obs.select(truncated), then)[0])
            window.ended += [(len(window.decisions) - 1, int(row)) for row in truncated]
        return self._reset(np.flatnonzero(done)) if done.any() else step.obs


def _require_privileged(names: Sequence[str], spec: EnvSpec) -> None:
    for name in names:
        if name not in spec.extras or not name.startswith(PRIVILEGED):
            raise UserError(
                f"{name!r} is not among the privileged extras of {spec.name!r}, so no critic could read it; choose "
                f"from {sorted(item for item in spec.extras if item.startswith(PRIVILEGED))}."
            )


def check_finite(out: ActionOut) -> None:
    """Raise NonFiniteError when an action is NaN or infinite, naming the row."""
    bad = ~torch.isfinite(out.action).flatten(1).all(1)
    if bad.any():
        raise NonFiniteError(
            f"the policy (version {out.policy_version}) chose a non-finite action in row {int(bad.nonzero()[0])}, so "
            "nothing was executed; go back to the last checkpoint and lower the learning rate."
        )


def done_or_chosen(step: Step, out: ActionOut) -> Tensor:
    """What was executed [E,H,D], and where nothing was, after an end inside the chunk, what had been chosen.

    Zeros there would let a critic tell from the actions that the episode ends.
    """
    executed = to_tensor(step.executed)
    return torch.where(to_tensor(step.valid).unsqueeze(-1), executed, out.action.to(executed))


def play(env: VecEnv, out: ActionOut) -> Step:
    """Do what a policy chose; what comes of it is where the policy is, so that all of a rollout is in one place."""
    step = env.step(to_env(out.action, env))
    return step.mapped(lambda item: torch.as_tensor(item, device=out.sample.device))


def to_tensor(array: Any) -> Tensor:
    """A tensor that shares memory with ``array``."""
    return torch.as_tensor(array)


def _stack(window: _Window, last: Features, spec: EnvSpec) -> Rollout:
    decisions = window.decisions
    steps = [decision.step for decision in decisions]

    def over_time(name: str) -> Tensor:
        return torch.stack([to_tensor(getattr(step, name)) for step in steps])

    terminated, truncated = over_time("terminated"), over_time("truncated")
    success, valid = over_time("success") & (terminated | truncated), over_time("valid")
    ended = float((terminated | truncated).sum())
    info = {
        "env_steps": float(valid.sum()),
        "episodes": ended,
        "successes": float(success.sum()),
        **window.seconds,
        **_by_family(steps, spec),
    }
    outs = [decision.out for decision in decisions]
    return Rollout(
        features=stack_dicts([decision.features for decision in decisions] + [last]),
        sample=torch.stack([out.sample for out in outs]),
        executed=torch.stack([done_or_chosen(step, out) for step, out in zip(steps, outs, strict=True)]),
        aux=stack_dicts([out.aux for out in outs]),
        logprob=torch.stack([out.logprob for out in outs]),
        reward=over_time("reward"),
        valid=valid,
        intervened=over_time("intervened"),
        terminated=terminated,
        truncated=truncated,
        success=success,
        version=torch.tensor([[out.policy_version] * len(valid[0]) for out in outs]),
        final_index=torch.tensor(window.ended, dtype=torch.long).reshape(-1, 2),
        final_features=_concatenate(window.final, last),
        seeds=torch.stack([decision.seeds for decision in decisions]),
        info=info,
    )


def _by_family(steps: Sequence[Step], spec: EnvSpec) -> dict[str, float]:
    """Episodes and successes of every kind of task, where there are several."""
    if len(set(spec.families)) < 2:
        return {}
    counts = {f"{what}/{name}": 0.0 for name in sorted(set(spec.families)) for what in ("episodes", "successes")}
    for step in steps:
        for row in np.flatnonzero(on_host(step.done & step.valid.any(1))):  # not those that ended earlier and idle
            name = spec.family(int(step.obs.task[row]))
            counts[f"episodes/{name}"] += 1.0
            counts[f"successes/{name}"] += float(step.success[row])
    return counts


def stack_dicts(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack dicts with equal keys along a new first axis."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def _concatenate(items: list[Features], like: Features) -> dict[str, Tensor]:
    if not items:
        return {name: value[:0] for name, value in like.items()}
    return {name: torch.cat([item[name] for item in items]) for name in like}
