"""``vla-rl robot [setup | calibrate | check | home | teleop | record | replay | run] FILE ...``"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager as ContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.text import Text

from vla_rl.cli.override import override, positional, subcommand
from vla_rl.cli.push import PushWhenDone
from vla_rl.contract.config import Checked, within
from vla_rl.contract.errors import UserError
from vla_rl.recipes.robots import desk
from vla_rl.recipes.terminal import console

if TYPE_CHECKING:
    from vla_rl.recipes.robots.drive import EpisodesConfig, Scenes
    from vla_rl.recipes.robots.session import Session


@dataclass(frozen=True)
class Robot:
    """A robot arm on your desk, described by a file such as my_arm.json.

    setup FILE asks for arm, cameras, teleoperator, tasks and limits, and writes the file.
    calibrate FILE walks you through the arm's own calibration.
    check FILE looks at everything and moves nothing.
    home FILE writes into the file where the arm is now: it goes there before each episode.
    teleop FILE lets you drive by the file's teleoperator; nothing is recorded.
    record FILE records episodes as a LeRobotDataset v3.0, and sends them to a fleet's --server.
    replay FILE --dataset FOLDER does a recorded episode again, at a quarter of its speed unless you say otherwise.
    run FILE --policy CHECKPOINT, or --server for that of a fleet, lets a policy drive, at a quarter of the speed unless
    you say otherwise; with --dry-run the commands are printed and not sent.

    "simulated" instead of a file is an SO-101 that everybody has.  --help after any of them shows its options.
    """


@dataclass(frozen=True)
class Setup:
    """Ask for arm, cameras, teleoperator, tasks and limits, with what is plugged in, and write the robot's file."""


@dataclass(frozen=True)
class Calibrate:
    """The arm's own calibration, by hand: it is limp meanwhile.  SO-101 arms keep it where LeRobot does."""


@dataclass(frozen=True)
class Check(Checked):
    """Ports, rates, limits, calibration and latency of a robot, and whether it delivers what it declares.

    Nothing moves.
    """

    seconds: float = within(3.0, 0.1, 600)  # how long arm, cameras and teleoperator are measured, each
    policy: str = (
        ""  # checkpoint, run or server address, whose decisions are timed: which execution is it fast enough for?
    )


@dataclass(frozen=True)
class Home:
    """Write into the robot's file that the arm's home is where it is now; nothing moves.

    Before each episode of record and run the arm goes there slowly, once a person has pressed Enter.
    """


@dataclass(frozen=True)
class Teleop(Checked):
    """Drive the arm by the teleoperator of its file, through the supervisor, until Ctrl-C; nothing is recorded."""

    speed: float = within(1.0, 0.01, 1)  # share of the velocity limits


@dataclass(frozen=True)
class Record(PushWhenDone):
    """Record episodes as a LeRobotDataset v3.0: what was seen and executed, and who chose it in every control step.

    A person drives by the teleoperator of the robot's file; its keys end an episode as success, failure or redo.
    """

    out: str = "runs/recorded"
    episodes: int = within(50, 1, 100000)
    policy: str = ""  # a checkpoint, run or server that drives until a person takes over; "expert" on a simulated one
    speed: float = within(1.0, 0.01, 1)  # share of the velocity limits
    execution: Literal["open_loop", "receding_horizon", "temporal_ensembling"] = "open_loop"
    steps: int = within(8, 1, 1000)  # actions of a chunk before the next is asked for, with a receding horizon
    real_time: Literal["", "identity", "vjp"] = ""  # real-time chunking: how the next chunk is guided by the last
    delay: float = within(0.0, 0, 10000)  # ms from an observation to its chunk, on a simulated robot
    person: bool = False  # a scripted person watches a simulated robot, and takes over where it fails
    seed: int = 1  # of the training run that the episodes are for, and of the policy's noise
    server: str = ""  # HOST:PORT of vla-rl serve, which gets every control step as it is played; "": none
    credentials: str = ""  # folder of this robot's certificate, for a server on another machine


@dataclass(frozen=True)
class Replay(Checked):
    """Do a recorded episode again, through the supervisor, after a slow way to where it began.

    Says how far each joint was from the recording.  A simulated robot is put into the recorded scene.
    """

    dataset: str = "runs/recorded"
    episode: int = within(0, 0, 1_000_000)
    speed: float = within(0.25, 0.01, 1)  # of the recording's own, and share of the velocity limits


@dataclass(frozen=True)
class Run(Record):
    """Let a policy drive, with a person ready to take over; a simulated robot plays test scenes without a server."""

    out: str = ""  # where episodes are recorded; "": nowhere
    episodes: int = 10
    speed: float = 0.25
    execution: Literal["open_loop", "receding_horizon", "temporal_ensembling"] = "receding_horizon"
    signing_key: str = ""  # signing.pub of the fleet whose policies drive without --policy; "": that of --credentials
    dry_run: bool = False  # measure the arm, print every command, send none

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning, and for a recording of what was not done."""
        super().__post_init__()
        if self.dry_run and self.out:
            raise UserError("A dry run executes nothing, so there is nothing to record; leave --out or --dry-run out.")
        if self.dry_run and self.server:
            raise UserError("A dry run executes nothing, so there is nothing to send; leave --server or --dry-run out.")
        if self.push and not self.out:
            raise UserError("without --out nothing is recorded, so there is nothing to push; name a folder with --out.")


def robot(arguments: Sequence[str]) -> None:
    """Run one of the commands."""
    given = list(arguments)
    if not given or given[0].startswith("-"):
        override(Robot(), given or ["--help"], "vla-rl robot COMMAND FILE")
        return
    subcommand("robot", given, {name: partial(_on_file, name) for name in COMMANDS})


def _on_file(name: str, given: list[str]) -> None:
    """Do the command ``name`` with the robot's file, the first of ``given``, and the options after it."""
    options, do = COMMANDS[name]
    (path,), rest = positional(given, f"robot {name} FILE", options(), "my_arm.json")
    do(Path(path), override(options(), rest, f"vla-rl robot {name} FILE"))


def _setup(path: Path, config: Setup) -> None:
    desk.setup(path, console)
    console.print(f"{path} is written; next: vla-rl robot calibrate {path}, then vla-rl robot check {path}")


def _calibrate(path: Path, config: Calibrate) -> None:
    desk.calibrate(path, console)
    console.print(f"calibrated; next: vla-rl robot check {path}")


def _check(path: Path, config: Check) -> None:
    wrong = desk.check(str(path), config.seconds, config.policy, console)
    if wrong:
        raise UserError(f"{wrong} of these must be mended before the arm is driven; nothing was moved.")


def _home(path: Path, config: Home) -> None:
    console.print(Text(f"home is where the arm is: {desk.home(path)}"))


def _teleop(path: Path, config: Teleop) -> None:
    from vla_rl.recipes.robots import desk, drive

    desk.teleoperate(drive.robot_config(str(path)), config.speed, console)


def _record(path: Path, config: Record) -> None:
    _drive(str(path), config, "demonstrations")


def _replay(path: Path, config: Replay) -> None:
    from vla_rl.recipes.robots import drive, replay

    robot = drive.robot_config(str(path))
    console.print(Text(str(replay.replay(robot, Path(config.dataset), config.episode, config.speed, console))))


def _run(path: Path, config: Run) -> None:
    if not config.policy and not config.server:
        raise UserError("robot run needs a policy to run, for example --policy runs/so101, or a --server that has one.")
    # A server may learn from what it gets, and never from a test.
    _drive(str(path), config, "reinforcement" if config.server else "test")


def _drive(name: str, config: Record, scenes: Scenes) -> None:
    from vla_rl.recipes.robots import drive, session

    robot = drive.robot_config(name)
    execution = drive.execution(config.execution, config.steps, config.speed, config.delay / 1000)
    played = config.policy, config.episodes, config.seed, execution, config.real_time
    settings = drive.EpisodesConfig(*played, scenes, config.person)
    if isinstance(config, Run) and config.dry_run:
        summary = drive.drive(session.dry(robot), settings, None, console)
        console.print(f"{summary.clipped} of {summary.steps} commands were clipped; none was sent to the arm")
        return
    out, through = Path(config.out) if config.out else None, _through(name, config, settings)
    summary = drive.drive(robot, settings, out, console, through)
    console.print(f"{summary}{f': {config.out}' if config.out else ''}")
    config.push_dataset(Path(config.out), ())


def _through(name: str, config: Record, settings: EpisodesConfig) -> Callable[[Session], ContextManager[Session]]:
    """What the session of the robot ``name`` is played through: its way to the server, if there is one."""
    if not config.server:
        return nullcontext
    from vla_rl.recipes.robots import streaming

    key = config.signing_key if isinstance(config, Run) and not config.policy else None
    return streaming.to_server(name, config.server, config.credentials, key, settings, console)


COMMANDS: dict[str, tuple[type, Callable[[Path, Any], None]]] = {
    "setup": (Setup, _setup),
    "calibrate": (Calibrate, _calibrate),
    "check": (Check, _check),
    "home": (Home, _home),
    "teleop": (Teleop, _teleop),
    "record": (Record, _record),
    "replay": (Replay, _replay),
    "run": (Run, _run),
}
