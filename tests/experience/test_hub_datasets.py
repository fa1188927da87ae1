"""Datasets by their names on the Hugging Face hub: only what chosen episodes and cameras need is downloaded, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.experience import lerobot_makers as makers
from tests.hub import TOKEN, Hub, alone, at, serving
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.contract.hub import pinned
from vla_rl.contract.trust import names_ours_only
from vla_rl.experience.datasets import load_demonstrations, stream_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.layout import Limits
from vla_rl.policies.vla.dataset_statistics import read_statistics
from vla_rl.policies.vla.normalization_formulas import Modes

NAME, EPISODES = "somebody/arm", 3
DATA, VIDEO = "data/chunk-000/file-00{}.parquet", f"videos/{makers.FRONT}/chunk-000/file-00{{}}.mp4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every episode in files of its own."""
    root = tmp_path_factory.mktemp("recorded") / "arm"
    makers.write(root, EPISODES, limits=Limits(1e-6, 1e-6))
    return root


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    newer = {"meta/info.json": json.dumps({"codebase_version": "v4.0"}).encode()}
    repositories = {f"datasets/{NAME}": {"v3.0": files, "main": newer}, "datasets/somebody/untagged": {"main": files}}
    with serving(Hub({**repositories, "datasets/somebody/secret": {"main": files}})) as server:
        server.private.add("datasets/somebody/secret")
        at(monkeypatch, server.url)
        alone(monkeypatch, tmp_path)
        monkeypatch.chdir(tmp_path)
        yield server


def test_only_what_the_episodes_and_cameras_need_is_downloaded(hub: Hub, folder: Path) -> None:
    found, whole = load_demonstrations(NAME, [1], cameras=["wrist"]), load_demonstrations(folder)
    taken = hub.taken("resolve")
    assert [name for name in taken if not name.startswith("meta/")] == [DATA.format(1)]
    assert found.images.keys() == {"wrist"} and found.count == 1
    chosen = whole.episode == 1
    assert np.array_equal(found.images["wrist"], whole.images["wrist"][chosen])
    assert np.array_equal(found.action, whole.action[chosen])
    hub.asked.clear()
    both = load_demonstrations(NAME, [1, 2])
    assert [name for name in hub.taken("resolve")] == [DATA.format(2), VIDEO.format(1), VIDEO.format(2)]
    assert np.array_equal(both.images["front"], whole.images["front"][whole.episode > 0])


def test_without_pictures_no_video_is_downloaded(hub: Hub, folder: Path) -> None:
    found = Demonstrations.joined([*stream_demonstrations(NAME, cameras=None)])
    assert not any("videos" in name for name in hub.taken("resolve")) and not found.images
    assert np.array_equal(found.action, load_demonstrations(folder).action)


def test_the_version_that_can_be_read_is_taken_and_the_main_branch_where_none_is_tagged(hub: Hub) -> None:
    assert load_demonstrations(NAME).count == load_demonstrations("somebody/untagged").count == EPISODES
    with pytest.raises(UserError, match=r"is a LeRobotDataset v4\.0, which has another file layout"):
        load_demonstrations(f"{NAME}@main")


def test_what_is_there_needs_no_network_and_what_is_not_is_one_sentence(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, name = load_demonstrations(NAME, [0]), pinned(NAME)
    untagged = load_demonstrations("somebody/untagged", [0])
    assert name == f"{NAME}@{hub.commit(f'datasets/{NAME}', 'v3.0')}" and pinned(name) == name
    assert names_ours_only({"dataset": name}) and not names_ours_only({"dataset": "somebody/arm@main"})
    at(monkeypatch, "http://127.0.0.1:9")
    for again in (NAME, name):
        assert np.array_equal(load_demonstrations(again, [0]).action, found.action)
    assert np.array_equal(load_demonstrations("somebody/untagged", [0]).action, untagged.action)
    for missing in (NAME, name, "somebody/other"):
        with pytest.raises(UserError, match=r"could not be downloaded .* try again with a network"):
            load_demonstrations(missing, [0, 1])


def test_what_the_hub_refuses_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^'somebody/misspelt' is no folder here and no dataset that .* shows you"):
        load_demonstrations("somebody/misspelt")
    with pytest.raises(UserError, match=r"^'somebody/arm' has no revision 'v2' .* name a branch, tag or commit"):
        load_demonstrations(f"{NAME}@v2")
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserError, match=r"^'somebody/secret' is no folder .* log in \(hf auth login\)"):
            load_demonstrations("somebody/secret")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert load_demonstrations("somebody/secret", [2]).count == 1


def test_a_camera_that_the_dataset_lacks_is_named(hub: Hub, folder: Path) -> None:
    for path in (NAME, folder):
        with pytest.raises(UserError, match=r"has no camera 'top', so nothing was read; it has front, wrist\.$"):
            load_demonstrations(path, cameras=["wrist", "top"])
    assert not any("parquet" in name and "data/" in name for name in hub.taken("resolve"))


def test_inspect_shows_a_dataset_by_what_describes_it(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", NAME + "@v3.0"])
    assert "total_episodes" in capsys.readouterr().out and all(
        name.startswith("meta/") for name in hub.taken("resolve")
    )
    with pytest.raises(SystemExit):
        main(["inspect", "somebody/misspelt"])
    assert "no model that the Hugging Face hub shows you" in capsys.readouterr().err


def test_statistics_are_those_of_a_dataset_of_which_no_more_is_downloaded(hub: Hub, folder: Path) -> None:
    found, own = (read_statistics(Path(place), Modes()) for place in (NAME, folder))
    assert found.action == own.action and found.state == own.state
    assert all(name.startswith("meta/") for name in hub.taken("resolve"))
