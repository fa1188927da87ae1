"""The policy that a fleet's server has for a robot: fetched while episodes are played, taken between two of them."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from rich.console import Console

from robot_drivers.decisions import Decide, Decision, Query
from vla_rl.contract.errors import ContractError, UserError, cause_of
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.fleet.attempt import LinkState
from vla_rl.fleet.backoff import Backoff, BackoffOptions
from vla_rl.fleet.link import UnreachableError
from vla_rl.fleet.manifest import spec_hash
from vla_rl.fleet.policy_cache import CachedPolicy, PolicyCache, PolicySource

_LOOK_S = 0.2  # how often it is looked what the server wants
_AGAIN_S = 2.0  # until a download that broke is tried again


class PolicyServer(PolicySource, Protocol):
    """A ``Link``."""

    def status(self) -> LinkState:
        """``policy``: the version that the server wants this robot to use, 0 for none."""


@dataclass
class _Refusal:
    """Why a version is not used, and from when on it is tried again (seconds of the monotonic clock)."""

    why: str
    again: float
    backoff: Backoff


class FleetPolicy:
    """Decides by the version in use (``Decide``).

    A thread brings the version that the server wants to ``cache``, which takes network and disk alone.  It is loaded
    and has to answer its golden observation between two episodes, when nothing moves; while one fails, the version in
    use stays.  It is tried again, at growing intervals, unless the policy itself is wrong.  A robot whose server is
    away begins with the version that it used last.
    """

    def __init__(
        self, cache: PolicyCache, server: PolicyServer, spec: EnvSpec, make: Callable[[Policy], Decide], show: Console
    ) -> None:
        """``make`` makes the decider of a policy."""
        self.version = 0  # in use
        self._cache, self._server, self._spec, self._make, self._show = cache, server, spec, make, show
        self._decide: Decide | None = None
        self._files = threading.Lock()  # of the cache
        self._fetched, self._refused = 0, dict[int, _Refusal]()
        self._told, self._ending = set[str](), threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="fleet-policy", daemon=True)
        self._thread.start()

    def __call__(self, query: Query) -> Decision:
        """The chunk [H,D] for what ``query`` sees."""
        assert self._decide is not None, "ready() comes before the first episode"
        return self._decide(query)

    def ready(self) -> None:
        """Have the newest version that is here, before an episode; waits as long as there is none at all."""
        self._swap()
        while self._decide is None:
            if self._cache.in_use() and not self._server.status().connected:
                self._use_last()
            else:
                self._tell("waiting for the server's first policy for this robot (Ctrl-C ends it)")
                self._tell_refused()
                self._ending.wait(_LOOK_S)
                self._swap()
        self._tell_refused()

    def close(self) -> None:
        """End the thread; a download goes on where it stopped, the next time."""
        self._ending.set()
        self._thread.join()

    # -- between episodes -------------------------------------------------------------------------------------------

    def _swap(self) -> None:
        """Take the version that was fetched, unless something is being fetched just now."""
        if not self._files.acquire(blocking=False):
            return
        try:
            version = self._fetched
            if version and version != self.version and self._due(version):
                self._use(version)
        finally:
            self._files.release()

    def _use_last(self) -> None:
        with self._files:
            version = self._cache.in_use()[0]
            self._use(version)
            if version in self._refused:
                raise UserError(f"{self._refused[version].why} There is no other policy here; wait for the server.")

    def _use(self, version: int) -> None:
        with self._refusing(version):
            try:
                cached = self._cache.get(version)
            except (UserError, OSError):
                self._fetched = 0  # what is damaged is fetched again
                raise
            with self._refusing(version, for_ever=(ContractError,)):
                self._take(cached)

    def _take(self, cached: CachedPolicy) -> None:
        from vla_rl.policies.pretrained import load_policy

        version = cached.manifest.version
        policy: Policy = load_policy(cached.folder, self._spec)
        check_golden(policy, cached)
        policy.version = version
        self._decide = self._make(policy)
        self._cache.use(version)
        self._refused.pop(version, None)
        was = f" (was {self.version})" if self.version else ""
        self.version = version
        self._show.print(f"policy version {version} from now on{was}", highlight=False)

    def _due(self, version: int) -> bool:
        return version not in self._refused or time.monotonic() >= self._refused[version].again

    @contextmanager
    def _refusing(self, version: int, for_ever: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Whatever happens, the version in use stays; what may be otherwise in a moment is tried again."""
        try:
            yield
        except Exception as error:
            before = self._refused.get(version)
            backoff = before.backoff if before else Backoff(BackoffOptions(), random.Random())
            again = math.inf if isinstance(error, for_ever) else time.monotonic() + backoff.next()
            why = str(error) if isinstance(error, UserError) else f"{cause_of(error)}; it is tried again."
            self._refused[version] = _Refusal(f"policy version {version} is not used: {why}", again, backoff)

    def _tell_refused(self) -> None:
        for refusal in [*self._refused.values()]:
            self._tell(refusal.why)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._show.print(sentence, highlight=False, markup=False, soft_wrap=True)

    # -- meanwhile --------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        while not self._ending.wait(_LOOK_S):
            version = self._server.status().policy[0]
            if version in (0, self._fetched) or not self._due(version):
                continue
            with self._files, self._refusing(version), suppress(UnreachableError):  # what has arrived is kept
                self._fetched = self._cache.fetch(version, spec_hash(self._spec), self._server).manifest.version
                self._refused.pop(version, None)
            if self._fetched != version and version not in self._refused:
                self._ending.wait(_AGAIN_S)


def check_golden(policy: Policy, cached: CachedPolicy) -> None:
    """Raise ContractError unless ``policy`` answers here what it answered where it was published."""
    from vla_rl.recipes.fleet.golden import answer
    from vla_rl.serving.servable import servable_spec

    golden, bounds = cached.manifest.golden, servable_spec(policy).action
    found, wanted = answer(policy, cached.observation, golden.seed), np.array(golden.action)
    span = np.asarray(bounds.high, np.float64) - np.asarray(bounds.low, np.float64)
    if found.shape != wanted.shape or not (np.abs(found - wanted) <= golden.tolerance * span).all():
        raise ContractError(
            "it answers its golden observation otherwise than where it was published, so the version in use stays; "
            "look for another torch on this machine, or publish it again."
        )
