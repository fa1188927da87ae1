"""A policy of ours that acts for one environment somewhere else, one action per observation."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vla_rl.contract.config import Checked, within
from vla_rl.contract.env import PRIVILEGED, Array, EnvSpec, on_host
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.policy import Policy, State, encode_observation
from vla_rl.policies.normalization import action_limits
from vla_rl.policies.real_time_chunking import RealTimeChunking
from vla_rl.serving.observation import SingleObservation, batch_of


class ServedPolicy:
    """``policy`` in mode "eval" for any number of episodes side by side; one of them computes at a time.

    What an episode draws depends on ``seed`` and on its task (with the harness's ``episode_idx``), so neither the order
    of episodes nor the number of connections changes an action.  Raises UserError for a policy without a spec, or whose
    spec has observations that no message carries.
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.spec, self.seed, self._lock = policy, servable_spec(policy), seed, threading.Lock()

    def begin(self, task: Mapping[str, Any]) -> Episode:
        """A new episode of ``task``; raises ContractError for a task that is no JSON."""
        try:
            words = json.dumps([self.seed, task], sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise ContractError(
                f"a task cannot be named ({error}), so its episode is not started; describe it by texts and numbers."
            ) from error
        noise = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7])
        return Episode(self, torch.Generator().manual_seed(noise))

    def decide(self, obs: SingleObservation, time: int, state: State, generator: torch.Generator) -> tuple[Any, State]:
        """The chunk float32 [H,D] after ``time`` actions, clipped to the bounds, and the policy's next state."""
        with self._lock:
            chunks, state = answer(self.policy, [obs], time, state, [generator])
        return _sendable(chunks[0], self.spec), state


class Episode:
    """One episode: the rest of the policy's last chunk and its state."""

    def __init__(self, served: ServedPolicy, generator: torch.Generator) -> None:
        self._served, self._generator, self._time = served, generator, 0
        self._state = served.policy.reset_state(served.policy.initial_state(1), np.zeros(1, np.int64))
        self._chunk: deque[np.ndarray] = deque()

    def act(self, obs: SingleObservation) -> np.ndarray:
        """The next action float32 [D]: of the running chunk, as in our own environments, or the first of a new one.

        Raises ContractError for an observation that the policy would misread.
        """
        obs = obs.checked(self._served.spec)
        if not self._chunk:
            chunk, self._state = self._served.decide(obs, self._time, self._state, self._generator)
            self._chunk.extend(chunk)
        self._time += 1
        return self._chunk.popleft()


class SessionPolicy:
    """``policy`` in mode "eval", which decides on every observation anew, with the state of its session.

    What a request draws depends on ``seed`` and on its observation alone, so neither the order of requests nor those
    that are decided with it change its noise; float32 sums of another batch size may differ in the last bits.  The
    observation's ``time`` is always 0, because a request has none; our policies show it to their critics only.

    Raises UserError for a policy that cannot be served at all (``servable_spec``).
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.spec, self.seed = policy, servable_spec(policy), seed

    @property
    def continues(self) -> bool:
        """Whether a chunk can continue the one that is executed while it is computed."""
        return isinstance(self.policy, RealTimeChunking)

    def begin(self) -> State:
        """The state of a session before an episode's first decision."""
        return self.policy.reset_state(self.policy.initial_state(1), np.zeros(1, np.int64))

    def continued(self, state: State, rest: np.ndarray, delay: int) -> State:
        """``state`` for a chunk that continues ``rest`` [n,D]; see ``RealTimeChunking.continue_actions``.

        Raises ContractError for a policy without real-time chunking.
        """
        if not isinstance(self.policy, RealTimeChunking):
            raise ContractError(
                "the request has a prefix to continue, which this policy would not, so no action is chosen; start the "
                "server with --real-time identity, or ask without one."
            )
        return self.policy.continue_actions(state, np.zeros(1, np.int64), rest[None], np.array([delay]))

    def decide(self, asked: Sequence[Asked]) -> list[tuple[np.ndarray, State] | Exception]:
        """For each of ``asked`` the chunk float32 [H,D] within the bounds and the next state, or what is wrong."""
        seen = [one.seen for one in asked]
        generators = [torch.Generator().manual_seed(self._noise_of(one)) for one in seen]
        state = {name: joined([one.state[name] for one in asked]) for name in asked[0].state}
        answered, after = answer(self.policy, seen, 0, state, generators)
        found: list[tuple[np.ndarray, State] | Exception] = []
        for row, chunk in enumerate(answered):
            try:
                found.append((_sendable(chunk, self.spec), {name: item[[row]] for name, item in after.items()}))
            except NonFiniteError as error:
                found.append(error)
        return found

    def _noise_of(self, seen: SingleObservation) -> int:
        """The seed of what is drawn for ``seen``."""
        digest = hashlib.blake2b(f"{self.seed} {seen.instruction}".encode(), digest_size=7)
        for array in (seen.state, *seen.images.values()):
            digest.update(np.ascontiguousarray(array).data)
        return int.from_bytes(digest.digest())


@dataclass(frozen=True)
class Asked:
    """A request: what is seen, which was checked, and the ``state`` {name: [1,...]} of its session."""

    seen: SingleObservation
    state: State


def joined(rows: Sequence[Array]) -> Array:
    """Arrays [1,...] of one kind as [N,...]."""
    return torch.cat(list(rows)) if isinstance(rows[0], torch.Tensor) else np.concatenate(rows)


def _sendable(chunk: np.ndarray, spec: EnvSpec) -> np.ndarray:
    """The actions float32 [H,D] that an environment takes of ``chunk``, within its bounds; raises NonFiniteError."""
    chunk = chunk.astype(np.float32)
    if not np.isfinite(chunk).all():
        raise NonFiniteError("the policy chose an action that is not finite, so none is sent; serve another one.")
    low, high = (limit.numpy() for limit in action_limits(spec))
    return np.clip(chunk, low, high)[: spec.max_chunk]


def answer(
    policy: Any, seen: Sequence[SingleObservation], time: int, state: State, generators: list[torch.Generator]
) -> tuple[np.ndarray, State]:
    """The chunks [N,H,D] of ``policy`` in mode "eval" for N observations that were checked, and its next state."""
    with torch.no_grad():
        features, state = encode_observation(policy, batch_of(seen, time, policy.spec), state, generators)
        out, state = policy.act(features, state, "eval", generators)
    chunks: np.ndarray = on_host(out.action)
    return chunks, state


def servable_spec(policy: Policy) -> EnvSpec:
    """The spec of ``policy``; raises UserError when it has none, or has observations that no message carries."""
    spec = getattr(policy, "spec", None)
    if not isinstance(spec, EnvSpec):
        raise UserError(
            f"{type(policy).__name__} has no spec, so nobody could check what it is shown; keep the environment's "
            "spec in its attribute 'spec'."
        )
    shown = [name for name in spec.extras if not name.startswith(PRIVILEGED)]
    if shown:
        raise UserError(
            f"the policy was trained with {', '.join(shown)}, which the protocol does not carry, so it cannot be "
            "served; train it on images and state alone."
        )
    return spec


@dataclass(frozen=True)
class Batching(Checked):
    """How many requests are computed together, and how long the first of them waits for others."""

    size: int = within(32, 1, 4096)
    wait_ms: float = within(2.0, 0.0, 60000.0)  # only while other clients are connected that have not asked yet


@dataclass(frozen=True)
class Decision:
    """A chunk float32 [H,D], the session's next state, and what the forward pass took that chose it."""

    chunk: np.ndarray
    state: State
    infer_ms: float
    batch_size: int


class Batcher:
    """Collects what clients ask and gives it to ``served``, in one thread of its own.

    When that raises, each request is computed alone, so that one that the policy cannot take spoils no other.
    """

    def __init__(self, served: SessionPolicy, batching: Batching) -> None:
        self._served, self._batching = served, batching
        self._waiting: deque[tuple[Asked, Future[Decision]]] = deque()
        self._changed = threading.Condition()
        self._clients, self._closed = 0, False
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    @contextmanager
    def client(self) -> Iterator[None]:
        """Somebody may ask meanwhile, one request at a time."""
        with self._changed:
            self._clients += 1
        try:
            yield
        finally:
            with self._changed:
                self._clients -= 1
                self._changed.notify()

    def ask(self, request: Asked) -> Future[Decision]:
        """The answer, when there is one; cancelled when the batcher is closed before."""
        answer: Future[Decision] = Future()
        with self._changed:
            if self._closed:
                _cancel(answer)
            else:
                self._waiting.append((request, answer))
                self._changed.notify()
        return answer

    def close(self, wait_s: float) -> None:
        """Cancel what waits, and give a running computation ``wait_s`` seconds to end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            for _, answer in self._waiting:
                _cancel(answer)
            self._waiting.clear()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while batch := self._next():
            self._answer(batch)

    def _next(self) -> list[tuple[Asked, Future[Decision]]]:
        """The next batch; empty when the batcher is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._changed.wait_for(self._full, self._batching.wait_ms / 1000)
                count = min(len(self._waiting), self._batching.size)
                taken = [self._waiting.popleft() for _ in range(count)]
                closed = self._closed
            batch = [item for item in taken if item[1].set_running_or_notify_cancel()]
            if batch or closed:
                return batch

    def _full(self) -> bool:
        """Whether nobody could join the next batch."""
        return len(self._waiting) >= min(self._batching.size, self._clients) or self._closed

    def _answer(self, batch: Sequence[tuple[Asked, Future[Decision]]]) -> None:
        started = time.monotonic()
        try:
            decided = self._served.decide([request for request, _ in batch])
        except Exception as error:  # of a policy of the user's own: its clients are told
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:
                for item in batch:
                    self._answer([item])
            return
        took = 1000 * (time.monotonic() - started)
        for (_, future), found in zip(batch, decided, strict=True):
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(Decision(*found, took, len(batch)))


def _cancel(answer: Future[Decision]) -> None:
    """Cancel what nobody computes, and wake whoever waits for it: that is the part of who would have computed it."""
    answer.cancel()
    answer.set_running_or_notify_cancel()
