"""Mesa's Vulkan driver of Debian 12's backports, unpacked beside the installation; the system stays as it is."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from sims.maniskill import vulkan

_SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {suite} main\n"
_PACKAGE, _SUITE = "mesa-vulkan-drivers", "bookworm-backports"
_MANIFEST = "lvp_icd.json"


def variables(folder: Path) -> dict[str, str]:
    """The environment variables by which processes find the driver that was unpacked in ``folder``; {} without one."""
    manifest = folder / "mesa" / _MANIFEST
    return {name: str(manifest) for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES") if manifest.exists()}


def prepare(folder: Path, report: Callable[[str], None]) -> None:
    """Unpack the driver in ``folder`` where no driver of the system is usable, and report what came of it."""
    if any(driver.usable for driver in vulkan.drivers()):
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
    report(f"Vulkan: {vulkan.verdict(vulkan.drivers(variables(folder)))}")


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
