"""Episodes of an arm that go to a fleet's server while they are played; the arm waits for neither disk nor network."""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from robot_drivers.record import ControlStep, Decide, Decision, Query, Record
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError, UserError, cause_of
from vla_rl.contract.policy import Policy
from vla_rl.fleet.identity import Credentials, load_credentials
from vla_rl.fleet.link import Link, LinkOptions, UnreachableError
from vla_rl.fleet.manifest import TrustedKeys, spec_hash
from vla_rl.fleet.payloads import EpisodeEnd, FleetStep, pack_introduction
from vla_rl.fleet.policy_cache import CachedPolicy, PolicyCache
from vla_rl.fleet.protocol import Backoff, BackoffOptions
from vla_rl.fleet.spool import Spool
from vla_rl.recipes.fleet.serving import PUBLIC_KEY
from vla_rl.recipes.robots.drive import EpisodesConfig, decider_of, labels_of, step_back
from vla_rl.recipes.robots.person import Display
from vla_rl.recipes.robots.session import Session, outcome_of

QUALITY = 90  # of JPEG
_DISK_S = 30.0  # at the end, for the disk
SPOOLS, POLICIES = Path("runs/spools"), Path("runs/policies")  # folders of robots


@dataclass(frozen=True)
class PolicyOfServer:
    """``folder`` keeps the server's policies, which one of ``keys`` has signed; ``make`` makes their decider."""

    folder: Path
    keys: TrustedKeys
    make: Callable[[Policy], Decide]


@dataclass(frozen=True)
class ServerConfig:
    """The server's address, this robot's name and credentials, and the folder that holds what is not sent yet.

    ``patience_s``: for how long the end waits for a server that is there and takes nothing.  ``policy``: the server's
    drives; None: whoever drives the session.
    """

    address: str
    robot: str
    folder: Path
    credentials: Credentials | None = None
    patience_s: float = 10.0
    policy: PolicyOfServer | None = None


@contextmanager
def streaming(session: Session, config: ServerConfig, show: Console) -> Iterator[Session]:
    """``session``, whose control steps are also sent.  A server that is not there costs nothing: they wait on the disk.

    Raises UserError for an address of another machine without credentials, credentials of another robot, and a folder
    that another process uses.
    """
    with ExitStack() as opened:
        spool = opened.enter_context(closing(Spool(config.folder, config.robot)))
        link = opened.enter_context(closing(Link(spool, LinkOptions(config.address), config.credentials)))
        policy = None
        if (of := config.policy) is not None:
            cache = PolicyCache(of.folder, of.keys)
            policy = opened.enter_context(closing(FleetPolicy(cache, link, session.spec, of.make, show)))
        sent = StreamedSession(session, spool, link, show, policy)
        try:
            yield sent
        finally:
            sent.finish()
            _wait(spool, link, config.patience_s)
            left, where = spool.unsent, f"robot {config.robot}, server {config.address}"
            told = f"{left} records wait in {config.folder} and are sent next time" if left else "everything is stored"
            show.print(f"{where}: {told}", highlight=False)


class StreamedSession(Session):
    """A ``Session`` that gives every control step of ``session`` to ``spool``, in a thread that encodes pictures.

    With ``policy``, that decides, whoever else would.
    """

    def __init__(
        self, session: Session, spool: Spool, link: Link, show: Console, policy: FleetPolicy | None = None
    ) -> None:
        self._session, self._spool, self._link, self._show, self._policy = session, spool, link, show, policy
        self._thread = ThreadPoolExecutor(1, "streaming", initializer=step_back)
        self._working: deque[Future[None]] = deque()
        self._run, self._said = uuid.uuid4().hex[:12], ""  # episodes of all runs have different names
        self.spec = session.spec
        spool.put("event", pack_introduction(session.spec))

    def display(self, show: Console, episodes: int) -> Display:
        return self._session.display(show, episodes)

    def prepare(self, title: str) -> None:
        """As the session does; what the server or the disk has to say is printed before."""
        state = self._link.status()
        news = "; ".join(one for one in (state.notice, state.trouble, self._spool.trouble) if one)
        if news and news != self._said:
            self._show.print(f"{news} ({self._spool.unsent} records are not sent)", highlight=False, markup=False)
        self._said = news
        if self._policy is not None:
            self._policy.ready()
        self._session.prepare(title)

    def play(self, decide: Decide, number: int, seed: int) -> Generator[ControlStep]:
        name, records = f"{self._run}-{number}", list[Record]()
        with closing(self._session.play(self._policy or decide, number, seed)) as steps:
            for step in steps:
                records.append(step.record)
                self._do(self._step, step, name, records[0].captured)
                yield step
        if records:
            self._do(self._end, records, name, self._task(step))

    def close(self) -> None:
        self._session.close()

    def finish(self) -> None:
        """Everything that was played is in the spool; raises what went wrong on the way there."""
        self._thread.shutdown()
        while self._working:
            self._working.popleft().result()

    def _do(self, *work: object) -> None:
        self._working.append(self._thread.submit(*work))  # type: ignore[arg-type]
        while self._working and self._working[0].done():
            self._working.popleft().result()

    def _step(self, step: ControlStep, name: str, start: float) -> None:
        payload = fleet_step(step, start).payload(QUALITY)
        self._put("step", payload, name, self._task(step), step.record, step.record.intervened)

    def _end(self, records: Sequence[Record], name: str, task: str) -> None:
        """The end of an episode belongs to the version that it was played with, whoever chose the last step."""
        person = any(record.intervened for record in records)
        version = max(record.policy_version for record in records)
        last = replace(records[-1], policy_version=version)
        self._put("episode_end", episode_end(records).payload(), name, task, last, person)

    def _put(self, kind: str, payload: bytes, name: str, task: str, record: Record, person: bool) -> None:
        self._spool.put(
            kind,
            payload,
            episode=name,
            task=task,
            policy_version=record.policy_version,
            intervened=person,
            captured_ns=round(record.captured * 1e9),
        )

    def _task(self, step: ControlStep) -> str:
        return self.spec.tasks[int(step.obs.task[0])]


def _wait(spool: Spool, link: Link, patience: float) -> None:
    """Until the server has everything, for as long as it is there and takes some of it."""
    spool.flush(_DISK_S)
    until, left = time.monotonic() + patience, spool.unsent
    while spool.unsent and time.monotonic() < until:
        time.sleep(0.02)
        if spool.unsent < left:
            until, left = time.monotonic() + patience, spool.unsent
        state = link.status()
        if state.trouble and not state.connected:
            return


def to_server(
    file: str, address: str, credentials: str, trust: str | None, settings: EpisodesConfig, show: Console
) -> Callable[[Session], AbstractContextManager[Session]]:
    """The way of what the robot of ``file`` plays to the server at ``address``.

    ``credentials`` is the folder of the robot's certificate, "" for none.  With ``trust`` the server's policy drives
    (:func:`policy_of_server`), None: whoever drives the session.
    """
    identity = load_credentials(Path(credentials), "robot") if credentials else None
    policy, robot = None, identity.name if identity else Path(file).stem
    if trust is not None:
        policy = policy_of_server(robot, credentials, trust, partial(decider_of, settings=settings))
    server = ServerConfig(address, robot, SPOOLS / robot, identity, policy=policy)
    return partial(streaming, config=server, show=show)


def policy_of_server(robot: str, credentials: str, trust: str, make: Callable[[Policy], Decide]) -> PolicyOfServer:
    """The server's policies for ``robot``, signed by the key whose public half is in the file ``trust``, "" for that of
    ``credentials``; raises UserError where there is neither.
    """
    path = Path(trust) if trust or not credentials else Path(credentials) / PUBLIC_KEY
    if path == Path():
        raise UserError(
            "Nobody says whose policies this robot may run, so it takes none from the server; add --signing-key with "
            "the signing.pub of the fleet's folder, --credentials, or a --policy of your own."
        )
    try:
        keys = TrustedKeys([path.read_bytes()])
    except OSError as error:
        raise UserError(
            f"the key of the fleet's policies {str(path)!r} cannot be read ({error.strerror}), so none is run; copy "
            "signing.pub of the fleet's folder, or of its certificates, to this robot."
        ) from error
    return PolicyOfServer(POLICIES / robot, keys, make)


def fleet_step(one: ControlStep, start: float) -> FleetStep:
    """What was seen and done in ``one``, of an episode whose first measurement was captured at ``start``."""
    labels = {name: np.asarray(value[0]) for name, value in labels_of([one.record], start).items()}
    images = {name: image[0] for name, image in one.obs.images.items()}
    action = one.record.executed.astype(np.float32)
    return FleetStep(images, np.asarray(one.obs.state)[0], int(one.obs.time[0]), action, labels)


def episode_end(records: Sequence[Record]) -> EpisodeEnd:
    """How the episode of ``records`` ended."""
    last = records[-1]
    return EpisodeEnd(
        outcome=outcome_of(records),
        steps=len(records),
        intervened=sum(record.intervened for record in records),
        clipped=sum(bool(record.clipped.any()) for record in records),
        seconds=float(last.captured - records[0].captured),
    )


_LOOK_S = 0.2  # how often it is looked what the server wants
_AGAIN_S = 2.0  # until a download that broke is tried again


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
        self, cache: PolicyCache, server: Link, spec: EnvSpec, make: Callable[[Policy], Decide], show: Console
    ) -> None:
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
    from vla_rl.recipes.fleet.publishing import answer
    from vla_rl.serving.served import servable_spec

    golden, bounds = cached.manifest.golden, servable_spec(policy).action
    found, wanted = answer(policy, cached.observation, golden.seed), np.array(golden.action)
    span = np.asarray(bounds.high, np.float64) - np.asarray(bounds.low, np.float64)
    if found.shape != wanted.shape or not (np.abs(found - wanted) <= golden.tolerance * span).all():
        raise ContractError(
            "it answers its golden observation otherwise than where it was published, so the version in use stays; "
            "look for another torch on this machine, or publish it again."
        )
