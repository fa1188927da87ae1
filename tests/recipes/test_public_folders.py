"""What people bring is a folder they downloaded: the commands train it, imitate with it, evaluate and inspect it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.policies.vla.toy_family import TARGET, write_folder
from tests.recipes.quick_suite import quick
from tests.visual_point_mass import VisualPointMass
from vla_rl.cli import main
from vla_rl.cli.inspect import inspect
from vla_rl.cli.override import override
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.policies.openvla.decoding import OpenVLAOptions
from vla_rl.policies.pretrained import default_options, load_policy
from vla_rl.policies.vla.checkpoint import FAMILIES
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import open_tokenizer
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import demonstrated_scale
from vla_rl.recipes.imitate_dataset import spec_of
from vla_rl.recipes.suite_run import SuiteRun

QUICK = str(Path(__file__).with_name("quick.py")) + ":improve"
DATASET = Path(__file__).parents[1] / "golden" / "lerobot" / "dataset"
LIFT = EnvConfig("lift", options={"deadline": 5})
CAMERAS = ["--vla.cameras", json.dumps({"top": "front", "wrist": ""})]


@pytest.fixture(autouse=True)
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", TARGET)
    open_tokenizer.cache_clear()


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A folder for the tabletop whose only camera has another name there."""
    spec = LIFT.spec()
    camera = {"observation.images.top": {"type": "VISUAL", "shape": [3, 64, 64]}}
    state = {"observation.state": {"type": "STATE", "shape": list(spec.state.shape)}}
    wrist = {"observation.images.wrist": {"type": "VISUAL", "shape": [3, 64, 64]}}
    return write_folder(tmp_path / "folder", spec, input_features={**state, **camera, **wrist})


def test_a_command_trains_a_downloaded_folder(downloaded: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    given = ["--policy", str(downloaded), "--vla.horizon", "2", *CAMERAS]
    main(["train", QUICK, *given, "--rl.loop.iterations", "1", "--out", str(out)])
    assert json.loads((out / "summary.json").read_text())["env_steps"] > 0
    kept = from_json(json.loads((out / "config.json").read_text()))
    assert kept.vla == VLAOptions(cameras={"top": "front", "wrist": ""}, horizon=2)
    start = json.loads((out / "checkpoints" / "start" / "config.json").read_text())
    assert start["base"]["folder"] == str(downloaded) and start["cameras"] == ["front", None]
    best = load_policy(out / "checkpoints" / "best")
    assert best.horizon == 2 and best.base is not None
    main(["eval", str(out), "--episodes", "2", "--num-envs", "2"])
    assert "of 2 validation episodes" in "".join(capsys.readouterr())


def test_a_downloaded_folder_is_evaluated_as_it_is(downloaded: Path, tmp_path: Path) -> None:
    chosen = ["--env", "lift", "--env.options", json.dumps({"deadline": 5}), "--episodes", "2", "--num-envs", "2"]
    main(["eval", str(downloaded), *chosen, *CAMERAS, "--out", str(tmp_path / "result.json")])
    assert json.loads((tmp_path / "result.json").read_text())["episodes"] == 2


def test_a_dataset_is_imitated_without_an_environment(tmp_path: Path) -> None:
    episodes = load_demonstrations(DATASET)
    folder = write_folder(tmp_path / "folder", spec_of(episodes, "dataset"))
    few = ["--imitation.fit.steps", "3", "--imitation.fit.batch", "4", "--imitation.draws", "1"]
    given = ["--policy", str(folder), "--vla.statistics", str(DATASET), "--dataset", str(DATASET)]
    main(["train", "imitate.py:from_dataset", *given, *few, "--out", str(tmp_path / "run")])
    learnt = load_policy(tmp_path / "run" / "checkpoints" / "imitation")
    assert learnt.spec.tasks == episodes.tasks and learnt.base.folder == str(folder)
    saved = json.loads((DATASET / "meta" / "stats.json").read_text())
    assert learnt.action_scale.offset == tuple(saved["action"]["mean"])


@pytest.mark.full
def test_a_base_learns_relative_actions_by_their_own_statistics(tmp_path: Path) -> None:
    """Those of the dataset's file are of absolute actions."""
    episodes = load_demonstrations(DATASET)
    folder = write_folder(tmp_path / "folder", spec_of(episodes, "dataset"))
    few = ["--imitation.fit.steps", "3", "--imitation.fit.batch", "4", "--imitation.draws", "1"]
    mask = [True] * (episodes.action.shape[1] - 1) + [False]
    given = ["--policy", str(folder), "--vla.statistics", str(DATASET), "--vla.relative", *map(str, mask)]
    main(["train", "imitate.py:from_dataset", *given, "--dataset", str(DATASET), *few, "--out", str(tmp_path / "run")])
    learnt = load_policy(tmp_path / "run" / "checkpoints" / "imitation")
    assert learnt.relative == tuple(mask)
    assert learnt.action_scale == demonstrated_scale(episodes, learnt.relative, learnt.chunk_length)
    assert learnt.action_scale.offset[0] != pytest.approx(float(episodes.action[:, 0].mean()), abs=1e-4)


@pytest.mark.full
def test_a_suite_plays_a_downloaded_folder_with_its_options(tmp_path: Path) -> None:
    spec = VisualPointMass(1).spec
    cameras = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 8, 8]} for name in ("near", "far")}
    state = {"observation.state": {"type": "STATE", "shape": list(spec.state.shape)}}
    folder = write_folder(tmp_path / "folder", spec, input_features={**state, **cameras})
    options = VLAOptions(cameras={"near": "top", "far": ""}, horizon=2)
    run = SuiteRun(quick(), str(folder), tmp_path / "out", num_envs=2, videos=0, vla=options)
    results = run.run()
    assert results["policy"]["sha256"] and results["policy"]["vla"] == to_json(options)
    with pytest.raises(UserError, match="holds the episodes of another evaluation"):
        replace(run, vla=replace(options, horizon=1)).run()


def test_what_does_not_fit_is_one_sentence_and_status_2(downloaded: Path, tmp_path: Path, complaint: Any) -> None:
    given = ["train", QUICK, "--policy", str(downloaded), "--out", str(tmp_path / "run")]
    said = complaint(*given)
    assert "has the cameras top, wrist and the environment" in said and "--vla.cameras" in said
    (downloaded / "meta" / "stats.json").unlink()
    assert "holds no normalization statistics" in complaint(*given, *CAMERAS)
    assert "belongs to no environment" in complaint("serve-policy", str(downloaded))


def test_the_options_of_a_family_are_offered_and_set(downloaded: Path, tmp_path: Path) -> None:
    assert default_options(downloaded) == VLAOptions() == default_options(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}', encoding="utf-8")
    assert default_options(tmp_path) == OpenVLAOptions()
    given = replace(load_config(QUICK), vla=OpenVLAOptions())
    found = override(given, ["--vla.temperature", "1.6", "--vla.statistics-key", "libero"], "test")
    assert found.vla == OpenVLAOptions(temperature=1.6, statistics_key="libero")
    assert from_json(json.loads(json.dumps(to_json(found.vla)))) == found.vla


def printed(folder: Path) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    inspect(str(folder), console)
    return console.export_text()


def test_inspect_describes_a_folder_and_says_what_is_missing(downloaded: Path) -> None:
    text = printed(downloaded)
    for part in ("toy", "top 64x64, wrist 64x64", "chunks of 4, 3 executed", "tokenizer.json in the folder"):
        assert part in text
    state, action = LIFT.spec().state.shape[0], LIFT.spec().action_dim
    assert f"stats.json: {state} state entries, {action} action entries" in text
    assert "11 tensors in 1 file: " in text and " F32" in text
    for file in ("tokenizer.json", "meta/stats.json", "model.safetensors"):
        (downloaded / file).unlink()
    text = printed(downloaded)
    for part in ("nobody/nothing, from the Hugging Face hub", "holds no normalization statistics", "has no model.safe"):
        assert part in text
