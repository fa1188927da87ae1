"""Folders as somebody who means harm would make them; what they would run leaves a canary."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sims.toy import point_mass
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
    base = {"class": "StateBased", "env": to_json(EnvConfig("point_mass")), "seed": 1}
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


def _named(field: str, name: str) -> Make:
    def make(folder: Path, canary: Path) -> None:
        checkpoint(folder)
        code(Path.cwd() / "theirs_beside.py", canary)
        changed(folder, **{field: name})

    return make


def _config_class(name: str) -> Make:
    def make(folder: Path, canary: Path) -> None:
        checkpoint(folder)
        code(Path.cwd() / "theirs_beside.py", canary)
        changed(folder, config={"class": name, "command": f"touch {canary}"})

    return make


def _function(folder: Path, canary: Path) -> None:
    checkpoint(folder)
    code(Path.cwd() / "theirs_beside.py", canary)
    changed(folder, policy="FunctionPolicy", function="theirs_beside:make", config=None)


def _remote(folder: Path, canary: Path) -> None:
    checkpoint(folder)
    changed(folder, policy="RemotePolicy", address="ws://127.0.0.1:9", config=None)


def _kept_file(folder: Path, canary: Path) -> None:
    run(folder, env={"class": "vla_rl_config_evil:X"})
    code(folder / "config_files" / "evil.py", canary)


def _kept_recipe(folder: Path, canary: Path) -> None:
    run(folder, **{"class": "vla_rl_config_evil:X"})
    code(folder / "config_files" / "evil.py", canary)


def _kept_note(folder: Path, canary: Path) -> None:
    run(folder, note={"class": "vla_rl_config_evil:X"})
    code(folder / "config_files" / "evil.py", canary)


def _environment(make: Callable[[Path, Path], Mapping[str, Any]]) -> Make:
    def made(folder: Path, canary: Path) -> None:
        run(folder)
        changed(folder, env=make(folder, canary))

    return made


def _python(folder: Path, canary: Path) -> Mapping[str, Any]:
    program = folder / "py"
    program.write_text(f"#!/bin/sh\ntouch {canary}\n")
    program.chmod(0o755)
    return env("isolated", env="point_mass", python=str(program))


def _variables(folder: Path, canary: Path) -> Mapping[str, Any]:
    code(folder / "x" / "sitecustomize.py", canary)
    return env("isolated", env="point_mass", variables={"PYTHONPATH": str(folder / "x")})


def _beside(folder: Path, canary: Path) -> Mapping[str, Any]:
    code(Path.cwd() / "theirs_beside.py", canary)
    return env("theirs_beside:make")


def _inside(folder: Path, canary: Path) -> Mapping[str, Any]:
    code(Path.cwd() / "theirs_beside.py", canary)
    return env("warp", env="theirs_beside:make")


def _gym(folder: Path, canary: Path) -> Mapping[str, Any]:
    code(Path.cwd() / "theirs_beside.py", canary)
    return env("gym", id="theirs_beside:X-v0")


def _wrapped(folder: Path, canary: Path) -> Mapping[str, Any]:
    code(Path.cwd() / "theirs_beside.py", canary)
    return env("gym", id="CartPole-v1", wrappers={"theirs_beside:make": {}})


def _weights(change: Callable[[bytes], bytes]) -> Make:
    def make(folder: Path, canary: Path) -> None:
        checkpoint(folder)
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return make


def _header(change: Callable[[dict[str, Any]], None]) -> Make:
    def changed_bytes(good: bytes) -> bytes:
        size = struct.unpack("<Q", good[:8])[0]
        header = json.loads(good[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + good[8 + size :]

    return _weights(changed_bytes)


def _first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(value for name, value in header.items() if name != "__metadata__")
    return entry


def _config(text: str) -> Make:
    def make(folder: Path, canary: Path) -> None:
        checkpoint(folder)
        (folder / "config.json").write_text(text)

    return make


def _spec(**parts: Any) -> Make:
    def make(folder: Path, canary: Path) -> None:
        checkpoint(folder)
        spec = json.loads((folder / "config.json").read_text())["spec"]
        changed(folder, spec={**spec, **parts})

    return make


def _link(folder: Path, canary: Path) -> None:
    checkpoint(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def _old_run(folder: Path, canary: Path) -> None:
    run(folder)
    shutil.rmtree(folder / "checkpoints")


_HUGE = {"shape": [100_000, 100_000, 3], "dtype": "uint8", "low": 0, "high": 255, "unit": "", "frame": "", "names": []}

CHECKPOINTS: dict[str, Make] = {
    **{
        f"policy {name}": _named("policy", name)
        for name in (
            "theirs_beside:X",
            "os:system",
            "subprocess:Popen",
            "builtins:exec",
            "antigravity:x",
            "vla_rl.contract.load:load",
            "vla_rl.cli.__main__:main",
            "vla_rl.experience.worker:Pipes",
            "",
        )
    },
    "policy is a list": lambda folder, canary: (checkpoint(folder), changed(folder, policy=["os", "system"]))[-1],
    **{
        f"config class {name}": _config_class(name)
        for name in ("theirs_beside:X", "os:system", "vla_rl.contract.child:Child")
    },
    "function": _function,
    "remote": _remote,
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
    "offsets": _header(lambda header: _first(header).update(data_offsets=[0, 1 << 60])),
    "shape": _header(lambda header: _first(header).update(shape=[1 << 40, 1 << 40])),
}
RUNS: dict[str, Make] = {
    "kept file as environment": _kept_file,
    "kept file as recipe": _kept_recipe,
    "kept file in a note": _kept_note,
    "python": _environment(_python),
    "variables": _environment(_variables),
    "environment beside": _environment(_beside),
    "environment in an environment": _environment(_inside),
    "gym id": _environment(_gym),
    "gym wrapper": _environment(_wrapped),
    **{
        f"environment {name}": _environment(
            lambda _, canary, name=name: env(name, args=["touch", str(canary)], setup=f"open({str(canary)!r}, 'w')")
        )
        for name in ("os:system", "subprocess:run", "timeit:timeit")
    },
    "environment in processes": _environment(lambda *_: env("isolated", env="point_mass")),
    "remote environment": _environment(lambda *_: env("remote", address="127.0.0.1:9")),
    "environment of 100 million pixels": _environment(lambda *_: env("lift", image_size=10_000)),
    "no checkpoint": _old_run,
}
