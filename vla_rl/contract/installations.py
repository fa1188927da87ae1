"""Libraries of others in virtual environments of their own, so that none of them dictates what else is installed.

``Installations.install`` makes one below :func:`home` and writes ``lock.txt`` (``pip freeze``) when everything in it
works; without that file it counts as unfinished and is never used.  Ours have lists of pins; a user's own is made from
a requirements file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load

State: TypeAlias = Literal["missing", "unfinished", "outdated", "ready"]
HOME = "VLA_RL_HOME"
_ROOT = Path(__file__).resolve().parents[2]
_NEWEST = 20  # minor version of Python 3 that is looked for
_CONTRACT = ("numpy", "msgpack")  # what vla_rl.contract needs beside a user's own requirements


@dataclass(frozen=True)
class Shipped:
    """What one of our installations needs beside its pins.

    probe      Python code that has to run in it
    files      {path below its site-packages: where its files come from}, which no package brings
    variables  environment variables of its processes; "{folder}" is the installation's folder
    pip        more words for pip: pins are complete, except beside torch, whose own packages differ between machines
    prepare    "module:function" that is called with the folder and the report when pip is done
    python     the oldest minor version of Python 3 that it runs on
    """

    probe: str
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    pip: tuple[str, ...] = ("--no-deps",)
    prepare: str = ""
    python: int = 11


@dataclass(frozen=True)
class Installation:
    """The virtual environment called ``name`` in ``folder``; it may not exist yet.

    shipped  what it needs beside its requirements; None for one that is not ours
    pins     its requirements where it is ours
    """

    name: str
    folder: Path
    shipped: Shipped | None
    pins: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        found = sorted((self.folder / "venv" / "lib").glob("python*/site-packages"))
        return found[0] if found else self.folder / "venv" / "lib" / "python" / "site-packages"

    @property
    def lock(self) -> Path:
        """What is installed, exactly; it exists only when the installation is complete."""
        return self.folder / "lock.txt"

    @property
    def needs(self) -> Shipped:
        """What it needs beside its requirements; one that is not ours needs what the contract does."""
        return self.shipped or Shipped("", pip=_CONTRACT)

    @property
    def requirements(self) -> Path:
        return self.pins if self.shipped else self.folder / "requirements.txt"

    def state(self) -> State:
        """Whether it can be used: only when it is "ready"."""
        if not self.folder.exists():
            return "missing"
        if not (self.lock.exists() and self.python.exists() and self.requirements.exists()):
            return "unfinished"
        first = self.lock.read_text(encoding="utf-8").partition("\n")[0]
        return "ready" if first == _fingerprint(self.requirements) else "outdated"

    def missing_files(self) -> dict[Path, str]:
        """{path: where its files come from} of what no package brings and is not there."""
        places = {self.site_packages / path: text for path, text in self.needs.files.items()}
        return {path: text for path, text in places.items() if not path.exists()}

    def version(self) -> str:
        """The first pin of its lock, "name==version", which is the library itself; "" when it is not ready."""
        if self.state() != "ready":
            return ""
        wanted = _names(self.requirements)[:1]
        pins = self.lock.read_text(encoding="utf-8").splitlines()[1:]
        return next((pin for pin in pins if _name(pin) in wanted), "")


def home() -> Path:
    """``$VLA_RL_HOME``, otherwise ``~/.cache/vla-rl``: what is made once for all runs."""
    return Path(os.environ.get(HOME) or Path.home() / ".cache" / "vla-rl")


class Installations:
    """Those of one kind: ``vla-rl KIND install NAME`` makes one in ``KIND`` below :func:`home`."""

    def __init__(self, kind: str, what: str, pins: Path, shipped: Mapping[str, Shipped]) -> None:
        """``what`` one of them holds, in words; ``shipped`` are ours, with the requirements NAME.txt in ``pins``."""
        self.kind, self.what, self.pins, self.shipped = kind, what, pins, shipped

    def one(self, name: str) -> Installation:
        """The installation ``name``, whether it exists or not."""
        return Installation(name, home() / self.kind / name, self.shipped.get(name), self.pins / f"{name}.txt")

    def known(self) -> list[Installation]:
        """Ours, installed or not, and those of the user."""
        folder = home() / self.kind
        made = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
        return [self.one(name) for name in [*self.shipped, *sorted(made - self.shipped.keys())]]

    def find(self, name: str) -> Installation:
        """The installation ``name``; raises UserError with the command that makes it unless it is ready."""
        found, command = {one.name: one for one in self.known()}, f"vla-rl {self.kind} install {name}"
        if name not in found:
            raise UserError(
                f"no installation is called {name!r}, so nothing can run in it; {did_you_mean(name, found)}  One of "
                f"your own is made by '{command} --requirements FILE'."
            )
        state = found[name].state()
        if state != "ready":
            why = {"missing": "not installed", "unfinished": "half installed", "outdated": "installed with other pins"}
            raise UserError(f"{name} is {why[state]}, so it cannot run; run '{command}' first.")
        return found[name]

    def child_environment(self, name: str) -> dict[str, str]:
        """The environment variables of a process that runs in installation ``name``.

        It imports ``vla_rl`` and ``sims`` from here, and nothing else of this installation.  Raises what :meth:`find`
        does.
        """
        return _variables(self.find(name))

    def install(
        self,
        name: str,
        report: Callable[[str], None] = lambda line: None,
        requirements: Path | None = None,
        python: str = "",
    ) -> Installation:
        """Make installation ``name``, or finish or renew it; returns at once when it is ready.

        ``requirements`` (a pip file) names the packages of one that is not ours, ``python`` the interpreter of its
        virtual environment ("": this one, or one on the path that is new enough); ``report`` is called with every line
        that pip prints.  Two at once wait for each other.  Raises UserError with pip's last words when a package cannot
        be had, where no interpreter is new enough, and when the folder cannot be written.
        """
        made, own = self.one(name), self._own_requirements(name, requirements)
        python = python or _interpreter(made, self.kind)
        try:
            made.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            cure = f"set {HOME} to a folder that can be written"
            raise UserError(f"{made.folder} cannot be made ({error}), so nothing was installed; {cure}.") from error
        with _only_one(made.folder.with_suffix(".busy"), report):
            if own is not None:
                made.requirements.write_text(own, encoding="utf-8")
            if made.state() != "ready":
                self._make(made, report, python)
        return made

    def _own_requirements(self, name: str, requirements: Path | None) -> str | None:
        """The text of ``requirements``; raises UserError where they or ``name`` cannot be meant."""
        if name in self.shipped and requirements is not None:
            raise UserError(
                f"the packages of {name!r} are pinned by vla-rl, so it takes no --requirements; leave it out."
            )
        if not name.isidentifier():
            raise UserError(f"{name!r} is no name of an installation, so none is made; use letters, digits and _.")
        try:
            own = None if requirements is None else requirements.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{requirements} cannot be read ({error}), so nothing was installed; name a file."
            ) from error
        if own is None and not self.one(name).requirements.exists():
            raise UserError(
                f"no {self.what} of ours is called {name!r}, so nothing was installed; "
                f"{did_you_mean(name, self.shipped)}  Give --requirements FILE for one of your own."
            )
        return own

    def _make(self, made: Installation, report: Callable[[str], None], python: str) -> None:
        made.lock.unlink(missing_ok=True)
        fingerprint = _fingerprint(made.requirements)
        # From nothing each time, also after a kill: pip's cache makes that cheap, and no package of other pins stays.
        self._run([python, "-m", "venv", "--clear", str(made.folder / "venv")], made, report)
        pip = [str(made.python), "-m", "pip", "--disable-pip-version-check"]
        self._run([*pip, "install", "-r", str(made.requirements), *made.needs.pip], made, report)
        if made.needs.prepare:
            load(made.needs.prepare)(made.folder, report)
        report(f"trying what was installed for {made.name}")
        self._run([str(made.python), "-c", f"import vla_rl.contract.wire; {made.needs.probe}"], made, report)
        frozen = self._run([*pip, "freeze"], made, lambda line: None)
        new = made.lock.with_suffix(".new")
        new.write_text("\n".join([fingerprint, *frozen, ""]), encoding="utf-8")
        new.replace(made.lock)

    def _run(self, command: list[str], made: Installation, report: Callable[[str], None]) -> list[str]:
        """The lines that ``command`` prints, reported one by one; raises UserError with the last ones when it fails."""
        said: list[str] = []
        with _start(command, made) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    said.append(line.strip())
                    report(said[-1])
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise UserError(
                f"{made.name} could not be installed ({' '.join(command[:3])} ended with {process.returncode}: "
                f"{' / '.join(said[-5:])}), so it stays unusable; mend that and run 'vla-rl {self.kind} install "
                f"{made.name}' again."
            )
        return said


def _interpreter(made: Installation, kind: str) -> str:
    """The Python of this process, or the oldest on the path that is new enough; raises UserError where none is."""
    oldest = made.needs.python
    if sys.version_info >= (3, oldest):
        return sys.executable
    found = filter(None, (shutil.which(f"python3.{minor}") for minor in range(oldest, _NEWEST)))
    for python in found:
        if not subprocess.run([python, "-c", "import ensurepip"], capture_output=True, check=False).returncode:
            return python
    raise UserError(
        f"{made.name} needs Python 3.{oldest} or later and this one is 3.{sys.version_info.minor}, so nothing was "
        f"installed; install one beside it, which changes nothing here, and name it: vla-rl {kind} install {made.name} "
        f"--python /path/to/python3.{oldest}."
    )


def _start(command: list[str], made: Installation) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        return subprocess.Popen(command, **pipes, text=True, errors="replace", env=_variables(made))
    except OSError as error:
        raise UserError(
            f"{command[0]} cannot be started ({error}), so {made.name} was not installed; name a Python by --python."
        ) from error


def _variables(made: Installation) -> dict[str, str]:
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    for name, value in made.needs.variables.items():
        kept[name] = value.replace("{folder}", str(made.folder))
    return {**kept, "PYTHONPATH": str(_links(made)), "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}


def _links(made: Installation) -> Path:
    """A folder that holds links to our packages only; one for every place that vla-rl is imported from."""
    folder = made.folder / "imports" / hashlib.sha256(str(_ROOT).encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    for package in ("vla_rl", "sims"):
        with contextlib.suppress(FileExistsError):
            (folder / package).symlink_to(_ROOT / package)
    return folder


@contextlib.contextmanager
def _only_one(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that installs the same")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fingerprint(requirements: Path) -> str:
    return f"# made from requirements with SHA-256 {hashlib.sha256(requirements.read_bytes()).hexdigest()}"


def _names(requirements: Path) -> list[str]:
    lines = (line.strip() for line in requirements.read_text(encoding="utf-8").splitlines())
    return [_name(line) for line in lines if line and not line.startswith(("#", "-"))]


def _name(requirement: str) -> str:
    """``Some_Package==1.0`` -> ``some-package``."""
    for end in "=<>!~;[ @":
        requirement = requirement.partition(end)[0]
    return requirement.strip().lower().replace("_", "-")
