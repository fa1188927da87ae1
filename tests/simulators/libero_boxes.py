"""LIBERO with boxes for objects where its assets are not there, in a home of its own: the real one stays as it is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sims import installations
from sims.installations import SHIPPED, SIMS, child_environment
from vla_rl.contract.installations import HOME, Installation


@contextmanager
def home_with_boxes(folder: Path) -> Iterator[None]:
    """``VLA_RL_HOME`` is ``folder``, where LIBERO has boxes and all other installations are the real ones."""
    real = {one.name: one for one in installations.known()}
    (folder / "sims").mkdir()
    for name, one in real.items():
        if name != "libero" and one.folder.exists():
            (folder / "sims" / name).symlink_to(one.folder)
    before = os.environ.get(HOME)
    os.environ[HOME] = str(folder)
    try:
        _link(real["libero"], SIMS.one("libero"))
        yield
    finally:
        os.environ.pop(HOME)
        if before is not None:
            os.environ[HOME] = before


def run(file: Path, *arguments: str) -> str:
    """What the Python file ``file`` prints in LIBERO's installation; raises CalledProcessError when it fails."""
    command = [str(installations.find("libero").python), str(file), *arguments]
    done = subprocess.run(command, env=child_environment("libero"), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _link(real: Installation, made: Installation) -> None:
    """``made`` has the packages of ``real`` by links, and boxes in the folder that the real one lacks."""
    subprocess.run([str(real.python), "-m", "venv", "--without-pip", str(made.folder / "venv")], check=True)
    _link_all(real.site_packages, made.site_packages, but="libero")
    package, copy = real.site_packages / "libero", made.site_packages / "libero"
    _link_all(package, copy, but="libero")
    _link_all(package / "libero", copy / "libero", but="assets")
    made.lock.write_bytes(real.lock.read_bytes())
    (assets,) = made.missing_files()
    assets.mkdir()
    probe = [str(made.python), "-c", SHIPPED["libero"].probe]
    subprocess.run(probe, env=child_environment("libero"), stdout=subprocess.DEVNULL, check=True)
    run(Path(__file__).with_name("libero_assets.py"), str(assets))


def _link_all(of: Path, into: Path, but: str) -> None:
    """Link every entry of folder ``of`` except ``but`` into the folder ``into``."""
    into.mkdir(parents=True, exist_ok=True)
    for path in of.iterdir():
        if path.name != but:
            (into / path.name).symlink_to(path)
