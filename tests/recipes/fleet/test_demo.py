"""``vla-rl fleet demo``: server, learner, robots, people and a page on one machine, with one command."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.fleet.records import chained, episode, introduction
from tests.patience import wait_until
from tests.recipes.fleet import configs
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.fleet.identity import Authority
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.payloads import EpisodeEnd
from vla_rl.fleet.registry import Registry
from vla_rl.recipes.fleet.demo import Played, RobotProcesses, played_in, windows
from vla_rl.training.tracking import RunFolder

CONFIG = str(Path(configs.__file__).resolve())


@pytest.mark.full
def test_one_command_has_robots_practise_with_a_person_and_a_learner_and_makes_a_page(tmp_path):
    out = tmp_path / "demo"
    main(["fleet", "demo", f"{CONFIG}:demo", "--out", str(out)])
    found = json.loads((out / "summary.json").read_text())
    assert found["episodes"] == 2 and found["imitation"]["episodes"] == found["fleet"]["episodes"] == 1
    assert found["records"] == found["steps"] + 2 + 1, "steps, ends of episodes, and the robot's introduction"
    assert 0 < found["intervened"] <= 0.2 * found["steps"] and found["learner"]["episodes"] <= 2
    assert "everything is stored" in (out / "robots/arm-1.log").read_text()
    with closing(Ledger(out / "fleet/ledger")) as ledger:
        played = list(played_in(ledger))
    assert [one.robot for one in played] == ["arm-1"] * 2 and {one.version for one in played} <= {1, 2}
    assert Registry(out / "fleet/registry").releases.active in (1, 2)
    page = (out / "report.html").read_text()
    assert all(text in page for text in ("arm-1", "records stored", "active", "Success without a person"))

    # A run that was stopped goes on with what its ledger holds: here, with nothing more to play.
    (out / "summary.json").unlink()
    with closing(RunFolder.resume(out)) as folder:
        again = folder.config.run(folder)
    assert {name: again[name] for name in ("episodes", "records")} == {
        name: found[name] for name in ("episodes", "records")
    }


@pytest.mark.full
def test_robots_stand_still_go_on_and_are_named_when_they_fail(tmp_path):
    Authority.create(tmp_path / "certificates")  # and none for the robot
    robots = RobotProcesses(tmp_path / "robots", "127.0.0.1:1", tmp_path / "certificates", {"arm-1": 1}, 1)
    with closing(robots):
        (process,) = robots._processes.values()

        def state() -> str:
            return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]

        robots.pause(True)
        wait_until(lambda: state() == "T")
        robots.pause(False)
        with pytest.raises(UserError, match=r"arm-1 ended with exit code 2, .*vla-rl: .*robots/arm-1"):
            wait_until(lambda: not robots.running)


def played(*alone: bool) -> list[Played]:
    ends = (EpisodeEnd("success", 10, 0 if one else 4, 0, 1.0) for one in alone)
    return [Played(n, "arm", 1, end) for n, end in enumerate(ends, 1)]


def test_a_curve_is_of_windows_of_episodes_without_a_person():
    found = list(windows(played(*[False] * 8, *[True] * 8), 8))
    assert [end for end, _, _ in found] == [8, 10, 12, 14, 16]
    np.testing.assert_allclose([rate.success for _, rate, _ in found], [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose([share for _, _, share in found], [0.4, 0.3, 0.2, 0.1, 0])
    assert [(end, rate.episodes) for end, rate, _ in windows(played(True, True, False), 8)] == [(3, 3)]


def test_an_end_that_cannot_be_read_is_left_out_of_the_page(tmp_path):
    broken = [replace(one, payload=b"\xc1") if one.kind == "episode_end" else one for one in episode("a", 1)]
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        ledger.append(chained([introduction(), *broken, *episode("b", 1)]))
        assert [(one.position, one.end.steps) for one in played_in(ledger)] == [(5, 1)]
