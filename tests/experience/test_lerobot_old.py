"""LeRobotDatasets v2.1 and v2.0: read as v3.0 is, what is missing or damaged is named, nothing is written into them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.experience import lerobot_makers as makers
from tests.experience.lerobot_makers import FRONT, assert_holds, assert_is, info, old_files, write_old
from tests.experience.test_datasets import episode
from tests.hub import Hub, alone, at, serving
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import Recording, load_demonstrations
from vla_rl.experience.lerobot.disk import DamagedError, Problem
from vla_rl.experience.lerobot.reader import DatasetReader

COUNT = 4
LIST, TASKS, INFO = "meta/episodes.jsonl", "meta/tasks.jsonl", "meta/info.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("old") / "set"
    write_old(root, COUNT)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "set")


def lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def without(path: Path, index: int) -> None:
    lines(path, lambda found: found[:index] + found[index + 1 :])


def declare(root: Path, **changes: object) -> None:
    (root / INFO).write_text(json.dumps(info(root) | changes))


def test_every_episode_is_read(root: Path) -> None:
    assert_holds(root, list(range(COUNT)))
    declare(root, codebase_version="v2.0", data_path=None, video_path=None)  # the usual ones
    (root / "meta/episodes_stats.jsonl").unlink()  # v2.0 has none
    assert_holds(root, list(range(COUNT)))


def test_numbers_with_a_gap_and_folders_of_two_episodes(root: Path) -> None:
    """Episode 1 was deleted with its files; its number is not used again."""
    declare(root, chunks_size=2)
    for i in range(COUNT):
        for _, name in old_files(i):
            target = root / name.replace("chunk-000", f"chunk-{i // 2:03d}")
            target.parent.mkdir(parents=True, exist_ok=True)
            (root / name).rename(target)
    assert_holds(root, list(range(COUNT)))
    without(root / LIST, 1)
    (root / old_files(1)[0][1]).unlink()
    declare(root, total_episodes=3)
    reader = DatasetReader(root)
    assert len(reader) == 3 and reader.problems == ()
    for found, index in zip(reader.episodes(), (0, 2, 3), strict=True):
        assert_is(found, index)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, set[int]]] = {
    "no parquet": (lambda root: (root / old_files(1)[0][1]).unlink(), r"episode_000001.parquet' is missing", {1}),
    "no video": (lambda root: (root / old_files(2)[1][1]).unlink(), rf"000002.mp4', column '{FRONT}', is miss", {2}),
    "no line": (lambda root: without(root / LIST, 1), r"episodes.jsonl' has no line about what info.*counts", {1}),
    "half a line": (
        lambda root: lines(root / LIST, lambda found: [found[0], found[1][:20] + "\n", *found[2:]]),
        r"'meta/episodes.jsonl' cannot be read in line 2 \(JSONDecodeError: .* so episode 1 cannot",
        {1},
    ),
    "half a line, and a gap": (
        lambda root: (
            lines(root / LIST, lambda found: ["7\n", *found[2:]]),
            declare(root, total_episodes=3),
        ),
        r"line 1 \(TypeError: .*\), nor can episode 3 be placed, so episodes 0 to 1 cannot be read",
        {0, 1, 3},
    ),
    "an impossible line": (
        lambda root: lines(root / LIST, lambda found: [found[0].replace('index": 0', 'index": -1'), *found[1:]]),
        r"cannot be read in line 1 \(ValueError: episode -1 of 2 frames\)",
        {0},
    ),
    "no list": (lambda root: (root / LIST).unlink(), r"'meta/episodes.jsonl' is missing", {0, 1, 2, 3}),
    "frames that are not there": (
        lambda root: lines(root / LIST, lambda found: [found[0].replace('"length": 2', '"length": 3'), *found[1:]]),
        r"episode_000000.parquet' holds 2 frames of episode 0 where meta/ says 3",
        {0},
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_rest_is_read(root: Path, name: str) -> None:
    change, what, lost = DAMAGES[name]
    change(root)
    problems: list[Problem] = []
    read = [found.index for found in DatasetReader(root).episodes(on_damage=problems.append)]
    assert set(range(COUNT)) - set(read) == lost
    with pytest.raises(DamagedError, match=what):
        list(DatasetReader(root).episodes())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (Path.unlink, "is missing"),
        (lambda path: without(path, 1), r"cannot be used \(its task_index is \[0, 2\]\)"),
        (lambda path: lines(path, lambda found: [*found[:2], "{}\n"]), r"cannot be read in line 3 \(KeyError: 'task"),
    ],
)
def test_an_episode_of_one_task_needs_no_table_of_tasks(root: Path, change: Callable, what: str) -> None:
    change(root / TASKS)
    with pytest.raises(DamagedError, match=rf"'meta/tasks.jsonl' {what}.*so only episodes with one task know its text"):
        list(DatasetReader(root).episodes())
    problems: list[Problem] = []
    for found, index in zip(DatasetReader(root).episodes(on_damage=problems.append), range(COUNT), strict=True):
        assert_is(found, index)


@pytest.mark.parametrize("path", ["../../{episode_index}.parquet", "/etc/{episode_index}", "data/{secret}.parquet"])
def test_paths_lead_to_files_of_the_dataset_alone(root: Path, path: str) -> None:
    declare(root, data_path=path)
    with pytest.raises(UserError, match="is no path in the dataset"):
        DatasetReader(root)


def test_links_out_of_the_dataset_and_memory_that_no_file_explains_are_refused(root: Path) -> None:
    file = root / old_files(0)[0][1]
    file.rename(root.parent / "elsewhere")
    os.symlink(root.parent / "elsewhere", file)
    with pytest.raises(UserError, match="leads out of its folder"):
        DatasetReader(root)
    file.unlink()
    lines(root / LIST, lambda found: [found[1].replace('"length": 4', '"length": 99999999999')])
    declare(root, total_episodes=1)
    with pytest.raises(UserError, match="of memory"):
        list(DatasetReader(root).episodes())


def test_nothing_is_written_into_it(root: Path) -> None:
    before = sorted(root.rglob("*"))
    match = r"is a LeRobotDataset v2\.1, which is read but not written"
    with pytest.raises(UserError, match=match), Recording(root, "never") as more:
        more.add(episode())
    assert sorted(root.rglob("*")) == before


@pytest.mark.full
def test_only_what_the_episodes_and_cameras_need_is_downloaded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with serving(Hub({"datasets/somebody/arm": {"v2.1": files, "main": files}})) as hub:
        at(monkeypatch, hub.url)
        alone(monkeypatch, tmp_path)
        monkeypatch.chdir(tmp_path)
        found = load_demonstrations("somebody/arm", [1], cameras=["wrist"])
        assert [name for name in hub.taken("resolve") if not name.startswith("meta/")] == [old_files(1)[0][1]]
        hub.asked.clear()
        both = load_demonstrations("somebody/arm@v2.1", [1, 2])
        assert hub.taken("resolve") == sorted([old_files(1)[1][1], *(name for _, name in old_files(2))])
        hub.asked.clear()
        whole = load_demonstrations("somebody/arm", cameras=["wrist"])
        assert hub.taken("resolve") == [old_files(i)[0][1] for i in (0, 3)]
        main(["inspect", "somebody/arm"])
    assert "v2.1" in capsys.readouterr().out
    assert np.array_equal(found.images["wrist"], makers.episode(1)[makers.WRIST])
    assert whole.count == COUNT and np.array_equal(whole.action[whole.episode == 1], found.action)
    assert np.array_equal(both.action, np.concatenate([makers.episode(i)["action"] for i in (1, 2)]))
