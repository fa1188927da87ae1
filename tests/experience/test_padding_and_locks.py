"""Actions that nobody demonstrated have no weight; a dataset has one writer; what cannot be learnt from is named."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.algorithms.test_hg_dagger import Table
from tests.toys import seeded
from vla_rl.algorithms.chunks import demonstrated, mean_loss
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import (
    Recording,
    load_demonstrations,
    move_aside,
    repair,
    save_demonstrations,
    schema_of,
)
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.writer import DatasetWriter
from vla_rl.recipes.imitate_dataset import spec_of
from vla_rl.recipes.robots.drive import Recorder


def episode(length: int = 4, channels: int = 3) -> Demonstrations:
    """Actions 1, 2, ... ``length``."""
    return Demonstrations(
        images={"cam": np.zeros((length, 32, 32, channels), np.uint8)},
        state=np.zeros((length, 2), np.float32),
        task=np.zeros(length, np.int64),
        time=np.arange(length),
        action=np.arange(1, length + 1, dtype=np.float32)[:, None],
        episode=np.zeros(length, np.int64),
        seed=np.full(length, -1),
        tasks=("push",),
        fps=10,
        state_names=("a", "b"),
        action_names=("x",),
    )


def changed(path: Path, column: str, values: Tensor) -> None:
    file = path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    new = pa.array(values.tolist(), table.schema.field(column).type)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, new), file)


def test_the_repeated_last_action_has_no_weight() -> None:
    policy, (actions, counts) = Table(), episode().chunks(3)
    shown = demonstrated({}, torch.as_tensor(actions), torch.as_tensor(counts), torch.zeros(4, dtype=torch.long))
    loss = mean_loss(policy, shown, 1, seeded())
    assert float(loss.detach()) == pytest.approx((1 + 4 + 9 + 16 + 4 + 9 + 16 + 9 + 16) / 9)  # not of 12 actions
    loss.backward()
    assert policy.rows.grad is not None
    assert policy.rows.grad.flatten().tolist() == pytest.approx([-20 / 9, -18 / 9, -14 / 9])
    policy.rows.grad = None
    mean_loss(policy, shown.select(torch.tensor([3])), 1, seeded()).backward()
    assert policy.rows.grad.flatten().tolist() == [-8.0, 0.0, 0.0]


def test_a_dataset_that_is_being_recorded_is_not_taken_away(tmp_path: Path) -> None:
    with Recording(tmp_path / "d", "never") as first:
        first.add(episode())
        with pytest.raises(UserError, match="is writing to"):
            move_aside(tmp_path / "d")
        with pytest.raises(UserError, match="is writing to"), Recording(tmp_path / "d", "never") as second:
            second.add(episode())
        with pytest.raises(UserError, match="is writing to"), DatasetWriter(tmp_path / "d", schema_of(episode())):
            pass  # at its end it would finish what is there
        first.add(episode())
    assert load_demonstrations(tmp_path / "d").count == 2


def test_a_recorder_has_its_folder_before_the_first_episode_and_leaves_none_without_one(tmp_path: Path) -> None:
    with Recording(tmp_path / "d"), pytest.raises(UserError, match="is writing to"), Recorder(tmp_path / "d"):
        pass
    assert not (tmp_path / "d").exists()
    save_demonstrations(episode(), tmp_path / "d", "never")
    with Recording(tmp_path / "d"):
        assert (tmp_path / "d/recording").exists()
    assert load_demonstrations(tmp_path / "d").count == 1 and not (tmp_path / "d/recording").exists()


def test_a_recorder_whose_folder_went_does_not_finish_another_ones(tmp_path: Path) -> None:
    here, gone = tmp_path / "d", tmp_path / "d.1"
    with ExitStack() as opened:
        with pytest.raises(UserError, match="was moved or removed"), Recording(here, "never") as first:
            first.add(episode())
            here.rename(gone)
            second = opened.enter_context(Recording(here, "never"))
            second.add(episode())
        second.add(episode())
    repair(gone)
    assert (load_demonstrations(here).count, load_demonstrations(gone).count) == (2, 1)


def test_episodes_whose_numbers_have_a_gap_are_read(tmp_path: Path) -> None:
    with Recording(tmp_path / "d", "never") as kept:
        for i in range(4):
            kept.add(replace(episode(), state=np.full((4, 2), i, np.float32)))
    for part in ("data", "meta/episodes"):
        file = tmp_path / "d" / part / "chunk-000/file-000.parquet"
        table = pq.read_table(file)
        pq.write_table(table.filter(pa.compute.not_equal(table["episode_index"], 1)), file)
    info = tmp_path / "d/meta/info.json"
    info.write_text(info.read_text().replace('"total_episodes": 4', '"total_episodes": 3'))
    found = load_demonstrations(tmp_path / "d")
    assert found.count == 3 and found.state[:, 0].tolist() == [0] * 4 + [2] * 4 + [3] * 4
    with pytest.raises(UserError, match="numbers up to 3 but are 3"), Recording(tmp_path / "d", "never") as more:
        more.add(episode())


def test_an_episode_of_another_rate_is_named(tmp_path: Path) -> None:
    with Recording(tmp_path / "d", "never") as kept:
        for _ in range(3):
            kept.add(episode())
    times = torch.tensor([0.0, 0.1, 0.2, 0.3] * 2 + [0.0, 0.2, 0.4, 0.6])
    changed(tmp_path / "d", "timestamp", times)
    with pytest.raises(UserError, match=r"'timestamp', has a frame every 0.2 s.* episode 2 "):
        load_demonstrations(tmp_path / "d")
    assert load_demonstrations(tmp_path / "d", on_damage=lambda problem: None).count == 2


def test_a_number_that_is_not_finite_is_named(tmp_path: Path) -> None:
    with Recording(tmp_path / "d", "never") as kept:
        for _ in range(2):
            kept.add(episode())
    actions = torch.arange(8.0)
    actions[6] = float("nan")
    changed(tmp_path / "d", "action", actions)
    with pytest.raises(UserError, match=r"'action', is not finite in frame 2.* episode 1 "):
        load_demonstrations(tmp_path / "d")
    assert load_demonstrations(tmp_path / "d", on_damage=lambda problem: None).count == 1


def test_a_camera_of_one_channel_is_refused() -> None:
    with pytest.raises(UserError, match="'cam' of 'd' has 1 channel"):
        spec_of(replace(episode(channels=1)), "d")
