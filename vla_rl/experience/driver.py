"""The loop that steps environments with a policy: encode, act, step, and reset of the ids that the caller names.

    driver = Driver(env, policy, generator)
    driver.start(seeds)
    while wanted:
        decision = driver.step()
        ended = np.flatnonzero(decision.host.done)
        driver.reset(ended, [next(seeds) for _ in ended])

What is kept, which seeds come next and when to stop is up to the caller.  Nothing here needs torch.

Spans of time: what a process did from when to when, in seconds that several processes of a machine share.

A driver records spans, a source hands them over with its rollout (``Rollout.spans``), and the training loop collects
them with its own (``vla_rl/training/timeline.py``).

    spans = Spans()
    spans.add("simulating", start, stop)    # seconds of time.perf_counter()
    rollout = replace(rollout, spans=spans.take())

Spans of one process follow each other; none lies within another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from vla_rl.contract.check import require_finite_observation, require_finite_step
from vla_rl.contract.env import Array, AsyncSteps, Observation, Observe, OnHost, Step, VecEnv, on_host, to_env
from vla_rl.contract.errors import NonFiniteError
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State, encode_observation, recorded
from vla_rl.contract.tracker import HostStep, is_tensor, read_step

ATTEMPTS = 5  # at an episode whose simulator breaks down
_NOT_RESET = "reset every environment before the first step"


@dataclass(frozen=True)
class Decision:
    """One decision of all ``E`` environments and what came of it.

    obs       the observation before it
    features  {name: [E,...]}  what the policy decided on, as far as it is kept (see ``recorded``)
    out       what it chose
    step      what the environments returned
    seeds     int64 [E]        seeds of the episodes that the decision belongs to
    host      what the host has read of ``step``
    """

    obs: Observation
    features: Features
    out: ActionOut
    step: Step
    seeds: np.ndarray
    host: HostStep

    def without_pictures(self) -> Decision:
        """The same without images, extras and frames, for those who keep many decisions with their features."""
        step = replace(self.step, obs=_bare(self.step.obs), frames=(), on_host=OnHost())
        return replace(self, obs=_bare(self.obs), step=step)


def _bare(obs: Observation) -> Observation:
    return replace(obs, images={}, extras={})


class Driver:
    """Steps ``env`` with ``policy``; both belong to the driver meanwhile.

    ``view`` changes what the policy sees (black images, for instance).  ``seconds`` adds up the wall time of
    environment, encoder and policy, and of waiting for the policy's device and for an environment that computes
    elsewhere (``AsyncSteps``), until somebody sets it back; ``spans`` says when each of them was.
    """

    def __init__(
        self,
        env: VecEnv,
        policy: Policy,
        generator: Any,
        mode: Mode = "sample",
        observe: Observe = "last",
        view: Callable[[Observation], Observation] = lambda obs: obs,
    ) -> None:
        self.env, self.policy, self.generator = env, policy, generator
        self.mode, self.observe, self.view = mode, observe, view
        self.obs: Observation | None = None  # None before the first reset
        self.state: State = policy.initial_state(env.num_envs)
        self.seeds = np.zeros(env.num_envs, np.int64)
        self.seconds, self.spans = no_seconds(), Spans()
        self._features: Features | None = None
        self._unchecked: Observation | None = None  # of the last reset, if it is on a device
        self._elsewhere = env if isinstance(env, AsyncSteps) else None

    def start(self, seeds: Sequence[int] | np.ndarray) -> Observation:
        """Reset every environment, number ``i`` with ``seeds[i]``; those beyond ``seeds`` repeat the last one."""
        spare = self.env.num_envs - len(seeds)
        return self.reset(np.arange(self.env.num_envs), np.array([*seeds, *[seeds[-1]] * spare]))

    def reset(self, env_ids: Array, seeds: Array) -> Observation:
        """Begin new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R]), in the policy's state too.

        Returns the observation of all environments.  Each must be reset before the first step.
        """
        if len(env_ids):
            with self._clock("time/env_s"):
                self.seeds[env_ids] = seeds
                self.state = self.policy.reset_state(self.state, env_ids)
                self.obs = self.env.reset(env_ids, np.asarray(seeds, np.int64))
                self._features = None
            self._unchecked = self.obs
            if not is_tensor(self.obs.state):  # a device would have to be waited for
                self.check()
        assert self.obs is not None, _NOT_RESET
        return self.obs

    def check(self) -> None:
        """Raise ContractError if the observation of the last reset is not finite; on a device nobody may know yet."""
        if self._unchecked is not None:
            obs, self._unchecked = self._unchecked, None
            require_finite_observation(self.env, obs, self.seeds)

    @property
    def features(self) -> Features:
        """What the next decision is made on, {name: [E,...]}; every observation is encoded once."""
        if self._features is None:
            assert self.obs is not None, _NOT_RESET
            with self._clock("time/encode_s"):
                self._features, self.state = self._encode(self.obs, self.state)
        return self._features

    def final_features(self, env_ids: Array) -> Features:
        """What is kept of what the policy would decide on at the present observation of ``env_ids`` [R].

        For the last observation of a truncated episode, before its environment is reset; changes nothing.
        """
        assert self.obs is not None, _NOT_RESET
        with self._clock("time/encode_s"):
            state = {name: item[env_ids] for name, item in self.state.items()}
            return recorded(self.policy, self._encode(self.obs.select(env_ids), state)[0])

    def step(self) -> Decision:
        """One decision of all environments; those whose episode has ended idle.

        Raises NonFiniteError when the policy chose a NaN: nothing has moved then, and the next call decides again on
        the same observation.
        """
        features, obs = self.features, self.obs
        assert obs is not None, _NOT_RESET
        with self._clock("time/act_s"):
            out, state = self.policy.act(features, self.state, self.mode, self.generator)
        with self._clock("time/sync_s"):  # where the environment is on the host, this waits for the policy's device
            action = to_env(out.action, self.env)
            if isinstance(action, np.ndarray):  # an environment on a device looks there, before anything moves
                require_finite(out, action)
        step = self._executed(out, action)
        with self._clock("time/env_s"):  # waits for a device, unless the environment did
            host = read_step(step, self._unchecked)
        if not host.finite:
            self.check()
            require_finite_step(self.env, step, self.seeds)
        self._unchecked = None
        self.state, self.obs, self._features = state, step.obs, None
        return Decision(obs, recorded(self.policy, features), out, step, self.seeds.copy(), host)

    def _executed(self, out: ActionOut, action: Array) -> Step:
        if self._elsewhere is not None:
            with self._clock("time/env_s"):
                self._elsewhere.step_async(action, observe=self.observe)
            with self._clock("time/wait_s"):
                return self._elsewhere.step_wait()
        with self._clock("time/env_s"):
            try:
                return self.env.step(action, observe=self.observe)
            except NonFiniteError:
                self.check()
                require_finite(out, on_host(out.action))  # names the policy
                raise

    def until_done(self) -> Iterator[Decision]:
        """Decisions until the episode of every environment has ended."""
        while True:
            decision = self.step()
            yield decision
            if decision.host.done.all():
                return

    def restore(self, obs: Observation, features: Features, state: State, seeds: np.ndarray) -> None:
        """Go on from a saved state: ``features`` were encoded from ``obs`` already."""
        self.obs, self._features, self.state, self.seeds = obs, features, state, seeds.copy()

    def _encode(self, obs: Observation, state: State) -> tuple[Features, State]:
        return encode_observation(self.policy, self.view(obs), state, self.generator)

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        stop = time.perf_counter()
        self.seconds[name] += stop - start
        self.spans.add(_KINDS[name], start, stop)


_KINDS = {
    "time/env_s": "simulating",
    "time/encode_s": "inferring",
    "time/act_s": "inferring",
    "time/sync_s": "syncing",
    "time/wait_s": "waiting",
}


def no_seconds() -> dict[str, float]:
    """The wall times of a driver, all 0."""
    return dict.fromkeys(_KINDS, 0.0)


def require_finite(out: ActionOut, action: np.ndarray) -> None:
    """Raise NonFiniteError when ``action`` [E,H,D], that of ``out``, is NaN or infinite, naming the environment."""
    finite = np.isfinite(action).reshape(len(action), -1).all(1)
    if not finite.all():
        raise NonFiniteError(
            f"the policy (version {out.policy_version}) chose a non-finite action in environment "
            f"{int(np.flatnonzero(~finite)[0])}, so nothing was executed; go back to the last checkpoint and lower the "
            "learning rate."
        )


KINDS = ("waiting", "simulating", "inferring", "syncing", "learning", "validating", "saving")
OWN = ""  # the lane of the process that asked for the rollout; others are named
LIMIT = 512  # spans of one lane and rollout
_PARTS = 64  # of time, in which the spans of one kind become one where there are too many
_TOUCHING = 1e-4  # seconds between two spans of one kind that are one: encoding and acting, for instance
# perf_counter has no common zero; the wall clock has one, and may be set back while a process runs.
_ZERO = time.time() - time.perf_counter()

Span = tuple[int, float, float]  # index into KINDS, start, stop


def now() -> float:
    """Seconds of the wall clock at this process's start plus those that have passed since."""
    return _ZERO + time.perf_counter()


class Spans:
    """The spans of one process since they were taken last, at most :data:`LIMIT`.

    Where there are more, time is cut into equal parts, and in each part the spans of one kind become one.  So the
    seconds of each kind stay what they are, and their order within a part is lost.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, kind: str, start: float, stop: float) -> None:
        """``kind`` from ``start`` to ``stop``, seconds of ``time.perf_counter()`` after those of earlier spans."""
        index, start, stop = KINDS.index(kind), _ZERO + start, _ZERO + stop
        if self._spans and self._spans[-1][0] == index and start - self._spans[-1][2] < _TOUCHING:
            start = self._spans.pop()[1]
        self._spans.append((index, start, stop))
        if len(self._spans) > LIMIT:
            self._spans = thinned(self._spans)

    def take(self) -> dict[str, np.ndarray]:
        """All spans as those of the lane :data:`OWN`, float64 [S,3] of kind, start and stop; the next ones begin."""
        spans, self._spans = self._spans, []
        return {OWN: np.array(spans, np.float64).reshape(-1, 3)}


def thinned(spans: Sequence[Span]) -> list[Span]:
    """``spans``, in order of time, with one span of each kind in each of :data:`_PARTS` equal parts of their time."""
    begin, end = spans[0][1], spans[-1][2]
    size = (end - begin) / _PARTS or 1.0
    found: list[Span] = []
    for _, group in groupby(spans, key=lambda span: min(int((span[1] - begin) / size), _PARTS - 1)):
        part = list(group)
        at = part[0][1]
        for kind in dict.fromkeys(span[0] for span in part):
            seconds = sum(span[2] - span[1] for span in part if span[0] == kind)
            found.append((kind, at, at + seconds))
            at += seconds
    return found


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, np.ndarray]:
    """The spans of several drivers in one process that took turns, in order of time."""
    lanes = dict.fromkeys(lane for part in parts for lane in part)
    found = {lane: np.concatenate([on_host(part[lane]) for part in parts if lane in part]) for lane in lanes}
    return {lane: spans[np.argsort(spans[:, 1], kind="stable")] for lane, spans in found.items()}
