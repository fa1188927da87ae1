"""The wheel: what is in it, and what of it needs the base dependencies only."""

from __future__ import annotations

import sys
import tomllib
import zipfile
from email.parser import Parser
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.wheels import BASE, PACKAGES, ROOT, bare_environment, build_wheel, light_modules, run

PINS = ROOT / "sims" / "pins"
VENDORS = ("franka", "realsense", "ur")  # for those who have the hardware
SLOW = ("low-memory",)  # transformers imports it wherever it is
LARGE = ("genesis", "maniskill")  # simulators with installations of their own; pinned there


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), "--no-isolation")


def test_it_holds_our_packages_configs_and_pins_and_no_more(wheel):
    names = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names += [path for folder in (PINS, ROOT / "vla_rl" / "policies" / "pins") for path in folder.glob("*.txt")]
    wanted = {path.relative_to(ROOT).as_posix() for path in names}
    wanted |= {f"vla_rl/_configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.py")}
    wanted |= {f"{package}/py.typed" for package in PACKAGES}
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "vla_rl/templates").iterdir()}
    wanted |= {"vla_rl/contract/classes.json", "vla_rl/fleet/fleet.proto", "vla_rl/fleet/fleet_pb2.pyi"}
    info = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" in name}
    assert set(zipfile.ZipFile(wheel).namelist()) - info == wanted
    files = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert {name.partition(".dist-info/")[2] for name in info} == set(files)


def test_a_shipped_config_is_the_one_in_the_checkout(wheel):
    shipped = zipfile.ZipFile(wheel).read("vla_rl/_configs/demo.py")
    assert shipped == (ROOT / "configs" / "demo.py").read_bytes()


def test_it_says_what_it_needs(wheel):
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    said = Parser().parsestr(zipfile.ZipFile(wheel).read(name).decode())
    needs = [Requirement(text) for text in said.get_all("Requires-Dist")]
    base = [need for need in needs if need.marker is None]
    assert {need.name for need in base} == set(BASE)
    assert all([part.operator for part in need.specifier] == [">="] for need in base), "base dependencies stay wide"
    assert said["Requires-Python"] == ">=3.11" and said["License-Expression"] == "Apache-2.0"
    # What `all` brings is what the extras bring, without the simulators that take gigabytes.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert Requirement(extras["all"][0]).extras == set(extras) - {"all", *LARGE, *VENDORS, *SLOW}
    assert set(said.get_all("Provides-Extra")) == set(extras)


def test_every_pin_is_allowed_and_every_requirement_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras, pinned = project["optional-dependencies"], _pins(ROOT / "constraints.txt")
    usual = chain(project["dependencies"], *(extras[name] for name in set(extras) - {*LARGE, *VENDORS}))
    for texts, versions in [(usual, pinned), *((extras[name], _pins(PINS / f"{name}.txt")) for name in LARGE)]:
        for need in map(Requirement, texts):
            known = need.name == "vla-rl" or need.specifier.contains(versions[canonicalize_name(need.name)])
            assert known, str(need)


def _pins(file: Path) -> dict[str, str]:
    """The versions that ``file`` pins, by name."""
    pins = [Requirement(line) for line in file.read_text().splitlines() if line[0] != "#"]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


def test_twine_finds_nothing_wrong(wheel):
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", wheel)


def test_with_the_base_dependencies_alone_it_imports_and_inspects(wheel, tmp_path):
    python = bare_environment(tmp_path / "bare", wheel)
    modules = light_modules(wheel)
    assert {"vla_rl.contract.wire", "vla_rl.contract.check", "robot_drivers", "sims.toy.counting"} <= set(modules)
    location = run(python, "-c", f"import {', '.join(modules)}\nprint(robot_drivers.__file__)", cwd=tmp_path)
    assert location.startswith(str(tmp_path))
    shown = run(python, "-m", "vla_rl.cli", "inspect", cwd=tmp_path)
    assert "not installed: pip install 'vla-rl[train]'" in shown and "numpy" in shown and "counting" in shown
    assert "continues bit for bit" in run(python, "-m", "vla_rl.cli", "inspect", "counting", cwd=tmp_path)
