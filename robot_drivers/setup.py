"""Ask a person what a robot consists of, and write its file: ``vla-rl robot setup``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from robot_drivers.cameras.camera import open_camera
from robot_drivers.config import ARMS, CAMERAS, CHAIN, TELEOPERATORS, Part, RobotConfig
from robot_drivers.driver import Asks, RobotSpec, open_driver
from robot_drivers.kinematics import Chain
from robot_drivers.limits import MARGIN, Box, Limits
from robot_drivers.teleop.process import open_teleoperator
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load

_USUAL = 30.0  # pictures per second of a camera that does not say
_INDICES = 4  # cameras that are tried where the system has no list of them


@dataclass(frozen=True)
class FoundCamera:
    """A camera that gives pictures: its ``index`` for OpenCV, and what it delivers if nobody sets anything."""

    index: int | str
    width: int
    height: int
    fps: float

    def __str__(self) -> str:
        return f"{self.index} ({self.width}x{self.height} at {self.fps:g}/s)"


def serial_ports() -> dict[str, str]:
    """{port: what is plugged in}; none where pyserial is not installed."""
    try:
        from serial.tools.list_ports import comports
    except ModuleNotFoundError:
        return {}
    return {port.device: port.description for port in comports() if port.vid is not None}


def joysticks() -> dict[str, str]:
    """{device: its name} of Linux's joysticks."""
    return {str(path): path.name for path in sorted(Path("/dev/input").glob("js*"))}


def plugged_cameras(candidates: Sequence[int | str] | None = None) -> list[FoundCamera]:
    """Those of ``candidates`` (OpenCV's indices or paths; None: whatever this computer lists) that give a picture.

    None where OpenCV is not installed.  A camera that somebody else uses gives no picture either.
    """
    try:
        import cv2
    except ImportError:
        return []
    found = []
    for index in _listed() if candidates is None else candidates:
        capture = cv2.VideoCapture(index)
        try:
            read, image = capture.read() if capture.isOpened() else (False, None)
            if read and image is not None:
                found.append(
                    FoundCamera(index, image.shape[1], image.shape[0], capture.get(cv2.CAP_PROP_FPS) or _USUAL)
                )
        finally:
            capture.release()
    return found


def _listed() -> list[int]:
    """Linux lists its cameras; elsewhere the first few indices are tried."""
    if not Path("/dev").is_dir() or not Path("/sys/class").is_dir():
        return list(range(_INDICES))
    names = (path.name.removeprefix("video") for path in Path("/dev").glob("video*"))
    return sorted(int(name) for name in names if name.isdecimal())


_CHAINS = {ARMS["so101"]: CHAIN, ARMS["simulated"]: CHAIN}  # the kinematics that are known
_NAMES = ("front", "wrist", "side", "top")  # of cameras, while nobody says otherwise
_HOUR = 3600.0  # s; no episode is longer
_NONE = "none"


def setup(path: Path, ask: Asks, cameras: Callable[[], list[FoundCamera]] = plugged_cameras) -> RobotConfig:
    """Ask for arm, cameras, teleoperator, tasks, episodes and limits, and write the file ``path``.

    An answer that means nothing is asked for again.  ``cameras`` finds those of this computer.  Raises UserError where
    a file is already, before anything is asked.
    """
    if path.exists():
        raise UserError(f"{str(path)!r} exists already, so it is not overwritten; choose another name.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder {str(path.parent)!r}, so {path.name!r} cannot be written; make it first.")
    prompts = Prompts(ask)
    question = f"Which arm? {', '.join(ARMS)}, or module:Class of a driver of yours (Enter: so101)."
    driver = prompts.part(question, partial(_among, "arm", ARMS), open_driver, "so101")
    assert driver is not None, "every arm has a driver"
    spec = open_driver(driver.name, driver.options).spec
    seen = _cameras(prompts, cameras())
    devices = {**TELEOPERATORS, _NONE: ""}
    teleoperator = prompts.part(
        f"What does a person drive it by? {', '.join(devices)}, or module:Class of your own (Enter: keyboard).",
        partial(_among, "teleoperator", devices),
        open_teleoperator,
        "keyboard",
        lambda one: {"joints": len(spec.joints)},
    )
    tasks = _tasks(prompts)
    longest = RobotConfig.seconds
    seconds = prompts.until(
        f"Seconds of an episode, at most? (Enter: {longest:g})", partial(_number, 1, _HOUR), str(longest)
    )
    limits, kinematics = _limits(prompts, spec, driver.name)
    config = RobotConfig(driver, seen, teleoperator, limits, kinematics, tasks, seconds)
    config.save(path)
    return config


def _cameras(prompts: Prompts, found: list[FoundCamera]) -> dict[str, Part]:
    """{name: camera}, in the order in which a policy gets them."""
    seen: dict[str, Part] = {}
    while True:
        used = [camera.options.get("index", 0) for camera in seen.values()]
        left = [camera for camera in found if camera.index not in used]
        default = str(left[0].index) if left else _NONE
        there = f"Found: {', '.join(map(str, left))}." if left else "No other is found." if seen else "None is found."
        question = (
            f"{'Another' if seen else 'A'} camera? {there} Its number, device or address; realsense; module:Class of "
            f"your own; or none (Enter: {default})."
        )
        part = prompts.part(question, _camera, open_camera, default, partial(_size, left))
        if part is None:
            return seen
        name = next(one for one in (*_NAMES, f"camera{len(seen) + 1}") if one not in seen)
        seen[prompts.until(f"What is it called? (Enter: {name})", partial(_beside, seen), name)] = part


def _camera(answer: str) -> Part:
    """A number, or something like a path or an address, is a camera for OpenCV."""
    if answer.isdecimal() or "/" in answer:
        return Part(CAMERAS["opencv"], {"index": int(answer) if answer.isdecimal() else answer})
    return _among("camera", {**CAMERAS, _NONE: ""}, answer)


def _size(found: Sequence[FoundCamera], one: Part) -> dict[str, Any]:
    """The options of one of the cameras that were found: what it delivers by itself."""
    return next((asdict(camera) for camera in found if camera.index == one.options.get("index")), {})


def _beside(seen: Mapping[str, Any], answer: str) -> str:
    """A name that none of ``seen`` has."""
    if not answer.isidentifier():
        raise UserError(f"{answer!r} cannot name a camera; use letters, digits and _.")
    if answer in seen:
        raise UserError(f"There is a camera {answer!r} already.")
    return answer


def _tasks(prompts: Prompts) -> tuple[str, ...]:
    """The instructions; one without words where none is given."""
    tasks: list[str] = []
    while True:
        words = prompts.until(
            "Another task? (Enter: no more)"
            if tasks
            else "What is it told to do? For example: pick up the cube (Enter: nothing, it has one task without words)",
            str,
        )
        if not words:
            return tuple(tasks) or ("",)
        tasks += [words] if words not in tasks else []


def _limits(prompts: Prompts, spec: RobotSpec, arm: str) -> tuple[dict[str, Any] | None, str]:
    """The limits, None where they are those of every arm; and the kinematics that they need."""
    share = prompts.until("What share of its speed may it use at most? (Enter: 1)", partial(_number, 0.01, 1), "1")
    names = [joint.name for joint in spec.joints]
    kinematics = _CHAINS.get(arm) or prompts.until(
        "Kinematics of the arm, module:function, for a workspace? (Enter: none)", partial(_chain, names)
    )
    box = None
    if kinematics:
        box = prompts.until(
            "Where may its points be? x y z of the low corner and x y z of the high one, in m from its base (Enter: "
            "anywhere)",
            _box,
        )
    margin = 0.0 if arm == ARMS["simulated"] else MARGIN  # it rests at the end of a range
    if share == 1 and box is None and margin == MARGIN:
        return None, ""
    return Limits.of(spec, margin, box).scaled(share).to_json(), kinematics if box else ""


def _chain(joints: Sequence[str], answer: str) -> str:
    """The name of a function that makes the kinematics of ``joints``."""
    if answer:
        chain = load(answer)()
        if not isinstance(chain, Chain):
            raise UserError(f"{answer!r} makes no Chain of robot_drivers/kinematics.py.")
        chain.columns(joints)
    return answer


def _box(answer: str) -> Box | None:
    if not answer:
        return None
    try:
        corners = [float(word) for word in answer.replace(",", " ").split()]
    except ValueError:
        corners = []
    if len(corners) != 6:
        raise UserError(f"{answer!r} is not six numbers; write for example -0.1 -0.3 0 0.4 0.3 0.4.")
    return Box((corners[0], corners[1], corners[2]), (corners[3], corners[4], corners[5]))


T = TypeVar("T")


_PLAIN = {"str": str, "int": int, "float": float, "bool": bool}  # options of other types are for the file's editor
DEVICES: Mapping[str, Callable[[], dict[str, str]]] = {"port": serial_ports, "device": joysticks}
_YES = {"yes": True, "y": True, "true": True, "no": False, "n": False, "false": False}


class Prompts:
    """Asks by ``ask``; remembers which devices were given, so that none is offered twice."""

    def __init__(self, ask: Asks) -> None:
        self._ask = ask
        self._taken: set[str] = set()

    def until(self, question: str, read: Callable[[str], T], default: str = "") -> T:
        """What ``read`` makes of the answer, ``default`` for an empty one; asked again with what it raises.

        ``read`` raises UserError, ValueError or TypeError for an answer that means nothing.
        """
        wrong = ""
        while True:
            answer = self._ask(f"{wrong}{question}").strip() or default
            try:
                return read(answer)
            except (UserError, ValueError, TypeError, ImportError) as error:
                wrong = f"{error}\n"

    def part(
        self,
        question: str,
        read: Callable[[str], Part],
        make: Callable[[str, dict[str, Any]], object],
        default: str = "",
        offered: Callable[[Part], Mapping[str, Any]] = lambda named: {},
    ) -> Part | None:
        """The thing that the answer means, with one question for each of its plain options; None for none.

        ``read`` gives its name and the options that are known with it.  ``make`` raises for options that do not fit:
        then all is asked again.  ``offered`` are the options' defaults in place of those of the class.
        """

        def read_all(answer: str) -> Part | None:
            found = read(answer)
            if not found.name:
                return None
            options = {**found.options, **self._options(found, offered(found))}
            make(found.name, options)
            return Part(found.name, options)

        return self.until(question, read_all, default)

    def _options(self, found: Part, offered: Mapping[str, Any]) -> dict[str, Any]:
        given = {}
        for option in inspect.signature(load(found.name)).parameters.values():
            read = _reader(option)
            if read is None or option.name in found.options:
                continue
            default = offered.get(option.name, option.default)
            plugged = {one: what for one, what in DEVICES.get(option.name, dict)().items() if one not in self._taken}
            if default is inspect.Parameter.empty and plugged:
                default = next(iter(plugged))
            value = self.until(_question(option.name, default, plugged), partial(_or_default, read, default))
            if option.name in DEVICES:
                self._taken.add(str(value))
            if value != option.default:
                given[option.name] = value
        return given


def _among(kind: str, known: Mapping[str, str], answer: str) -> Part:
    """One of ``known`` {word: "module:Class"}, or any "module:Class" that can be loaded."""
    if answer in known:
        return Part(known[answer])
    if ":" not in answer:
        raise UserError(f"{answer!r} is no {kind} that is known; {did_you_mean(answer, known)}")
    load(answer)
    return Part(answer)


def _number(low: float, high: float, answer: str) -> float:
    try:
        value = float(answer)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise UserError(f"{answer!r} is no number from {low:g} to {high:g}.")
    return value


def _reader(option: inspect.Parameter) -> Callable[[str], Any] | None:
    """Reads an option of plain types; None for another."""
    if option.kind in (option.VAR_KEYWORD, option.VAR_POSITIONAL):
        return None
    names = str(option.annotation).replace(" ", "").split("|")
    kinds = {_PLAIN.get(name.removeprefix("<class'").removesuffix("'>")) for name in names}
    if None in kinds:
        return None

    def read(answer: str) -> Any:
        if kinds == {bool}:
            if answer.lower() not in _YES:
                raise UserError(f"{answer!r} is neither yes nor no.")
            return _YES[answer.lower()]
        if kinds == {str}:
            return "" if answer in ("''", '""') else answer  # Enter is taken
        try:
            value = json.loads(answer)
        except ValueError:
            value = answer
        if (float in kinds and type(value) is int) or type(value) in kinds:
            return value
        wanted = " or ".join("a whole number" if kind is int else "a number" for kind in kinds if kind is not str)
        raise UserError(f"{option.name} is {wanted}, and {answer!r} is none.")

    return read


def _or_default(read: Callable[[str], Any], default: Any, answer: str) -> Any:
    if not answer and default is inspect.Parameter.empty:
        raise UserError("This one is needed.")
    return read(answer) if answer else default


def _question(name: str, default: Any, found: Mapping[str, str]) -> str:
    there = ", ".join(f"{one} ({what})" for one, what in found.items())
    seen = f" Plugged in: {there}." if there else ""
    return f"{name}?{seen}" + ("" if default is inspect.Parameter.empty else f" (Enter: {default!r})")
