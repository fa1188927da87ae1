"""Which Vulkan drivers a machine has, whether ManiSkill's renderer runs on one of them, and Mesa's where none is.

Run as a script, it prints what it finds as JSON, and imports nothing of ours.  Each driver is asked directly, without
Vulkan's loader; a driver that crashes would end this process, so callers use :func:`drivers`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NEEDED = (24, 3)  # Mesa's version; the software driver of 22.3 is refused by SAPIEN
_FOLDERS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")
_CPU = 4  # VK_PHYSICAL_DEVICE_TYPE_CPU
_PROPERTIES, _DRIVER = 1000059001, 1000196000  # the types of the structures
_CURE = (
    "install a newer one (Debian 12: apt install -t bookworm-backports mesa-vulkan-drivers), or run 'vla-rl sims "
    "install maniskill', which unpacks it beside the system's"
)
_SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {suite} main\n"
_PACKAGE, _SUITE = "mesa-vulkan-drivers", "bookworm-backports"
_MANIFEST = "lvp_icd.json"


@dataclass(frozen=True)
class Driver:
    """A device that a driver offers; ``software``: it computes on the processor, by Mesa of ``version``."""

    name: str
    version: tuple[int, ...]
    software: bool

    @property
    def usable(self) -> bool:
        """Whether ManiSkill can render with it."""
        return not self.software or self.version[:2] >= NEEDED

    def __str__(self) -> str:
        return f"{self.name}, Mesa {'.'.join(map(str, self.version))}" if self.software else self.name


def drivers(variables: Mapping[str, str] | None = None) -> list[Driver]:
    """The drivers that a process finds with ``variables`` on top of this one's environment variables."""
    done = subprocess.run(
        [sys.executable, "-I", __file__],
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1]) if done.returncode == 0 and lines else []
    return [Driver(one["name"], tuple(one["version"]), one["software"]) for one in found]


def verdict(found: Sequence[Driver]) -> str:
    """Whether ManiSkill runs with the drivers ``found``, and what to do where it does not."""
    usable = [driver for driver in found if driver.usable]
    if usable:
        return f"works ({usable[0]})"
    if found:
        old = f"{found[0]} is older than {'.'.join(map(str, NEEDED))}"
        return f"{old}, so ManiSkill cannot build its tasks, not even without pictures; {_CURE}"
    return f"there is no driver, so ManiSkill cannot build its tasks, not even without pictures; {_CURE}"


def manifests(variables: Mapping[str, str]) -> list[Path]:
    """The files that describe drivers, as Vulkan's loader looks for them."""
    given = variables.get("VK_DRIVER_FILES") or variables.get("VK_ICD_FILENAMES")
    if given:
        return [Path(one) for one in given.split(os.pathsep)]
    return [path for folder in _FOLDERS for path in sorted(Path(folder).glob("*.json"))]


# -- Mesa's driver of Debian 12's backports, unpacked beside the installation; the system stays as it is ---------------


def variables(folder: Path) -> dict[str, str]:
    """The environment variables by which processes find the driver that was unpacked in ``folder``; {} without one."""
    manifest = folder / "mesa" / _MANIFEST
    return {name: str(manifest) for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES") if manifest.exists()}


def prepare(folder: Path, report: Callable[[str], None]) -> None:
    """Unpack the driver in ``folder`` where no driver of the system is usable, and report what came of it."""
    if any(driver.usable for driver in drivers()):
        return
    target = folder / "mesa"
    shutil.rmtree(target, ignore_errors=True)
    try:
        library = _unpack(target)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        report(f"Mesa could not be unpacked ({said.strip().splitlines()[-1]}); 'vla-rl inspect' says what else to do")
        return
    manifest = {"ICD": {"api_version": "1.3.0", "library_path": str(library)}, "file_format_version": "1.0.0"}
    (target / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    report(f"Vulkan: {verdict(drivers(variables(folder)))}")


def _unpack(target: Path) -> Path:
    """The driver's library, downloaded by apt with lists of its own and unpacked below ``target``."""
    for name in ("lists/partial", "cache/archives/partial"):
        (target / name).mkdir(parents=True)
    (target / "sources.list").write_text(_SOURCE.format(suite=_SUITE), encoding="utf-8")
    options = {
        "Dir::Etc::sourcelist": target / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": target / "lists",
        "Dir::Cache": target / "cache",
    }
    apt = ["apt-get", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    for command in ([*apt, "update"], [*apt, "download", f"{_PACKAGE}/{_SUITE}"]):
        subprocess.run(command, cwd=target, check=True, capture_output=True, text=True)
    for package in sorted(target.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True, capture_output=True, text=True)
    found = sorted(target.glob("usr/lib/*/libvulkan_lvp.so"))
    if not found:
        raise FileNotFoundError(f"{_PACKAGE} has no libvulkan_lvp.so")
    return found[0]


# -- asking a driver ---------------------------------------------------------------------------------------------------


class _Application(ctypes.Structure):
    """VkApplicationInfo."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    )


class _Instance(ctypes.Structure):
    """VkInstanceCreateInfo."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_Application)),
        ("layers", ctypes.c_uint32),
        ("layer_names", ctypes.c_void_p),
        ("extensions", ctypes.c_uint32),
        ("extension_names", ctypes.c_void_p),
    )


class _About(ctypes.Structure):
    """VkPhysicalDeviceDriverProperties."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("id", ctypes.c_int),
        ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256),
        ("conformance", ctypes.c_uint8 * 4),
    )


class _Properties(ctypes.Structure):
    """VkPhysicalDeviceProperties2, whose limits are left unread."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("numbers", ctypes.c_uint32 * 4),
        ("kind", ctypes.c_int),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint8 * 4096),
    )


def ask(manifest: Path) -> list[Driver]:
    """The devices of the driver that ``manifest`` describes; none when it cannot be loaded."""
    try:
        library = json.loads(manifest.read_text(encoding="utf-8"))["ICD"]["library_path"]
        if "/" in library:
            library = str((manifest.parent / library).resolve())
        driver = ctypes.CDLL(library)
        entry = driver.vk_icdGetInstanceProcAddr
    except (OSError, ValueError, KeyError, AttributeError):
        return []
    entry.restype, entry.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    driver.vk_icdNegotiateLoaderICDInterfaceVersion(ctypes.byref(ctypes.c_uint32(5)))
    instance = ctypes.c_void_p()
    wanted = _Instance(type=1, application=ctypes.pointer(_Application(type=0, api_version=1 << 22 | 1 << 12)))
    if _function(entry, None, b"vkCreateInstance", 3)(ctypes.byref(wanted), None, ctypes.byref(instance)):
        return []
    return _devices(entry, instance)


def _devices(entry: Any, instance: ctypes.c_void_p) -> list[Driver]:
    devices = _function(entry, instance, b"vkEnumeratePhysicalDevices", 3)
    properties = _function(entry, instance, b"vkGetPhysicalDeviceProperties2", 2)
    count = ctypes.c_uint32()
    devices(instance, ctypes.byref(count), None)
    handles = (ctypes.c_void_p * count.value)()
    devices(instance, ctypes.byref(count), handles)
    found = []
    for handle in handles:
        about = _About(type=_DRIVER)
        read = _Properties(type=_PROPERTIES, next=ctypes.addressof(about))
        properties(handle, ctypes.byref(read))
        version = re.search(r"Mesa (\d+)\.(\d+)", about.info.decode(errors="replace"))
        numbers = tuple(map(int, version.groups())) if version else (0, 0)
        found.append(Driver(read.name.decode(errors="replace"), numbers, read.kind == _CPU))
    return found


def _function(entry: Any, instance: ctypes.c_void_p | None, name: bytes, arguments: int) -> Any:
    """The driver's function ``name`` of that many pointers."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * arguments)(entry(instance, name))


if __name__ == "__main__":
    print(json.dumps([asdict(one) for path in manifests(os.environ) for one in ask(path)]))
