"""What data of others may name: classes of ours.  Everything else is loaded only if the user's own program wrote it.

A checkpoint, run or robot file says by name which classes and functions it is made of.  :func:`read_named` reads such a
file and refuses one that names code, programs or files which are not ours, unless this user's vla-rl wrote exactly that
content on this machine (:func:`mark`, outside of the folder), or the command had ``--trust``.  What was accepted is
noted, and :func:`named_class` turns a name into a class only if it is in our table or was noted.  Processes that a run
starts get these names from the one that starts them (``vla_rl/experience/worker.py``).
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import secrets
import stat
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.hub import is_pinned
from vla_rl.contract.load import OURS, load, our_classes, search_working_folder

if TYPE_CHECKING:
    import numpy as np

OPTION = "--trust"
CONFIG_FILE = "vla_rl_config_"  # of the module that a config file becomes; config.json names its classes by it
# Environments that start no program and read no file of their options; the others are named by the user.
ENVIRONMENTS = frozenset(
    {"", "counting", "genesis", "lift", "maniskill_lift", "mixed", "place", "point_mass", "push", "so101", "warp"}
)
MOST_BYTES = 64 << 20  # of a JSON file
_ENV = "EnvConfig"
_PROGRAMS = ("python", "variables", "installation", "address", "modules", "wrappers")  # options that reach outside
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_][\w.]*")
_CLASS_NAME = re.compile(r"[A-Z]\w*")
_DEVICE = re.compile(r"(cuda|cpu):\d+")
_DEEPEST = 100  # lists and objects inside one another
KINDS = ("class", "policy", "reward", "world_model", "prompts")  # entries that name a class
_PATHS = ("folder", "policy", "dataset", "demonstrations", "init_from")  # entries that name what lies elsewhere
_SHARED_BLOBS = ".huggingface-shared-blobs"  # by which Hugging Face's cache marks what several repositories share
_HARMLESS = 256 << 20  # bytes that anything may take in memory
_LARGEST = 4096  # number in an environment's options: pixels, processes, steps

_accepted: set[str] = set()  # modules that may be loaded by names in data
_all: list[bool] = []  # [True] after --trust


def trust_all() -> None:
    """Accept, and mark, everything that this process reads: the user wrote ``--trust``."""
    _all[:] = [True]


def options() -> list[str]:
    """What a command that this one starts must be given, so that it trusts as much."""
    return [OPTION] if _all else []


def accept(modules: Iterable[str]) -> None:
    """Let data name what is in ``modules``: this program, or the one that started it, named them itself."""
    _accepted.update(modules)


def accepted() -> list[str]:
    """For :func:`accept` in a process that this one starts."""
    return sorted(_accepted)


def is_ours(module: str) -> bool:
    """Whether the name ``module`` belongs to one of our packages and starts no program when it is imported."""
    first, *others = module.split(".")
    return first in OURS and "__main__" not in others


def named_class(target: object) -> type:
    """The class that data name: ours by its bare name, another by ``"module:Class"``.

    Raises UserError for what is none of ours and was not accepted; a missing module raises its own ImportError.
    """
    if isinstance(target, str) and target in our_classes():
        ours: type = load(f"{our_classes()[target]}:{target}")
        return ours
    module = str(target).partition(":")[0]
    if is_ours(module):
        raise UserError(
            f"{_short(target)} is how earlier versions of vla-rl named a class, so what names it cannot be read; write "
            "it again with this version."
        )
    if not isinstance(target, str) or module not in _accepted:
        near = did_you_mean(str(target), our_classes()) if _CLASS_NAME.fullmatch(str(target)) else _cure()
        raise UserError(f"{_short(target)} is no class of vla-rl, so it is not loaded from data; {near}")
    found = load(target)
    if not isinstance(found, type):
        raise UserError(f"{_short(target)} is no class, so what names it cannot be used; check its config.json.")
    return found


def read_json(path: Path) -> Any:
    """The JSON in ``path``; raises OSError, or ValueError for a file that is no JSON, too large or nested too deep."""
    return parse_json(read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """A file of others that is read at once; raises OSError, or ValueError for one that is too large."""
    check_file(path)
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, at most {MOST_BYTES:,} are read")
    with path.open("rb") as file:
        return file.read(MOST_BYTES)  # a device has no size


def parse_json(data: bytes) -> Any:
    """The value of ``data``; raises ValueError, also where it is nested too deep."""
    try:
        value = json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for one in level if isinstance(one, dict | list) for item in _items(one)]
        if not level:
            return value
    raise ValueError("it is nested too deep")


def check_folder(folder: Path) -> int:
    """Bytes of the files in ``folder``; raises UserError where something in it is no plain file of its own.

    So is a link that leads out, except to the ``blobs`` of Hugging Face's cache, a pipe, a device, and a large file of
    holes.  With --trust all are taken.
    """
    size, left = 0, [folder] if folder.is_dir() else []
    while left:
        here = left.pop()
        with suppress(FileNotFoundError), os.scandir(here) as found:  # others may be writing
            for item in found:
                with suppress(FileNotFoundError):
                    size += _checked_item(item, folder)
                    left += [Path(item.path)] if item.is_dir(follow_symlinks=False) else []
    return size


def _checked_item(item: os.DirEntry[str], folder: Path) -> int:
    if item.is_symlink():
        check_link(Path(item.path), folder)
    if item.is_file():
        size = item.stat().st_size
        _check_holes(Path(item.path), size)
        return size
    mode = item.stat(follow_symlinks=False).st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISLNK(mode) or stat.S_ISSOCK(mode)):
        raise UserError(f"{item.path!r} is no file but a pipe or device, so its folder is not used; remove it.")
    return 0


def check_link(path: Path, folder: Path) -> None:
    """Raise UserError for a ``path`` in ``folder`` that is a link out of it."""
    root, target = folder.resolve(), path.resolve()
    repositories = [parent.parent for parent in root.parents if parent.name == "snapshots"]
    shared = [parent.parent / "blobs" for parent in repositories if "--" in parent.name]
    homes = [root, *(parent / "blobs" for parent in repositories)]
    homes += [store for store in shared if (store / _SHARED_BLOBS).is_file()]
    if not _all and not any(target.is_relative_to(home) for home in homes):
        raise UserError(
            f"{str(path)!r} leads out of its folder to {os.readlink(path)!r}, so the folder is not used; put a copy in "
            f"its place, or add {OPTION}."
        )


def _check_holes(path: Path, size: int) -> None:
    """Raise UserError for a file whose size is mostly made of holes, which need no room on the disk."""
    if size <= _HARMLESS or _all:
        return
    stored = end = 0
    with path.open("rb") as file:
        try:
            while end < size:
                begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                stored += end - begin
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data after there
                return
    try:
        check_memory(size, stored)
    except ValueError as error:
        raise UserError(f"{str(path)!r} is nearly empty ({error}), so it is not read; copy it again.") from error


def check_file(path: Path) -> None:
    """Raise UserError for a link out of its folder, OSError or ValueError for what is no file."""
    if path.is_symlink():
        check_link(path, path.parent)
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file")


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` of others, none of them pickled.

    Raises OSError, or ValueError for a file that is damaged, or larger in memory than its bytes explain.
    """
    import numpy as np  # `vla-rl --help` reads none

    check_file(path)
    try:
        with zipfile.ZipFile(path) as file:
            check_memory(sum(item.file_size for item in file.infolist()), path.stat().st_size, ratio=200)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, MemoryError, NotImplementedError, RuntimeError) as error:
        raise ValueError(str(error) or "it needs too much memory") from error


def check_memory(size: int, stored: int, ratio: int = 2000) -> None:
    """Raise ValueError for ``size`` bytes in memory that come of so few, ``stored``, that they can only do harm."""
    if size > max(_HARMLESS, ratio * stored):
        raise ValueError(f"it would take {size / 1e9:,.1f} GB of memory, and its files have {stored:,} bytes")


def read_named(path: Path, part: str = "") -> Any:
    """The JSON in ``path``, or its entry ``part``, whose names may be loaded.

    Raises OSError and ValueError as :func:`read_json`, and UserError when it names what is not ours and this user's
    vla-rl did not write it.
    """
    data = read_bytes(path)
    value = parse_json(data)
    if part:
        value = value.get(part) if isinstance(value, dict) else None
    if found := next(reaching(value), ""):
        require_own(data, f"{str(path)!r} names {found}")
        accept(modules_in(value))
    return value


def names_ours_only(value: Any) -> bool:
    """Whether ``value`` leads to nothing but our own classes, so that anybody may have written it."""
    return not any(reaching(value))


def check_options(options: Any, who: str) -> None:
    """Raise UserError where ``options`` of an environment, which ``who`` sent, name code, programs or files."""
    if not _all and (found := next(chain(_options(options), reaching(options)), "")):
        raise UserError(
            f"{who} names {found}, which it may not choose here, so nothing was made; start the server with "
            f"{OPTION} where everybody who has its key may run programs."
        )


def require_own(data: bytes, what: str) -> None:
    """Raise UserError, which begins with ``what``, unless this user's vla-rl wrote ``data``; with --trust, mark it."""
    if _all:
        mark(data)  # asked once
    elif (digest := hashlib.sha256(data).hexdigest()) not in _accepted:
        origins = _read_mark(_marks() / digest)
        if origins is None:
            raise UserError(
                f"{what}, and your own vla-rl did not write it on this machine, so it is not used; {_cure()}"
            )
        for name, now in _origins(data).items():
            if now != origins.get(name):
                raise UserError(
                    f"{what}, and the module {name!r} is not the one of {origins.get(name)!r} that it was written "
                    f"with, so it is not used; run the command where that is found, or add {OPTION} once."
                )
        accept([digest])


def mark_file(path: Path) -> None:
    """Remember that this user's vla-rl wrote ``path``, if anybody else's would be refused."""
    data = path.read_bytes()
    if path.suffix != ".json" or any(reaching(parse_json(data))):
        mark(data)


def mark(data: bytes) -> None:
    """Remember that this user's vla-rl wrote ``data``: in the user's state folder, which no copied folder reaches."""
    digest = hashlib.sha256(data).hexdigest()
    accept([digest])
    place = _marks() / digest
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(place, json.dumps(_origins(data)).encode())
    except OSError as error:
        print(
            f"vla-rl: {str(place.parent)!r} cannot be written ({error.strerror}), so later commands will not know this "
            f"as your own; add {OPTION} to them.",
            file=sys.stderr,
        )


def modules_in(value: Any) -> set[str]:
    """The modules of all names "module:name" in ``value``."""
    if isinstance(value, str):
        return {value.partition(":")[0]} if _NAME.fullmatch(value) else set()
    return set().union(*(modules_in(item) for item in _items(value))) if isinstance(value, dict | list) else set()


def _marks() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "vla-rl" / "written"


def _read_mark(place: Path) -> Mapping[str, str] | None:
    """{package: where it was} of a mark; None when there is none of this user."""
    try:
        if place.stat().st_uid != os.getuid():
            return None
        return dict(json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _origins(data: bytes) -> dict[str, str]:
    """Where the packages lie that ``data`` names and that are not ours: one of that name elsewhere is another."""
    try:
        names = {module.partition(".")[0] for module in modules_in(parse_json(data))}
    except ValueError:  # a Python file
        return {}
    search_working_folder()
    found = {}
    for name in sorted(name for name in names if name not in OURS and not name.startswith(CONFIG_FILE)):
        spec = PathFinder.find_spec(name)
        places = (spec.origin, *(spec.submodule_search_locations or ())) if spec is not None else ()
        found[name] = next((str(Path(place).resolve()) for place in places if place), "")
    return found


def reaching(value: Any, key: str = "") -> Iterator[str]:
    """What in ``value`` leads to code, programs, addresses or files that are not ours, in words."""
    if isinstance(value, dict):
        if value.get("class") == _ENV:
            yield from _environment(value)
        for name, item in value.items():
            if name != "spec":  # texts, units and numbers, of which nothing is loaded
                yield from reaching(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from reaching(item, key)
    elif isinstance(value, str) and value:
        if key in KINDS and _CLASS_NAME.fullmatch(value):
            return  # one of ours, or none
        of_class = key in KINDS and _NAME.fullmatch(value)
        if of_class or key == "class" or _NAME.fullmatch(value):
            if not (of_class and is_ours(value.partition(":")[0])):
                yield f"the {'class' if key in KINDS else 'function'} {_short(value)}"
        elif "://" in value:
            yield f"the address {_short(value)}"
        elif value.startswith(("/", "~")) or ".." in value.split("/") or (key in _PATHS and not is_pinned(value)):
            yield f"the path {_short(value)}"


def _environment(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("name") not in ENVIRONMENTS:
        yield f"the environment {_short(config.get('name'))}"
    for given in (config.get("options"), config.get("training_options")):
        yield from _options(given)


def _options(given: Any) -> Iterator[str]:
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if name in _PROGRAMS:
            yield f"the environment's option {_short(name)}"
        if name == "env" and value not in ENVIRONMENTS:
            yield f"the environment {_short(value)}"
        if isinstance(value, str) and ("/" in value or (":" in value and not _DEVICE.fullmatch(value))):
            yield f"the path or name {_short(value)}"
        if isinstance(value, int | float) and not abs(value) <= _LARGEST:
            yield f"the environment's option {_short(name)} of {value}"
        for item in value if isinstance(value, list) else [value]:
            yield from _options(item)


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _cure() -> str:
    return f"if you know who made it, and that it does no harm, add {OPTION} once."


# -- files of our own --------------------------------------------------------------------------------------------------

_SHORTEST = 16  # bytes of a secret


def read_key(path: str | Path) -> bytes:
    """The secret in the file ``path``, without blanks around it.

    Raises UserError for a file that cannot be read, holds fewer than 16 bytes, or can be read by other users.
    """
    try:
        with open(path, "rb") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read().strip()
    except OSError as error:
        raise UserError(
            f"the key file {str(path)!r} cannot be read ({error.strerror}), so it guards nothing; check the file."
        ) from error
    if mode & 0o077:
        raise UserError(
            f"the key file {str(path)!r} can be read by other users of this machine, who could use it, so it is not "
            f"used; run: chmod 600 {path}."
        )
    if len(key) < _SHORTEST:
        raise UserError(
            f"the key file {str(path)!r} holds {len(key)} bytes, so whoever guesses them would be let in; make one "
            f"of at least {_SHORTEST}: (umask 077; openssl rand -hex 32 > {path})."
        )
    return key


def write_whole(path: Path, data: bytes, mode: int = 0o600, put: Callable[[Path, Path], object] | None = None) -> None:
    """Have ``data`` in the file ``path``, also after a power cut: at every moment it is as before or whole.

    It has ``mode`` from the beginning.  ``put``: ``os.link`` where it must be a new file, else ``os.replace``.  Raises
    OSError.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        (put or os.replace)(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Have ``arrays`` in the ``.npz`` ``path``, which :func:`read_arrays` reads, as :func:`write_whole` does."""
    import numpy as np

    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, file.getvalue(), 0o644)


def sync(path: Path) -> None:
    """Return when a file, or the names of those in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
