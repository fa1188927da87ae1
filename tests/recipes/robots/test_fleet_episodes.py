"""What a fleet's ledger holds of an arm's episodes, exported, is what a recording on the arm itself would hold."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from tests.fleet.episodes import chained, introduction
from tests.recipes.robots.test_robot_recording import OPEN_LOOP, simulated
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.payloads import LOSSLESS, pack_introduction
from vla_rl.recipes.fleet.export import LEDGER, export
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.recording import Recorder, episode_of
from vla_rl.recipes.robots.session import LockstepSession
from vla_rl.recipes.robots.streaming import episode_end, fleet_step

NEW = {"complementary_info.robot"}  # what a fleet's dataset has beside a robot's own


def test_an_export_is_the_recording(tmp_path):
    config = replace(simulated(), seconds=1.0)
    records = []
    with closing(LockstepSession(config, OPEN_LOOP)) as session, Recorder(tmp_path / "recorded") as recorder:
        decide = drive.build_decider(session, config, drive.EpisodesConfig("expert", 2, 1, OPEN_LOOP))
        records.append(replace(introduction(), payload=pack_introduction(session.spec)))
        for number in (1, 2):
            seen = list(session.play(decide, number, number))
            recorder.add(episode_of(seen, session.spec, -1))
            like = replace(introduction(), kind="step", episode=str(number), task=session.spec.tasks[0])
            like = replace(like, policy_version=-1)
            start = seen[0].record.captured
            records += [replace(like, payload=fleet_step(one, start).payload(LOSSLESS)) for one in seen]
            end = episode_end([one.record for one in seen])
            records.append(replace(like, kind="episode_end", payload=end.payload()))
    with closing(Ledger(tmp_path / "fleet" / LEDGER)) as ledger:
        ledger.append(chained(records))
    summary = export(tmp_path / "fleet", tmp_path / "exported", print)
    recorded, exported = (load_demonstrations(tmp_path / name) for name in ("recorded", "exported"))
    assert (summary.episodes, summary.steps) == (2, len(recorded.state)) and not summary.left_out
    for name in ("state", "action", "time", "task", "seed", "episode"):
        np.testing.assert_array_equal(getattr(exported, name), getattr(recorded, name))
    np.testing.assert_array_equal(exported.images["front"], recorded.images["front"])
    assert exported.extras.keys() == recorded.extras.keys() | NEW
    for name, values in recorded.extras.items():
        np.testing.assert_array_equal(exported.extras[name], values, err_msg=name)
        assert exported.extras[name].dtype == values.dtype, name
    assert (exported.tasks, exported.fps, exported.robot) == (recorded.tasks, recorded.fps, recorded.robot)
    assert set(exported.extras["complementary_info.robot"].tolist()) == {"arm"}


def test_a_folder_without_a_ledger_is_named(tmp_path):
    with pytest.raises(UserError, match="no fleet's folder"):
        export(tmp_path, tmp_path / "out", print)


def test_no_whole_episode_is_said(tmp_path):
    with closing(Ledger(tmp_path / LEDGER)) as ledger:
        ledger.append([introduction()])
    with pytest.raises(UserError, match="no whole episode"):
        export(tmp_path, tmp_path / "out", print)
