"""The real lerobot, in an environment of its own, reads what we wrote: new, grown, and repaired after a kill.

Its converter takes the v2.1 that our tests are made of, so that is what we read; and both versions are the same to us.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.experience import lerobot_makers as makers
from tests.experience.lerobot_makers import FRONT, WRIST, episode, info, length, schema, task, write, write_old
from tests.experience.test_lerobot_golden import DATASET, GOLDEN, VALUES, columns
from vla_rl.experience.lerobot.disk import digest
from vla_rl.experience.lerobot.layout import Limits
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.experience.lerobot.writer import DatasetWriter, repair

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
CACHE = Path(__file__).parents[2] / ".cache" / "lerobot-venv"
REQUIREMENTS = GOLDEN / "requirements.txt"


def run(*command: str | Path, **settings: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run([str(item) for item in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def python() -> Path:
    """The environment of requirements.txt, made once and kept in .cache."""
    done, wanted = CACHE / "installed", digest(REQUIREMENTS)
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(CACHE, ignore_errors=True)
        run(sys.executable, "-m", "venv", CACHE)
        torch = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
        run(CACHE / "bin" / "pip", "install", "-q", torch)
        run(CACHE / "bin" / "pip", "install", "-q", "--no-deps", "-r", REQUIREMENTS)
        done.write_text(wanted)
    return CACHE / "bin" / "python"


@pytest.fixture
def load(python, tmp_path):
    def load(root: Path) -> tuple[dict, dict[str, np.ndarray]]:
        run(python, "-W", "ignore", GOLDEN / "read.py", root, tmp_path / "read.npz", HF_HOME=str(tmp_path / "hf"))
        with np.load(tmp_path / "read.npz") as file:
            arrays = {name: file[name] for name in file.files}
        return json.loads(str(arrays.pop("summary"))), arrays

    return load


def as_lerobot_gives_it(values: np.ndarray) -> np.ndarray:
    """Its loader rounds float64 columns to torch's usual float32."""
    return values.astype(np.float32) if values.dtype == np.float64 else values


def assert_real(summary: dict, arrays: dict[str, np.ndarray], indices: list[int]) -> None:
    """What lerobot read are the makers' episodes ``indices``."""
    wanted = [episode(index) for index in indices]
    lengths = [length(index) for index in indices]
    assert (summary["episodes"], summary["fps"], summary["robot"]) == (len(indices), makers.FPS, "arm")
    for name in wanted[0]:
        values = np.concatenate([item[name] for item in wanted])
        if name in (FRONT, WRIST):
            pixels = np.round(arrays[name].transpose(0, 2, 3, 1) * 255).astype(int)
            off = np.abs(pixels - values)
            bounds = (0, 0) if name == WRIST else (makers.MEAN_ERROR, makers.WORST_ERROR)
            assert off.mean() <= bounds[0] and off.max() <= bounds[1], name
        else:
            assert np.array_equal(arrays[name], as_lerobot_gives_it(values)), name
    assert np.array_equal(arrays["task"], np.repeat([task(index) for index in indices], lengths))
    frames = np.concatenate([np.arange(n) for n in lengths])
    assert np.array_equal(arrays["frame_index"], frames)
    assert np.array_equal(arrays["timestamp"], (frames / makers.FPS).astype(np.float32))
    assert np.array_equal(arrays["index"], np.arange(sum(lengths)))
    assert np.array_equal(arrays["episode_index"], np.repeat(np.arange(len(indices)), lengths))
    actions = [item["action"] for item in wanted]
    ahead = np.concatenate([np.stack([one, np.concatenate([one[1:], one[-1:]])], 1) for one in actions])
    assert np.array_equal(arrays["chunks"], ahead) and np.array_equal(arrays["last"], actions[-1])
    assert np.array_equal(arrays["padded"][:, 1], np.diff(arrays["episode_index"], append=-1) != 0)
    np.testing.assert_allclose(summary["means"]["action"], np.concatenate(actions).mean(0, dtype=float), atol=1e-9)


def test_it_reads_a_dataset_in_many_files(load, tmp_path):
    write(tmp_path / "set", 12, limits=Limits(0.03, 0.0025, 2))
    assert len(list((tmp_path / "set").rglob("*.mp4"))) > 3 and (tmp_path / "set" / "data" / "chunk-001").is_dir()
    assert_real(*load(tmp_path / "set"), list(range(12)))


def test_it_reads_a_dataset_that_grew(load, tmp_path):
    for first, count in ((0, 1), (3, 2), (6, 1)):
        write(tmp_path / "set", count, first=first)
    assert_real(*load(tmp_path / "set"), [0, 3, 4, 6])


def test_it_reads_what_a_repair_has_finished(load, tmp_path):
    write(tmp_path / "set", 2)
    writer = DatasetWriter(tmp_path / "set", schema())
    for index in (2, 3, 4):
        writer.add(episode(index), task(index))
    writer.close()
    path = tmp_path / "set" / "recording" / "episode-000003" / "frames.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    assert [problem.episodes for problem in repair(tmp_path / "set")] == [(3,)]
    assert_real(*load(tmp_path / "set"), [0, 1, 2, 4])


def test_it_reads_its_own_dataset_after_we_added_to_it(load, tmp_path):
    root = shutil.copytree(DATASET, tmp_path / "grown")
    with DatasetWriter(root, DatasetReader(root).schema) as writer:
        writer.add(columns(3), "a new task")
    summary, arrays = load(root)
    everything = [columns(i) for i in (0, 1, 2, 3, 4, 3)]
    assert summary["episodes"] == 6 and set(arrays["task"][-2:]) == {"a new task"} and summary["robot"] == "toy"
    for name in ("observation.state", "action", "ticks", "note", "calibration"):
        assert np.array_equal(arrays[name], as_lerobot_gives_it(np.concatenate([item[name] for item in everything]))), (
            name
        )
    off = arrays[FRONT].transpose(0, 2, 3, 1) * 255 - np.concatenate([item[FRONT] for item in everything])
    assert np.abs(off).mean() < 1.5 and set(arrays["task"]) == {*VALUES.TASKS, "a new task"}


def test_its_converter_makes_the_same_of_an_old_dataset(python, tmp_path):
    old, converted = tmp_path / "old", tmp_path / "converted"
    write_old(old, 6, fps=10)  # which it takes whole, and columns of two axes not at all
    known = info(old)
    known["features"].pop("calibration")
    (old / "meta/info.json").write_text(json.dumps(known))
    for file in old.rglob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(["calibration"]).replace_schema_metadata(None), file)
    shutil.copytree(old, converted)
    run(python, "-W", "ignore", GOLDEN / "convert.py", converted, HF_HOME=str(tmp_path / "hf"))
    assert info(converted)["codebase_version"] == "v3.0"
    for one, other in zip(DatasetReader(old).episodes(), DatasetReader(converted).episodes(), strict=True):
        assert one.tasks == other.tasks and one.columns.keys() == other.columns.keys()
        for name in (*one.columns, "task", "time"):
            ours, its = (getattr(item, name, item.columns.get(name)) for item in (one, other))
            assert np.array_equal(ours, its), name
