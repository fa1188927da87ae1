"""Simulators in virtual environments of their own, made from small wheels without a network."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest

from sims import installations
from sims.catalog import make
from sims.installations import child_environment, find, install, known
from tests.patience import PATIENCE
from vla_rl.contract.errors import UserError
from vla_rl.contract.installations import Shipped

_HOST = ("numpy", "numpy.libs", "msgpack")  # the only packages of this environment that installations share in tests


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], needs: str = "") -> None:
    """The wheel of a distribution that consists of ``files`` and needs the distribution ``needs``."""
    info, requires = f"{name}-{version}.dist-info", f"Requires-Dist: {needs}\n" if needs else ""
    contents = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in (contents | {f"{info}/RECORD": record}).items():
            wheel.writestr(path, text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder of wheels: tiny 1 and 2, other, numpy and msgpack, which link to those of this environment."""
    folder, host = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("host")
    site = Path(str(metadata.distribution("numpy").locate_file("")))
    for name in _HOST:
        if (site / name).exists():
            (host / name).symlink_to(site / name)
    for version in ("1.0", "2.0"):
        write_wheel(folder, "tiny", version, {"tiny.py": f"version = {version!r}\n"})
    write_wheel(folder, "other", "1.0", {"other.py": ""})
    write_wheel(folder, "needy", "1.0", {"needy.py": "import other\n"}, needs="other")
    write_wheel(folder, "numpy", "0.1", {"host_packages.pth": f"{host}\n"})
    write_wheel(folder, "msgpack", "0.1", {})
    return folder


@pytest.fixture
def tiny(wheels, tmp_path, monkeypatch):
    """``tiny(*pins)`` pins the packages of a simulator of ours that is called "tiny"."""
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "VLA_RL_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pins").mkdir()
    monkeypatch.setattr(installations.SIMS, "pins", tmp_path / "pins")
    shipped = Shipped("import tiny", {"tiny_files/scene.xml": "copy it from its authors' page"}, {"TINY": "{folder}/x"})
    monkeypatch.setitem(installations.SHIPPED, "tiny", shipped)

    def pin(*pins: str) -> None:
        (tmp_path / "pins" / "tiny.txt").write_text("# pins\n" + "\n".join(pins))

    pin("tiny==1.0", "numpy==0.1", "msgpack==0.1")
    return pin


def run(name: str, code: str) -> str:
    """What ``code`` prints in installation ``name``."""
    command = [str(find(name).python), "-c", code]
    return subprocess.check_output(command, env=child_environment(name), cwd="/", text=True, timeout=PATIENCE).strip()


@pytest.mark.full
def test_an_installation_holds_its_pins_and_our_packages(tiny, tmp_path, monkeypatch):
    lines: list[str] = []
    made = install("tiny", lines.append)
    assert made.state() == "ready" and made.version() == "tiny==1.0"
    assert {"tiny==1.0", "numpy==0.1", "msgpack==0.1"} <= set(made.lock.read_text().splitlines())
    assert any("tiny" in line for line in lines)
    assert run("tiny", "import tiny, sims.catalog, vla_rl.contract.wire; print(tiny.version)") == "1.0"
    assert run("tiny", "import os; print(os.environ['TINY'])") == str(made.folder / "x")
    names = ["torch", "world_models", "robot_drivers", "configs", "tests", "rich"]
    assert run("tiny", f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n)])") == "[]"

    (tmp_path / "in_tiny.py").write_text("import tiny\nfrom sims.toy.counting import make\n")
    monkeypatch.chdir(tmp_path)
    with closing(make("isolated", num_envs=2, env="in_tiny:make", installation="tiny", workers=2)) as env:
        assert env.reset([0, 1], [4, 5]).state[:, 0].tolist() == [4, 5]

    written = made.lock.stat().st_mtime_ns
    install("tiny", lines.clear)  # pip would call it with a line
    assert made.lock.stat().st_mtime_ns == written

    ((path, source),) = made.missing_files().items()
    assert path.match("site-packages/tiny_files/scene.xml") and source == "copy it from its authors' page"
    path.parent.mkdir()
    path.touch()
    assert not made.missing_files()

    tiny("tiny==2.0", "numpy==0.1", "msgpack==0.1")
    with pytest.raises(UserError, match="installed with other pins, so it cannot run; run 'vla-rl sims install tiny'"):
        find("tiny")


@pytest.mark.full
def test_a_failed_one_is_never_used_and_two_attempts_make_one(tiny):
    tiny("tiny==1.0", "msgpack==0.1")  # pip succeeds, but nothing of ours can be imported
    with pytest.raises(UserError, match=r"could not be installed .*No module named.*'vla-rl sims install tiny' again"):
        install("tiny")
    with pytest.raises(UserError, match="tiny is half installed, so it cannot run"):
        find("tiny")
    tiny("tiny==2.0", "numpy==0.1", "msgpack==0.1")
    reported: list[list[str]] = [[], []]
    both = [threading.Thread(target=install, args=("tiny", lines.append)) for lines in reported]
    for one in both:
        one.start()
    for one in both:
        one.join(PATIENCE)
    assert find("tiny").version() == "tiny==2.0"
    waited, worked = sorted(reported, key=len)
    assert waited == ["waiting for another process that installs the same"] and len(worked) > 1


@pytest.mark.full
def test_a_users_own_is_made_anew_when_its_requirements_change(tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("tiny>=1\nother\n")
    made = install("mine", requirements=tmp_path / "mine.txt")
    assert made.version() == "tiny==2.0" and made in known()
    assert run("mine", "import tiny, other, vla_rl.contract.wire; print(tiny.version)") == "2.0"
    (tmp_path / "mine.txt").write_text("tiny<2\n")
    assert install("mine").version() == "tiny==2.0"  # nothing new was asked for
    assert install("mine", requirements=tmp_path / "mine.txt").version() == "tiny==1.0"
    assert run("mine", "from importlib.util import find_spec; print(find_spec('other'))") == "None"


@pytest.mark.full
def test_what_pins_need_is_installed_where_machines_differ(tiny, monkeypatch):
    tiny("needy==1.0", "numpy==0.1", "msgpack==0.1")
    monkeypatch.setitem(installations.SHIPPED, "tiny", Shipped("import needy"))
    with pytest.raises(UserError, match="No module named 'other'"):
        install("tiny")
    monkeypatch.setitem(installations.SHIPPED, "tiny", Shipped("import needy", pip=()))
    assert "other==1.0" in install("tiny").lock.read_text()


def test_what_cannot_be_installed_is_refused_and_leaves_nothing(tiny, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no simulator of ours is called 'tinny'.*mean 'tiny'\?.*--requirements"):
        install("tinny")
    assert not (tmp_path / "sims").exists()
    with pytest.raises(UserError, match=r"nopython cannot be started .*tiny was not installed; name a Python"):
        install("tiny", python="nopython")
    with pytest.raises(UserError, match="pinned by vla-rl, so it takes no --requirements"):
        install("tiny", requirements=tmp_path / "mine.txt")
    with pytest.raises(UserError, match=r"'\.\./up' is no name of an installation"):
        install("../up")
    with pytest.raises(UserError, match=r"no installation is called 'tinyy'.*did you mean 'tiny'\?"):
        find("tinyy")
    with pytest.raises(UserError, match="tiny is half installed, so it cannot run"):
        find("tiny")
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLA_RL_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file/sims/tiny cannot be made .*; set VLA_RL_HOME to a folder"):
        install("tiny")


def test_our_pins_are_complete_and_exact():
    for name in installations.SHIPPED:
        lines = (Path(installations.__file__).parent / "pins" / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert all(pin.count("==") == 1 for pin in pins) and len(pins) > 5
        assert {"numpy", "msgpack"} <= {pin.partition("==")[0] for pin in pins}
