"""Imitation from a dataset alone: our own, one by lerobot, and what does not fit."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.experience.lerobot_makers import old_files, write_old
from vla_rl.cli import main
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.datasets import load_demonstrations, save_demonstrations
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import NewTiny
from vla_rl.recipes.imitate_dataset import ImitateDataset, require_fit

CONFIG = "imitate.py:from_dataset"
FEW = ["--imitation.fit.steps", "4", "--imitation.fit.batch", "8", "--imitation.draws", "1"]
SMALL = ["--new.width", "32", "--new.blocks", "1"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "lift"
    main(["collect", "--env", "lift", "--count", "3", "--out", str(folder)])
    return folder


def trained(out: Path, *arguments: object) -> TinyVLA:
    main(["train", CONFIG, "--out", str(out), *FEW, *map(str, arguments)])
    summary = json.loads((out / "summary.json").read_text())
    assert np.isfinite(summary["loss"]) and summary["steps"] > summary["episodes"]
    return TinyVLA.from_pretrained(out / "checkpoints" / "imitation")


def test_everything_is_learnt_from_the_dataset(dataset, tmp_path):
    policy = trained(tmp_path / "run", "--dataset", dataset, *SMALL)
    episodes = load_demonstrations(dataset)
    spec = policy.spec
    assert spec.tasks == episodes.tasks and spec.control_dt == pytest.approx(0.06, abs=0.001)
    assert spec.images["front"].shape == (64, 64, 3) and spec.state.names == episodes.state_names
    low, high = np.array(spec.action.low), np.array(spec.action.high)
    assert ((low <= episodes.action) & (episodes.action <= high)).all()
    torch.manual_seed(1)  # as the run began
    initial = TinyVLA(spec, policy.vocabulary, policy.proprioception, policy.config)
    moved = {name for name, item in initial.state_dict().items() if not torch.equal(item, policy.state_dict()[name])}
    assert any(name.startswith("backbone.conv") for name in moved), "perception did not learn"
    features = policy.encode(episodes.observation())
    out, _ = policy.act(features, {}, "eval", torch.Generator().manual_seed(0))
    assert out.action.shape == (len(episodes.state), 5, 4)


def test_a_policy_with_a_backbone_keeps_it_and_learns_the_rest(dataset, untrained, tmp_path):
    folder = untrained()
    policy = trained(tmp_path / "run", "--dataset", dataset, "--policy", folder)
    before = TinyVLA.from_pretrained(folder)
    for name, item in before.backbone.state_dict().items():
        assert torch.equal(item, policy.backbone.state_dict()[name])
    assert not torch.equal(before.connector[0].weight, policy.connector[0].weight)


def test_a_dataset_by_lerobot_is_learnt_from(tmp_path):
    golden = Path(__file__).parents[1] / "golden" / "lerobot" / "dataset"
    policy = trained(tmp_path / "run", "--dataset", golden, *SMALL, "--new.horizon", 3)
    assert policy.spec.tasks == load_demonstrations(golden).tasks


def test_what_is_streamed_whole_is_learnt_as_what_was_read_before(dataset, untrained, tmp_path):
    few = ("--dataset", dataset, *SMALL, "--imitation.demonstrations", 2, "--image-size", 32)
    for name, more in (("all", ()), ("frozen", ("--policy", untrained(), "--image-size", 0))):
        read = trained(tmp_path / name, *few, *more).state_dict()
        streamed = trained(tmp_path / f"{name} streamed", *few, *more, "--stream", 2).state_dict()
        assert all(torch.equal(item, streamed[key]) for key, item in read.items()), name


def test_a_block_after_the_other_is_read_and_all_are_seen_in_an_epoch(dataset, tmp_path):
    recipe = ImitateDataset(dataset=str(dataset), stream=2)
    episodes, numbers = recipe._chosen(0)
    whole = load_demonstrations(dataset)
    assert numbers.tolist() == [0, 1, 2] and np.array_equal(episodes.action, whole.action)
    pictures = episodes.images["front"]
    assert pictures.shape == whole.images["front"].shape and pictures.base.nbytes == 1, "no picture is in memory"
    policy = NewTiny(width=32, blocks=1).build(recipe.spec(episodes), episodes, 1)
    with closing(recipe._blocks(policy, numbers)) as blocks:
        epochs = [[*islice(blocks, 2)] for _ in range(4)]
    for epoch in epochs:
        found = sorted((len(part.state), part.images["front"].tobytes()) for part in epoch)
        first = whole.episode < 2
        assert found == sorted((int(at.sum()), whole.images["front"][at].tobytes()) for at in (first, ~first))
    assert len({tuple(len(part.state) for part in epoch) for epoch in epochs}) == 2, "in another order"
    short = trained(tmp_path / "run", "--dataset", dataset, *SMALL, "--stream", 1, "--imitation.fit.steps", 30)
    assert short.spec.tasks == whole.tasks


def test_what_is_streamed_may_be_damaged(tmp_path, complaint):
    write_old(tmp_path / "old", 3)
    video = tmp_path / "old" / old_files(1)[1][1]
    video.write_bytes(b"no video")
    dataset = ("--dataset", str(tmp_path / "old"), "--stream", "1", *SMALL, "--new.horizon", "3")
    arguments = ("train", CONFIG, *FEW, *dataset)
    assert video.name in complaint(*arguments, "--out", str(tmp_path / "run"), "--imitation.fit.steps", "20")
    trained(tmp_path / "other", *dataset, "--leave-out-damaged", "--imitation.fit.steps", 20)
    for index in (0, 2):
        (tmp_path / "old" / old_files(index)[1][1]).write_bytes(b"no video")
    said = complaint(*arguments, "--out", str(tmp_path / "third"), "--leave-out-damaged")
    assert "holds no readable episodes" in said


def test_pictures_are_shrunk_and_episodes_chosen(dataset, tmp_path):
    chosen = ("--image-size", 32, "--imitation.demonstrations", 2, "--imitation.fit.steps", 3)
    policy = trained(tmp_path / "run", "--dataset", dataset, *SMALL, *chosen)
    assert policy.spec.images["front"].shape == (32, 32, 3)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["episodes"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2], "few steps are logged too"


def test_what_does_not_fit_is_named(dataset, untrained, tmp_path, complaint):
    assert "no dataset was named" in complaint("train", CONFIG, "--out", tmp_path / "a")
    assert "nowhere" in complaint("train", CONFIG, "--out", tmp_path / "b", "--dataset", tmp_path / "nowhere")
    other = untrained(image_size=32)
    said = complaint("train", CONFIG, "--out", tmp_path / "c", "--dataset", dataset, "--policy", other)
    assert "camera front of shape (32, 32, 3) but the dataset has (64, 64, 3)" in said
    episodes = load_demonstrations(dataset)
    texts = tuple(f"{text} now" for text in episodes.tasks)
    save_demonstrations(replace(episodes, tasks=texts), tmp_path / "texts", video="never")
    shutil.rmtree(other)
    said = complaint("train", CONFIG, "--out", tmp_path / "d", "--dataset", tmp_path / "texts", "--policy", untrained())
    assert "which is not in the table" in said


def test_a_policy_for_an_environment_takes_its_bounds_and_tasks(dataset, tmp_path):
    policy = trained(tmp_path / "run", "--dataset", dataset, "--env", "lift", *SMALL)
    assert policy.spec == EnvConfig("lift").spec()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"fps": 30.0}, "control steps per second .* --accept rate"),
        ({"state_names": tuple("abcdefghij")}, "state entries .* --accept names"),
        ({"action": np.full((1, 4), 9.0, np.float32)}, "actions within .* --accept bounds"),
    ],
    ids=["rate", "names", "bounds"],
)
def test_what_differs_from_the_environment_is_named_and_may_be_accepted(dataset, changed, sentence):
    spec, episodes = EnvConfig("lift").spec(), load_demonstrations(dataset)
    changed = {"action": np.broadcast_to(changed["action"], episodes.action.shape)} if "action" in changed else changed
    changed = {"state_names": changed["state_names"][: len(spec.state.names)]} if "state_names" in changed else changed
    kind = sentence.rpartition(" ")[2]
    other = replace(episodes, **changed)
    assert require_fit(spec, episodes, "lift").tasks == spec.tasks
    with pytest.raises(ContractError, match=sentence):
        require_fit(spec, other, "lift")
    assert require_fit(spec, other, "lift", (kind,)).tasks == spec.tasks
    with pytest.raises(ContractError):
        require_fit(spec, other, "lift", tuple({"rate", "names", "bounds"} - {kind}))


def test_tasks_are_counted_as_in_the_environment(dataset):
    spec, episodes = EnvConfig("lift").spec(), load_demonstrations(dataset)
    reversed_table = replace(episodes, tasks=episodes.tasks[::-1], task=len(episodes.tasks) - 1 - episodes.task)
    found = require_fit(spec, reversed_table, "lift")
    assert [spec.tasks[i] for i in found.task] == [episodes.tasks[i] for i in episodes.task]
    with pytest.raises(UserError, match="did you mean 'names'"):
        require_fit(spec, episodes, "lift", ("name",))


def test_a_policy_that_cannot_imitate_is_named(dataset, tmp_path, complaint):
    given = ("--dataset", dataset, "--env", "lift", "--policy", "vla_rl.policies.feed_forward:GaussianPolicy")
    assert "GaussianPolicy lacks it" in complaint("train", CONFIG, "--out", tmp_path / "run", *given)
