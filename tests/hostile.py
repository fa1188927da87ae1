"""Folders as somebody who means harm would make them; what they would run leaves a canary."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sims.toy import point_mass
from vla_rl.contract import trust
from vla_rl.contract.config import to_json
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.recipes.env_config import EnvConfig

ENV = "EnvConfig"
Make = Callable[[Path, Path], None]  # of a folder and the canary's path


def checkpoint(folder: Path) -> None:
    """An honest one."""
    GaussianPolicy(point_mass.spec(), None, GaussianConfig(width=8, depth=1)).save_pretrained(folder)


def run(folder: Path, **fields: Any) -> None:
    """A run with an honest checkpoint; ``fields`` of its config."""
    checkpoint(folder / "checkpoints" / "best")
    base = {"class": "Improve", "rl": {"class": "StateBased"}, "env": to_json(EnvConfig("point_mass")), "seed": 1}
    (folder / "config.json").write_text(json.dumps({**base, **fields}))


def changed(folder: Path, **fields: Any) -> None:
    """Replace entries of a config.json; None removes one."""
    path = folder / "config.json"
    saved = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in saved.items() if value is not None}))


def env(name: str, **options: Any) -> dict[str, Any]:
    return {"class": ENV, "name": name, "options": options, "training_options": {}}


def code(path: Path, canary: Path) -> Path:
    """A Python file that leaves the canary when it is imported."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"open({str(canary)!r}, 'w').close()\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass X:\n    env: object = None\n    @classmethod\n"
        "    def from_pretrained(cls, *given): return cls()\ndef make(**options): return X()\n"
    )
    return path


def forget() -> None:
    """As if somebody else had written what a test made."""
    trust._accepted.clear()
    for mark in trust._marks().glob("*"):
        mark.unlink()


Change = Callable[[Path, Path], object]  # of an honest folder, and the canary's path


def of(honest: Callable[[Path], None], changes: dict[str, Change]) -> dict[str, Make]:
    """What each of ``changes`` makes of an honest folder, beside which a module of theirs lies."""

    def making(change: Change) -> Make:
        def make(folder: Path, canary: Path) -> None:
            honest(folder)
            code(Path.cwd() / "theirs_beside.py", canary)
            change(folder, canary)

        return make

    return {name: making(change) for name, change in changes.items()}


def entries(**fields: Any) -> Change:
    """Other entries of the config.json."""
    return lambda folder, canary: changed(folder, **fields)


def environment(name: str, **options: Any) -> Change:
    """Another environment of a run; "CANARY" in its options is the canary's path, "FOLDER" the run's."""

    def change(folder: Path, canary: Path) -> None:
        text = json.dumps(env(name, **options)).replace("CANARY", str(canary)).replace("FOLDER", str(folder))
        changed(folder, env=json.loads(text))

    return change


def kept(**fields: Any) -> Change:
    """A config file of theirs in a run that names it."""

    def change(folder: Path, canary: Path) -> None:
        changed(folder, **fields)
        code(folder / "config_files" / "evil.py", canary)

    return change


def _python(folder: Path, canary: Path) -> None:
    program = folder / "py"
    program.write_text(f"#!/bin/sh\ntouch {canary}\n")
    program.chmod(0o755)
    environment("isolated", env="point_mass", python="FOLDER/py")(folder, canary)


def _variables(folder: Path, canary: Path) -> None:
    code(folder / "x" / "sitecustomize.py", canary)
    environment("isolated", env="point_mass", variables={"PYTHONPATH": "FOLDER/x"})(folder, canary)


def _weights(change: Callable[[bytes], bytes]) -> Change:
    def made(folder: Path, canary: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return made


def _header(**fields: Any) -> Change:
    """Other ``fields`` of the first tensor."""

    def changed_bytes(good: bytes) -> bytes:
        size = struct.unpack("<Q", good[:8])[0]
        header = json.loads(good[8 : 8 + size])
        next(value for name, value in header.items() if name != "__metadata__").update(fields)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + size :]

    return _weights(changed_bytes)


def _config(text: str) -> Change:
    return lambda folder, canary: (folder / "config.json").write_text(text)


def _spec(**parts: Any) -> Change:
    def made(folder: Path, canary: Path) -> None:
        changed(folder, spec={**json.loads((folder / "config.json").read_text())["spec"], **parts})

    return made


def _link(folder: Path, canary: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


_HUGE = {"shape": [100_000, 100_000, 3], "dtype": "uint8", "low": 0, "high": 255, "unit": "", "frame": "", "names": []}
_NAMES = (
    "theirs_beside:X",
    "os:system",
    "subprocess:Popen",
    "builtins:exec",
    "antigravity:x",
    "",
    "vla_rl.contract.load:load",
)
_NAMES += ("vla_rl.cli.__main__:main", "vla_rl.experience.worker:Pipes")
_CLASSES = ("theirs_beside:X", "os:system", "vla_rl.contract.child:Child")
_EVIL = {"class": "vla_rl_config_evil:X"}

CHECKPOINTS: dict[str, Make] = of(
    checkpoint,
    {
        **{f"policy {name}": entries(policy=name) for name in _NAMES},
        "policy is a list": entries(policy=["os", "system"]),
        **{f"config class {name}": entries(config={"class": name, "command": "touch x"}) for name in _CLASSES},
        "function": entries(policy="FunctionPolicy", function="theirs_beside:make", config=None),
        "remote": entries(policy="RemotePolicy", address="ws://127.0.0.1:9", config=None),
        "huge pictures": _spec(images={"front": _HUGE}),
        "huge state": _spec(state={**_HUGE, "shape": [10**12]}),
        "state of text": _spec(state={**_HUGE, "shape": ["x"]}),
        "no spec": _spec(state=None, action=7),
        "no time limit": _spec(time_limit=10**18, max_chunk=10**18, control_dt="slow"),
        "tasks are a number": _spec(tasks=5),
        "deep config": _config("[" * 100_000),
        "deep object": _config('{"policy":' * 5000 + "1" + "}" * 5000),
        "config is null": _config("null"),
        "config is cut off": _config('{"policy"'),
        "config is a device": _link,
        "header of 2^62": _weights(lambda good: struct.pack("<Q", 1 << 62) + good[8:]),
        "header of 100 MB": _weights(lambda good: struct.pack("<Q", 100_000_000) + b"{" + b" " * 1000),
        "cut off": _weights(lambda good: good[: len(good) // 2]),
        "offsets": _header(data_offsets=[0, 1 << 60]),
        "shape": _header(shape=[1 << 40, 1 << 40]),
    },
)
_RUNS_CODE = {"args": ["touch", "CANARY"], "setup": "open('CANARY', 'w')"}
RUNS: dict[str, Make] = of(
    run,
    {
        "kept file as environment": kept(env=_EVIL),
        "kept file as recipe": kept(**_EVIL),
        "kept file in a note": kept(note=_EVIL),
        "python": _python,
        "variables": _variables,
        "environment beside": environment("theirs_beside:make"),
        "environment in an environment": environment("warp", env="theirs_beside:make"),
        "gym id": environment("gym", id="theirs_beside:X-v0"),
        "gym wrapper": environment("gym", id="CartPole-v1", wrappers={"theirs_beside:make": {}}),
        **{
            f"environment {name}": environment(name, **_RUNS_CODE)
            for name in ("os:system", "subprocess:run", "timeit:timeit")
        },
        "environment in processes": environment("isolated", env="point_mass"),
        "remote environment": environment("remote", address="127.0.0.1:9"),
        "environment of 100 million pixels": environment("lift", image_size=10_000),
        "no checkpoint": lambda folder, canary: shutil.rmtree(folder / "checkpoints"),
    },
)
