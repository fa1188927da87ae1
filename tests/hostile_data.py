"""Datasets, robot files, fleets, downloaded folders and results as somebody who means harm would make them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sims.toy import point_mass
from tests.hostile import Change, Make, changed, checkpoint, code, of, run
from vla_rl.contract.config import to_json
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.disk import digest
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.identity import Authority
from vla_rl.fleet.registry import History
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy

DATA = "data/chunk-000/file-000.parquet"
EPISODES = f"meta/episodes/{DATA.partition('/')[2]}"
FRONT = "observation.images.front"


def dataset(folder: Path) -> None:
    """Two honest episodes of three frames."""
    for name, data in honest_dataset().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@cache
def honest_dataset() -> dict[str, bytes]:
    """Its files."""
    with tempfile.TemporaryDirectory() as place:
        save_demonstrations(episodes(), Path(place) / "whole", video="never")
        root = Path(place) / "whole"
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def episodes() -> Demonstrations:
    return Demonstrations(
        images={"front": np.zeros((6, 16, 16, 3), np.uint8)},
        state=np.zeros((6, 2), np.float32),
        task=np.zeros(6, np.int64),
        time=np.array([0, 1, 2] * 2),
        action=np.zeros((6, 2), np.float32),
        episode=np.array([0, 0, 0, 1, 1, 1]),
        seed=np.zeros(6, np.int64),
        tasks=("wait",),
        fps=10.0,
        state_names=("x", "y"),
        action_names=("x", "y"),
        extras={"next.success": np.array([False, False, True] * 2)},
    )


def _edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """``meta/info.json`` after ``change``."""
    path = folder / "meta" / "info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


def _info(**entries: Any) -> Change:
    """Of entries that are functions, what they make of the canary."""

    def make(folder: Path, canary: Path) -> None:
        new = {name: value(canary) if callable(value) else value for name, value in entries.items()}
        _edited(folder, lambda info: info.update(new))

    return make


def _features(change: Callable[[dict[str, Any]], None]) -> Change:
    return lambda folder, canary: _edited(folder, lambda info: change(info["features"]))


def _link(name: str, target: str) -> Change:
    """``name`` in the dataset leads to ``target`` beside the canary."""

    def make(folder: Path, canary: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rename(canary.with_name(target))
        path.symlink_to(os.path.relpath(canary.with_name(target), path.parent))

    return make


def _outside(canary: Path) -> str:
    return "../outside/secret.parquet"


def _rewritten(name: str, change: Callable[[pa.Table], pa.Table], **options: Any) -> Change:
    def make(folder: Path, canary: Path) -> None:
        table = pq.read_table(folder / name)
        pq.write_table(change(table), folder / name, **options)

    return make


def _rows(name: str, count: int) -> Change:
    """``count`` equal rows: some hundred bytes on the disk."""
    numbers = pa.array(np.zeros(count, np.int64))
    return _rewritten(name, lambda table: pa.table({"episode_index": numbers}), row_group_size=count)


def _denied(column: str, value: Callable[[], Any]) -> Change:
    """The first frame's entry is large, and the footer says that it is not: only its page's own header does."""

    def make(folder: Path, canary: Path) -> None:
        table = pq.read_table(folder / DATA)
        at = table.schema.get_field_index(column)
        field = table.schema.field(at)
        kind = pa.list_(field.type.value_type) if column == "action" else field.type
        table = table.set_column(at, field.with_type(kind), pa.array([value(), *[None] * 5], kind))
        pq.write_table(table, folder / DATA, compression="zstd", data_page_size=1 << 30)
        group, data = pq.read_metadata(folder / DATA).row_group(0), (folder / DATA).read_bytes()
        end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        pages, footer = data[:end], data[end:]
        for part in map(group.column, range(group.num_columns)):
            for number in (part.total_uncompressed_size, part.num_values):
                true = _varint(2 * number)
                footer = footer.replace(true, _varint(2, len(true))) if number > 10_000_000 else footer
        (folder / DATA).write_bytes(pages + footer)

    return make


def _varint(number: int, length: int = 1) -> bytes:
    """As Thrift writes it, filled up to ``length`` bytes."""
    groups = [number >> 7 * i & 127 for i in range(max(length, -(-number.bit_length() // 7)))]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def _frames(entry: Callable[[], dict[str, Any]]) -> Change:
    """All pictures are this one."""

    def changed_table(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(FRONT)
        field = table.schema.field(at)
        return table.set_column(at, field, pa.array([entry()] * len(table), field.type))

    return _rewritten(DATA, changed_table, compression="zstd")


def _pictures(data: Callable[[], bytes]) -> Change:
    return _frames(lambda: {"bytes": data(), "path": "x"})


def _picture_path(name: str) -> Change:
    return _frames(lambda: {"bytes": None, "path": name})


def png(side: int) -> bytes:
    """A black picture of ``side`` squared in a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    line = bytes(side * 3 + 1)
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(line) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def _list(name: str, text: str) -> Change:
    """A video that is a list of other files, as ffmpeg knows several; ``text`` of one outside."""

    def make(folder: Path, canary: Path) -> None:
        _info(video_path=f"videos/{name}")(folder, canary)
        _features(lambda all: all[FRONT].update(dtype="video"))(folder, canary)
        for file in (DATA, EPISODES):
            table = pq.read_table(folder / file)
            table = table.drop_columns([FRONT]) if file == DATA else _of_video(table)
            pq.write_table(table, folder / file)
        (folder / "videos").mkdir()
        (folder / "videos" / name).write_text(text.format(canary.with_name("secret.mp4")))

    return make


def _of_video(table: pa.Table) -> pa.Table:
    for name in ("chunk_index", "file_index"):
        table = table.append_column(f"videos/{FRONT}/{name}", pa.array([0] * len(table), pa.int64()))
    for name in ("from_timestamp", "to_timestamp"):
        table = table.append_column(f"videos/{FRONT}/{name}", pa.array([0.0] * len(table), pa.float64()))
    return table


def _listed_picture(folder: Path, canary: Path) -> None:
    (Path.cwd() / "beside.mp4").symlink_to(canary.with_name("secret.mp4"))
    _pictures(lambda: b"ffconcat version 1.0\nfile beside.mp4\n")(folder, canary)


_HLS = "#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1.0,\n{0}\n#EXT-X-ENDLIST\n"


def _pipe(folder: Path, canary: Path) -> None:
    (folder / "meta" / "stats.json").unlink()
    os.mkfifo(folder / "meta" / "stats.json")


def _committing(**entries: Any) -> Change:
    def make(folder: Path, canary: Path) -> None:
        (folder / "recording").mkdir()
        text = json.dumps({"total_episodes": 99, "stats": {}, "files": [], "folders": [], **entries})
        (folder / "recording" / "committing.json").write_text(text)

    return make


def _live(folder: Path, canary: Path) -> None:
    info = json.loads((folder / "meta" / "info.json").read_text())
    episode = folder / "recording" / "episode-000002"
    episode.mkdir(parents=True)
    header = {"tasks": ["wait"], "limits": {}, **{name: info[name] for name in ("fps", "features", "robot_type")}}
    (folder / "recording" / "header.json").write_text(json.dumps(header))
    shutil.copy(folder / DATA, episode / "frames.parquet")
    files = {
        "frames.parquet": {"bytes": (folder / DATA).stat().st_size, "sha256": digest(folder / DATA)},
        f"../../../outside/{canary.name}.secret": {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()},
    }
    manifest = {"length": 3, "tasks": ["wait"], "stats": {}, "files": files}
    (episode / "episode.json").write_text(json.dumps(manifest))


DATASETS: dict[str, Make] = of(
    dataset,
    {
        "data path out of the dataset": _info(data_path=_outside),
        "video path out of the dataset": _info(video_path="../outside/secret.mp4"),
        "absolute data path": _info(data_path=lambda canary: f"{canary}.secret"),
        "format string that looks inside": _info(data_path="{chunk_index.__class__.__mro__}"),
        "format string of a gigabyte": _info(data_path="data/{chunk_index:>999999999}"),
        "format string of many zeros": _info(data_path="data/{chunk_index:0999999999d}"),
        "data path is a number": _info(data_path=7),
        "data linked": _link(DATA, "secret.parquet"),
        "data folder linked": _link("data", "secret"),
        "info linked": _link("meta/info.json", "secret.json"),
        "statistics linked": _link("meta/stats.json", "secret.json"),
        "lock linked": _link("recording/lock", "secret.lock"),
        "pipe": _pipe,
        "34 million frames": lambda *given: _rows(DATA, 34_000_000)(*given),
        "rows of 300,000 episodes": lambda *given: _rows(EPISODES, 300_000)(*given),
        "picture of 280 MB that the footer denies": _denied(FRONT, lambda: {"bytes": bytes(280_000_000), "path": "x"}),
        "34 million numbers that the footer denies": _denied("action", lambda: np.zeros(34_000_000, np.float32)),
        "large pictures": _pictures(lambda: png(2000)),
        "long pictures": _pictures(lambda: bytes(2_000_000)),
        "pictures larger than declared": _pictures(lambda: png(1000)),
        "video is a list of addresses": _list("a.m3u8", _HLS.replace("{0}", "http://203.0.113.9/a.ts")),
        "video is a list of files": _list("a.m3u8", _HLS),
        "picture is a list of files": _listed_picture,
        "pictures outside": _picture_path("../outside/canary.secret"),
        "absolute pictures": _picture_path("/etc/hostname"),
        "huge shape": _features(lambda all: all["action"].update(shape=[1 << 40])),
        "negative shape": _features(lambda all: all["action"].update(shape=[-2])),
        "shape of text": _features(lambda all: all["action"].update(shape="two")),
        "huge pictures declared": _features(lambda all: all[FRONT].update(shape=[4000, 4000, 3])),
        "type of a gigabyte": _features(lambda all: all["action"].update(dtype="U999999999")),
        "column out of the dataset": _features(lambda all: all.update({"../x": all["action"]})),
        "features are a list": _info(features=[1]),
        "no time": _info(fps=0),
        "negative time": _info(fps=-3),
        "time of text": _info(fps="fast"),
        "a billion frames a second": _info(fps=1e9),
        "nested time": _info(fps=[[1]]),
        "no end of episodes": _info(total_episodes=10**13),
        "negative episodes": _info(total_episodes=-1),
        "no end of a split": _info(splits={"train": f"0:{10**15}"}),
        "splits are text": _info(splits="all"),
        "chunks of nothing": _info(chunks_size=0),
        "commit removes a file outside": _committing(files=["../outside/canary.secret"]),
        "commit removes a folder outside": _committing(folders=["../../outside"], total_episodes=1),
        "commit of numbers": _committing(folders=[1], files={"a": 2}),
        "recorded file outside": _live,
    },
)

ARM = {"name": "robot_drivers.so101:SO101", "options": {"port": "/dev/ttyNONE", "id": "arm"}}


def _robot(**parts: Any) -> Make:
    def make(folder: Path, canary: Path) -> None:
        code(Path.cwd() / "theirs_beside.py", canary)
        text = json.dumps({"driver": ARM, "tasks": ["wait"], **parts}).replace("CANARY", str(canary))
        folder.write_text(text)

    return make


ROBOTS: dict[str, Make] = {
    **{
        f"driver {name}": _robot(driver={"name": name, "options": options})
        for name, options in (
            ("theirs_beside:X", {}),
            ("os:system", {"command": "touch CANARY"}),
            ("subprocess:Popen", {"args": ["touch", "CANARY"]}),
            ("vla_rl.contract.child:Child", {"command": ["touch", "CANARY"], "name": "x"}),
            ("robot_drivers.driver:DryRun", {"driver": "theirs_beside:X"}),
            ("robot_drivers.simulated_process:ProcessConfig", {"address": "", "record": "CANARY"}),
            ("robot_drivers.simulated:SimulatedRobot", {"env": "theirs_beside:make"}),
        )
    },
    "driver's file outside": _robot(driver={**ARM, "options": {"port": "/dev/ttyX", "calibration": "CANARY.secret"}}),
    "driver's port is a file": _robot(driver={**ARM, "options": {"port": "CANARY.secret"}}),
    "driver's name climbs": _robot(driver={**ARM, "options": {"port": "/dev/ttyX", "id": "../../../outside/secret"}}),
    "driver at an address": _robot(driver={"name": "robot_drivers.ur:UR", "options": {"host": "203.0.113.9"}}),
    "huge scene": _robot(
        driver={"name": "robot_drivers.simulated:SimulatedRobot", "options": {"options": {"image_size": 99999}}}
    ),
    "camera theirs": _robot(cameras={"front": {"name": "theirs_beside:X", "options": {}}}),
    "camera is a file": _robot(
        cameras={"front": {"name": "robot_drivers.cameras.opencv:OpenCVCamera", "options": {"index": "CANARY.secret"}}}
    ),
    "camera is a pipeline": _robot(
        cameras={"a": {"name": "robot_drivers.cameras.opencv:OpenCVCamera", "options": {"index": "fakesrc ! filesink"}}}
    ),
    "teleoperator theirs": _robot(teleoperator={"name": "theirs_beside:X", "options": {}}),
    "kinematics theirs": _robot(kinematics="theirs_beside:make"),
    "kinematics os:abort": _robot(kinematics="os:abort"),
    "robot is a list": lambda folder, canary: (folder.write_text("[[1]]"), None)[-1],
    "deep robot": lambda folder, canary: (folder.write_text("[" * 100_000), None)[-1],
    "parts are text": _robot(driver="os:system", cameras="x"),
    "name is a list": _robot(driver={"name": ["os", "system"], "options": {}}),
    "robot is a device": lambda folder, canary: folder.symlink_to("/dev/zero"),
}


def _history(*history: Any) -> Make:
    def make(folder: Path, canary: Path) -> None:
        (folder / "registry" / "manifests").mkdir(parents=True)
        (folder / "ledger").mkdir()
        log = History(folder / "registry" / "history", Disk())
        log.new()
        for entry in history:
            log.append(entry)

    return make


def _change(**fields: Any) -> dict[str, Any]:
    return {"do": "publish", "who": "x", "why": "x", "at": 0, "version": 1, **fields}


def _fleet_link(name: str) -> Make:
    def make(folder: Path, canary: Path) -> None:
        _history(_change())(folder, canary)
        (folder / name).symlink_to(canary.with_suffix(".secret"))

    return make


FLEETS: dict[str, Make] = {
    "version climbs": _history(_change(version="../../../outside/canary.secret")),
    "version of text": _history(_change(), _change(do="promote", version="x")),
    "unknown change": _history(_change(do="__class__")),
    "change is a list": _history([1]),
    "version of 10^30": _history(_change(version=10**30)),
    "manifest linked": _fleet_link("registry/manifests/0000000001"),
    "lock linked": _fleet_link("registry/lock"),
    "key linked": _fleet_link("signing.key"),
    "ledger's segment linked": _fleet_link("ledger/00000000000000000000"),
}


@cache
def _honest_certificates() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        Authority.create(Path(place)).robot("arm")
        return {str(path.relative_to(place)): path.read_bytes() for path in Path(place).rglob("*") if path.is_file()}


def certificates(folder: Path) -> None:
    """Honest ones."""
    for name, data in _honest_certificates().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)


def _led_out(name: str) -> Change:
    """``name`` of the certificates lies outside, and a link leads there."""

    def lead(folder: Path, canary: Path) -> None:
        (folder / name).rename(canary.with_name("theirs"))
        (folder / name).symlink_to(canary.with_name("theirs"))

    return lead


def _listed(text: bytes) -> Change:
    return lambda folder, canary: (folder / "authority/issued.txt").write_bytes(text)


def _other_key(folder: Path, canary: Path) -> None:
    shutil.copy(folder / "authority/signing.key", folder / "authority/ca.key")


_NAMES = ("authority", "authority/ca.pem", "authority/ca.key", "authority/issued.txt", "authority/signing.key")
CERTIFICATES: dict[str, Make] = of(
    certificates,
    {
        **{
            f"{name} linked": _led_out(name)
            for name in (*_NAMES, "server", "server/revoked.txt", "robots", "robots/arm")
        },
        "key of another kind": _other_key,
        "no text": _listed(b"\xff" * 100),
        "a name that steers a terminal": _listed(b"1 robot \x1b[2J\x07 2030-01-01T00:00:00+00:00\n"),
        "no time zone": _listed(b"1 robot arm 2030-01-01T00:00:00\n"),
        "a serial without end": _listed(b"9" * 10_000 + b" robot arm 2030-01-01T00:00:00+00:00\n"),
        "a list that is a pipe": lambda folder, canary: (
            (folder / "authority/issued.txt").unlink(),
            os.mkfifo(folder / "authority/issued.txt"),
        ),
        "revoked is no text": lambda folder, canary: (folder / "server/revoked.txt").write_bytes(b"\xff\x00zz\n"),
    },
)


def _filled(name: str) -> Make:
    """A folder that is nothing yet, where ``name``, which a command may write, leads out."""

    def make(folder: Path, canary: Path) -> None:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(canary.with_name("secret.json"))

    return make


_WRITTEN = ("metrics.jsonl", "config.json.writing", "checkpoints", "results.json.writing", "report.html.part")
_WRITTEN += ("summary.json", "lift/imitate-1.log", "imitate-1.asked.json", "episodes.csv.writing", "authority")
FILLED: dict[str, Make] = {name: _filled(name) for name in _WRITTEN}


def _public(config: Mapping[str, Any], **files: str) -> Change:
    def make(folder: Path, canary: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        for name, text in files.items():
            (folder / name).write_text(text)

    return make


_SMOLVLA = {
    "type": "smolvla",
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [2]},
        "observation.images.front": {"type": "VISUAL", "shape": [3, 16, 16]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    "chunk_size": 5,
    "n_action_steps": 5,
}

PUBLIC: dict[str, Make] = of(
    checkpoint,
    {
        "shards outside": _public(
            _SMOLVLA, **{"model.safetensors.index.json": json.dumps({"weight_map": {"a": "../outside/canary.secret"}})}
        ),
        "shards are numbers": _public(
            _SMOLVLA, **{"model.safetensors.index.json": json.dumps({"weight_map": {"a": 1}})}
        ),
        "layers without end": _public({**_SMOLVLA, "num_vlm_layers": 10**9, "num_expert_layers": 10**9}),
        "actions without end": _public({**_SMOLVLA, "max_action_dim": 10**9, "chunk_size": 10**9}),
        "sizes are text": _public({**_SMOLVLA, "chunk_size": "many"}),
        "features are a number": _public({**_SMOLVLA, "input_features": 7}),
        "pickled weights": _public({"type": "pi0"}, **{"pytorch_model.bin": "cos\nsystem\n(S'x'\ntR."}),
        "another model": _public({"model_type": "os:system", "auto_map": {"AutoModel": "theirs_beside.X"}}),
    },
)


def _npz(shape: tuple[int, ...], data: bytes = b"", dtype: str = "<f8") -> bytes:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": dtype, "fortran_order": False, "shape": shape})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("observation.state.npy", head.getvalue() + data)
    return file.getvalue()


def _trace(data: Callable[[], bytes]) -> Change:
    return lambda folder, canary: (folder / "episode-1.npz").write_bytes(data())


TRACES: dict[str, Make] = of(
    checkpoint,
    {
        "array of 10^14": _trace(lambda: _npz((10**14,))),
        "array of zeros": _trace(lambda: _npz((4 * 10**7,), bytes(8 * 4 * 10**7))),
        "array of objects": _trace(lambda: _npz((1,), b"\x80\x04cos\nsystem\n.", "|O")),
        "no archive": _trace(lambda: b"PK\x03\x04" + bytes(100)),
    },
)


def _sizes(**sizes: int) -> Change:
    return lambda folder, canary: changed(folder, config={**to_json(GaussianConfig()), **sizes})


_WIDEST = 10_000  # that a config may have


def _sparse(folder: Path, canary: Path) -> None:
    """As wide as the file says, which is one of holes."""
    GaussianPolicy(point_mass.spec(), None, GaussianConfig(width=8, depth=16)).save_pretrained(folder)
    changed(folder, config=to_json(GaussianConfig(width=_WIDEST, depth=16)))
    path = folder / "model.safetensors"
    good = path.read_bytes()
    header = json.loads(good[8 : 8 + struct.unpack("<Q", good[:8])[0]])
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            entry["shape"] = [_WIDEST if side == 8 else side for side in entry["shape"]]
            size = 4 * int(np.prod(entry["shape"], dtype=np.int64))
            entry["data_offsets"], end = [end, end + size], end + size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


def _steering(folder: Path, canary: Path) -> None:
    """Texts that a terminal obeys."""
    spec = json.loads((folder / "config.json").read_text())["spec"]
    text = "\x1b]0;x\x07\x1b[2J[/red]"
    spec["state"]["names"], spec["tasks"] = [text, text], [text]
    changed(folder, spec=spec, vocabulary={"words": [text]})


def _linked(name: str) -> Change:
    def make(folder: Path, canary: Path) -> None:
        outside = canary.with_name(name)
        (folder / name).rename(outside) if (folder / name).exists() else outside.write_text("")
        (folder / name).symlink_to(outside)

    return make


SIZES: dict[str, Make] = {
    **of(
        checkpoint,
        {
            "texts that steer a terminal": _steering,
            "layer as wide as may be": _sizes(width=_WIDEST, depth=2),
            "layers as many as may be": _sizes(width=_WIDEST, depth=100),
            "wide layer": _sizes(width=900_000, depth=2),
            "wider layer": _sizes(width=10**13, depth=1),
            "layers": _sizes(width=8, depth=10**9),
            "many layers": _sizes(width=8, depth=900_000),
            "weights of holes": _sparse,
            "weights linked": _linked("model.safetensors"),
            "config linked": _linked("config.json"),
        },
    ),
    **of(
        run,
        {
            f"run's {what} linked": _linked(name)
            for what, name in {
                "metrics": "metrics.jsonl",
                "lock": "lock",
                "state": "state",
                "config": "config.json",
            }.items()
        },
    ),
}
