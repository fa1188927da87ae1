"""Episodes of an arm that go to a fleet's server while they are played; the arm waits for neither disk nor network."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from robot_drivers.decisions import Decide
from robot_drivers.record import Record
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.fleet.attempt import LinkOptions
from vla_rl.fleet.identity import Credentials, load_credentials
from vla_rl.fleet.introduction import pack_introduction
from vla_rl.fleet.link import Link
from vla_rl.fleet.policy_cache import PolicyCache
from vla_rl.fleet.signing import TrustedKeys
from vla_rl.fleet.spool import Spool
from vla_rl.recipes.fleet.policies import PUBLIC_KEY
from vla_rl.recipes.robots.drive import EpisodesConfig, decider_of
from vla_rl.recipes.robots.fleet_policy import FleetPolicy
from vla_rl.recipes.robots.fleet_step import episode_end, fleet_step
from vla_rl.recipes.robots.recording import step_back
from vla_rl.recipes.robots.session import ControlStep, Session
from vla_rl.recipes.robots.status import Display

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


class StreamedSession:
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
        spool.put("event", pack_introduction(session.spec))

    @property
    def spec(self) -> EnvSpec:
        """That of the session."""
        return self._session.spec

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

    def play(self, decide: Decide, number: int, seed: int) -> Iterator[ControlStep]:
        name, records = f"{self._run}-{number}", list[Record]()
        with closing(self._session.play(self._policy or decide, number, seed)) as steps:  # type: ignore[type-var]  # a generator
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
    policy, (robot, identity) = None, _identity(file, credentials)
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


def _identity(file: str, credentials: str) -> tuple[str, Credentials | None]:
    """The robot's name, that of its certificate where it has one, and its credentials."""
    identity = load_credentials(Path(credentials), "robot") if credentials else None
    return identity.name if identity else Path(file).stem, identity
