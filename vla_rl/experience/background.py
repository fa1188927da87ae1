"""Rollouts of several sources side by side, in step with the learner.

A thread waits for each source.  Threads that compute hinder each other by Python's lock, so sources that are to use
several cores live in processes of their own (``process.py``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import nn

from vla_rl.contract.batch import ExperienceSource, Resumable, Rollout
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.experience.columns import side_by_side, to_state
from vla_rl.experience.driver import no_seconds
from vla_rl.experience.spans import Spans, beside

T = TypeVar("T")


class CollectingSource(ExperienceSource, Resumable, Protocol):
    """A source that acts in its environment with ``policy``, which may be replaced between two rollouts."""

    policy: Policy

    def close(self) -> None:
        """Close the environment."""


class BackgroundSource:
    """An ``ExperienceSource`` whose rollouts are those of ``sources``, side by side, each collected by its own thread.

    ``policy`` is what the learner changes; the sources act with it while the learner waits.  Everything that concerns a
    source happens in its thread, because an OpenGL context belongs to one.  An exception of a source is raised by
    :meth:`next`; rollouts of the other sources are kept, so that a further call repeats only what failed.
    """

    def __init__(self, sources: Sequence[CollectingSource], policy: Policy) -> None:
        """Raises UserError without sources."""
        if not sources:
            raise UserError("there is no source, so nothing is collected; give one at least.")
        self.sources, self.policy = list(sources), policy
        self._threads = [ThreadPoolExecutor(1, f"collector-{i}") for i in range(len(sources))]
        self._pending: list[Future[Rollout] | None] = [None] * len(sources)
        self._closed, self._waits = False, Spans()

    def next(self) -> Rollout:
        """The next rollout; counters in its ``info`` are the sources' sums.

        The sources' seconds are their mean and called ``collector/``: they passed beside the caller, whose own
        ``time/wait_s`` says how long it waited.
        """
        start = time.perf_counter()
        self._launch()
        self._wait()
        rollouts = [pending.result() for pending in self._pending if pending is not None]
        self._pending = [None] * len(self.sources)
        stop = time.perf_counter()
        self._waits.add("waiting", start, stop)
        whole = side_by_side(rollouts, summed_info(rollouts) | no_seconds() | {"time/wait_s": stop - start})
        return replace(whole, spans=beside(rollouts, self._waits.take()))

    def state_dict(self) -> dict[str, Any]:
        """Rollouts that a failure of another source left over, and the sources' states (see ``Resumable``)."""
        return {
            "pending": [None if pending is None else saved_rollout(pending.result()) for pending in self._pending],
            "sources": [self._ask(i, source.state_dict) for i, source in enumerate(self.sources)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; raises UserError when that was of more or fewer sources."""
        if len(state["sources"]) != len(self.sources):
            raise UserError(
                f"the saved state is that of {len(state['sources'])} collectors and there are "
                f"{len(self.sources)} now, so the run cannot continue; give as many as it was started with."
            )
        for i, source in enumerate(self.sources):
            self._ask(i, partial(source.load_state_dict, state["sources"][i]))
            self._pending[i] = _finished(state["pending"][i])

    def close(self) -> None:
        """Close the environments and end the threads, once what is being collected is complete; safe to call twice."""
        if not self._closed:
            self._closed = True
            for thread, source in zip(self._threads, self.sources, strict=True):
                thread.submit(source.close).result()
                thread.shutdown()

    def _launch(self) -> None:
        """Start every source that has nothing pending."""
        if self._closed:
            raise UserError("the source was closed, so it has no further rollout; make a new one.")
        idle = [i for i, pending in enumerate(self._pending) if pending is None]
        for i in idle:
            self.sources[i].policy = self.policy
            self._pending[i] = self._threads[i].submit(self.sources[i].next)

    def _wait(self) -> None:
        """Return when nothing is being collected; raises the first exception of a source and forgets those rollouts."""
        wait([pending for pending in self._pending if pending is not None])
        failed = [pending for pending in self._pending if pending is not None and pending.exception() is not None]
        self._pending = [None if pending in failed else pending for pending in self._pending]
        for pending in failed:
            pending.result()

    def _ask(self, i: int, request: Callable[[], T]) -> T:
        """What ``request`` returns in the thread of source ``i``."""
        return self._threads[i].submit(request).result()


def acting_copy(policy: Policy) -> Policy:
    """A copy that later steps of a learner leave alone; parameters that never change are shared with ``policy``."""
    shared: dict[int, Any] = {}
    trainable = getattr(policy, "trainable", None)
    if isinstance(policy, nn.Module) and callable(trainable):
        moving = {id(parameter) for parameter in trainable().values()}
        shared = {id(item): item for item in policy.parameters() if id(item) not in moving}
    return copy.deepcopy(policy, shared)


def saved_rollout(rollout: Rollout) -> dict[str, Any]:
    """``rollout`` without the seconds that it took, so that equal runs have equal states."""
    info = {name: value for name, value in rollout.info.items() if not name.endswith("_s")}
    return {**to_state(rollout), "info": info, "spans": {}}


def _finished(state: dict[str, Any] | None) -> Future[Rollout] | None:
    """A rollout that was collected before its state was saved."""
    if state is None:
        return None
    future: Future[Rollout] = Future()
    future.set_result(Rollout(**state))
    return future


def summed_info(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The sums of the counters of ``rollouts``; their seconds are means, called ``collector/``."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.info)
    sums = {name: sum(rollout.info.get(name, 0.0) for rollout in rollouts) for name in names}
    return {
        name.replace("time/", "collector/"): value / len(rollouts) if name.endswith("_s") else value
        for name, value in sums.items()
    }
