"""``vla-rl compare``: runs side by side that nothing runs twice, a page; cells that lose what runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Event

import pytest

from tests.patience import wait_until
from vla_rl.cli import main
from vla_rl.contract.child import ChildError
from vla_rl.contract.errors import UserError
from vla_rl.experience.worker import LostWorkerError, Server
from vla_rl.recipes import compare as sweep
from vla_rl.recipes.compare import Cell, Compared, run_cells, run_sweep, steps_to, write_page
from vla_rl.recipes.workers import (
    ClusterLauncher,
    Engine,
    Launcher,
    Machine,
    on_engine,
)
from vla_rl.training.tracking import await_unlocked, lock_run, unlock_run

CONFIG = str(Path(__file__).parent / "quick.py")


def test_every_method_starts_from_the_imitation_of_its_seed(tmp_path, monkeypatch):
    asked: dict[str, list[Cell]] = {}

    def noted(out, steps, processes) -> None:
        asked.update({what: list(cells) for what, cells in steps.items()})
        raise KeyboardInterrupt

    monkeypatch.setattr("vla_rl.recipes.compare.run_sweep", noted)
    command = ["compare", "--config", CONFIG, "--seeds", "2", "3", "--lift", "improve", "mixed", "--place"]
    with pytest.raises(SystemExit):
        main([*command, "--out", str(tmp_path)])
    lift = tmp_path / "lift"
    assert list(asked) == ["imitate", "improve"]
    assert [cell.out for cell in asked["imitate"]] == [lift / "imitate-2", lift / "imitate-3"]
    for cell in asked["improve"]:
        name, _, seed = cell.out.name.partition("-")
        start = lift / f"imitate-{seed}"
        given = (
            "--policy",
            str(start / "checkpoints" / "imitation"),
            "--demonstrations",
            str(start / "demonstrations"),
        )
        assert cell.config == f"{CONFIG}:{name}" and cell.arguments == ("--seed", seed, *given)
    assert {cell.out.name for cell in asked["improve"]} == {"improve-2", "improve-3", "mixed-2", "mixed-3"}


@pytest.mark.full
def test_everything_starts_from_the_same_policy_and_is_tabled(tmp_path, capsys, complaint):
    out = tmp_path / "compared"
    command = ["compare", "--config", CONFIG, "--seeds", "2", "--lift", "improve", "mixed"]
    command += ["--place", "--out", str(out)]
    main(command)
    results = json.loads((out / "results.json").read_text())
    assert [[row[name] for name in ("method", "task", "seed")] for row in results] == [
        ["improve", "lift", 2],
        ["mixed", "lift", 2],
    ]
    for row in results:
        mine = row["validations"]
        assert all(one["played"] == 4 and one["low"] <= one["success"] <= one["high"] for one in mine)
        steps = [one["env_steps"] for one in mine]
        assert steps[0] == 0 and steps == sorted(steps) and len(set(steps)) == 5
        assert row["simulator_episodes"] >= 5 * 4 and row["imitation"]["episodes"] == row["rl"]["episodes"] == 4
        config = json.loads((out / "lift" / f"{row['method']}-2" / "config.json").read_text())
        assert config["policy"] == str(out / "lift" / "imitate-2" / "checkpoints" / "imitation")
        assert config["demonstrations"] == str(out / "lift" / "imitate-2" / "demonstrations")
    page = (out / "report.html").read_text()
    assert all(text in page for text in ("imitation", "mixed", "control steps to 85%", "seed 2", "validation success"))
    assert json.loads((out / "lift" / "imitate-2" / "test.json").read_text())["episodes"] == 4
    assert "<strong>mixed</strong>" in page and "half of every batch from demonstrations." in page
    before = (out / "lift" / "mixed-2" / "summary.json").stat().st_mtime_ns
    main(command)
    assert (out / "lift" / "mixed-2" / "summary.json").stat().st_mtime_ns == before
    assert "no config function 'imitate_place'" in complaint(*command, "--place", "improve")


def test_demonstrations_that_are_needed_and_missing_are_asked_for(untrained, quick, tmp_path, complaint):
    arguments = ("--policy", untrained(), "--out", tmp_path / "run")
    assert "add --demonstrations" in complaint("train", quick.replace("improve", "mixed"), *arguments)


@pytest.mark.parametrize(
    ("successes", "expected"), [((0.8, 0.9, 0.8, 0.9), None), ((0.8, 0.85, 0.9), 1), ((0.9, 0.9), 0), ((0.9,), None)]
)
def test_the_target_is_reached_by_two_validations_in_a_row(successes, expected):
    assert steps_to([{"env_steps": i, "success": value} for i, value in enumerate(successes)], 0.85) == expected


def test_what_is_worse_than_imitation_is_shown_as_such(tmp_path):
    def rate(success: float) -> dict[str, float | int]:
        return {"success": success, "low": success - 0.1, "high": success + 0.1, "episodes": 100}

    def algorithm(name: str, about: str, one: float, two: float) -> Compared:
        spent = {"validations": [{"env_steps": 9, **rate(one)}], "simulator_episodes": 8, "seconds": 3.0}
        ends = [
            {"seed": seed, "imitation": rate(before), "rl": rate(after), "gain": None, **spent}
            for seed, before, after in ((1, 0.5, one), (2, 0.4, two))
        ]
        return Compared(name, about, ends)

    good = algorithm("good", "It learns.\n\nBy trying.", 0.7, 0.45)
    bad = algorithm("bad", "It guesses.\n\nIt never looks.", 0.6, 0.2)
    page = tmp_path / "report.html"
    write_page(page, {"lift": [bad, good]}, 0.85, "vla-rl compare")
    text = page.read_text()
    assert "<strong>Worse than imitation: bad on seed 2 (-20.0 points).</strong> It never looks." in text
    assert "Worse than imitation: good" not in text and "-20.0</td>" in text
    table = text[text.index("<tbody>") :]
    assert table.index("imitation") < table.index(">good<") < table.index(">bad<"), "the best first"


# -- cells, and launchers whose workers die: without Ray, with processes of this machine -------------------------------

SLEEPS = ("train", f"{Path(__file__).parent / 'sleeper.py'}:sleeps")


class Script:
    """A launcher that does with a cell what ``steps`` say, in turn: "lost", "lost at its end", "fails", "ends"."""

    def __init__(self, out: Path, *steps: str) -> None:
        self.out, self.steps, self.asked, self.closed = out, list(steps), [], 0

    def launch(self, arguments, log):
        self.asked.append(list(arguments))
        self.out.mkdir(exist_ok=True)
        (self.out / "config.json").write_text("{}")
        step = self.steps.pop(0)
        if step in ("ends", "lost at its end"):
            (self.out / "summary.json").write_text("{}")
        if step.startswith("lost"):
            raise LostWorkerError("the worker died") from ChildError("was killed by SIGKILL")
        log.write_text("line\nno such policy\n")
        return int(step == "fails")

    def close(self):
        self.closed += 1


@pytest.fixture
def cell(tmp_path):
    return Cell(tmp_path / "cell", "demo.py:imitate", ("--seed", "1"))


def test_a_cell_that_is_lost_goes_on_from_its_state(cell):
    script = Script(cell.out, "lost", "lost", "ends")
    cell.run(script)
    new, resumed = ["train", "demo.py:imitate", "--out", str(cell.out), "--seed", "1"], ["train", "--resume"]
    assert script.asked == [new, [*resumed, str(cell.out)], [*resumed, str(cell.out)]]
    cell.run(script)
    assert len(script.asked) == 3


def test_a_cell_that_was_finished_in_time_is_not_run_again(cell):
    script = Script(cell.out, "lost at its end")
    cell.run(script)
    assert len(script.asked) == 1


def test_a_cell_is_not_started_for_ever_and_a_failure_not_again(cell):
    script = Script(cell.out, *["lost"] * 9)
    with pytest.raises(UserError, match=r"cell was lost 5 times, as what ran it was killed by SIGKILL, .* to go on"):
        cell.run(script)
    assert len(script.asked) == 5
    script = Script(cell.out, "fails", "ends")
    with pytest.raises(UserError, match=r"cell failed \(no such policy\); see .*cell.log, then run the same command"):
        cell.run(script)
    assert len(script.asked) == 1


@pytest.mark.full
def test_before_it_goes_on_what_has_locked_its_folder_has_ended(cell, monkeypatch):
    """A process that ends is seen; one that never does is waited for so long and no longer."""
    lock = "import sys; from pathlib import Path; from vla_rl.training.tracking import lock_run; lock_run(Path({!r}))"
    code = f"{lock.format(str(cell.out))}; print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        await_unlocked(cell.out, 0.1)
        assert process.poll() is None
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(await_unlocked, cell.out, 600.0)
            assert not waiting.done()
            process.kill()
            waiting.result()
        assert process.wait() == -signal.SIGKILL
    unlock_run(cell.out, lock_run(cell.out))
    await_unlocked(cell.out, 600.0)
    asked = []
    monkeypatch.setattr(sweep, "await_unlocked", lambda folder, patience: asked.append(folder))
    cell.run(Script(cell.out, "lost", "ends"))
    assert asked == [cell.out]


class Room(Engine):
    """Gives out one launcher, and notes for what."""

    def __init__(self, launcher) -> None:
        self.given, self.asked = launcher, []

    def launcher(self, count, folder):
        self.asked.append((count, folder))
        return self.given


def test_the_engine_of_the_block_launches_what_is_left(tmp_path):
    cells = [Cell(tmp_path / f"{i}", "demo.py:imitate", ()) for i in range(3)]
    with on_engine(Room(Script(cells[0].out, "ends"))):
        run_cells(cells[:1], 2, "first")
    engine = Room(Script(cells[1].out, "ends"))
    with on_engine(engine):
        run_sweep(tmp_path, {"all": cells[:2], "again": cells[:2]}, 4)
    assert engine.asked == [(1, tmp_path)] and engine.given.closed == 1
    (tmp_path / "1.asked.json").write_text(json.dumps(["other.py:imitate"]))
    with on_engine(engine), pytest.raises(UserError, match="cannot stand for this one"):
        run_cells([cells[2], cells[1]], 2, "third")
    assert len(engine.asked) == 1


def test_ctrl_c_ends_what_runs_and_says_how_to_go_on(tmp_path, monkeypatch):
    begun, closed, in_time = Event(), Event(), []

    def stop(done, remark):
        raise KeyboardInterrupt

    class Stopped(Script):
        def launch(self, arguments, log):
            if str(self.out) in arguments:
                assert begun.wait(60)
                return super().launch(arguments, log)
            begun.set()
            in_time.append(closed.wait(60))
            raise UserError("stopped")

        def close(self):
            super().close()
            closed.set()

    cells = [Cell(tmp_path / f"{i}", "demo.py:imitate", ()) for i in range(2)]
    monkeypatch.setattr(sweep, "bar", lambda what, total: nullcontext(stop))
    launcher = Stopped(cells[0].out, "ends")
    monkeypatch.setattr(Engine, "launcher", lambda *given: launcher)
    with pytest.raises(KeyboardInterrupt, match=r"what is finished stays in .*, the same command goes on"):
        run_sweep(tmp_path, {"all": cells}, 2)
    assert in_time == [True]


@pytest.fixture
def sleeper(tmp_path, monkeypatch):
    """Where a command that sleeps writes its process id."""
    monkeypatch.setenv("SLEEPER", str(tmp_path / "pid"))
    return tmp_path / "pid"


@pytest.mark.full
def test_a_command_ends_with_the_process_that_it_belongs_to(tmp_path, sleeper):
    code = "from pathlib import Path; from vla_rl.recipes.workers import run_command as run; run({}, {})"
    log = f"Path({str(tmp_path / 'log')!r})"
    with subprocess.Popen([sys.executable, "-c", code.format(SLEEPS, log)]) as owner:
        pid = _pid(sleeper)
        owner.kill()
    wait_until(lambda: not _runs(pid))
    assert sleeper.read_text() == str(pid)


def test_the_status_and_output_of_a_command_are_handed_back(tmp_path):
    assert Launcher().launch(["evil"], tmp_path / "log") == 2
    assert "did you mean 'eval'" in (tmp_path / "log").read_text()


class Blind:
    """A link to a machine that sees no file of the folder."""

    name, pid = "blind", 0

    def __init__(self, folder: Path) -> None:
        self.folder, self.closed = folder, False
        self.asked: list[str] = []

    @property
    def running(self):
        return not self.closed

    def exchange(self, request, report):
        self.asked.append(request["do"])
        for path in self.folder.iterdir():
            path.unlink()
        return Server().answer(request, report)

    def kill(self): ...

    def close(self):
        self.closed = True


def test_a_machine_that_does_not_share_the_folder_is_refused(tmp_path):
    links = []

    def link():
        links.append(Blind(tmp_path))
        return links[-1]

    with pytest.raises(UserError, match=f"does not see '{tmp_path}' .* --out, on a disk that all machines"):
        ClusterLauncher(link, 2, tmp_path)
    assert [one.asked for one in links] == [["make"], []] and all(one.closed for one in links)
    (tmp_path / "mark").write_text("token")
    with pytest.raises(UserError, match=f"does not see '{tmp_path}'"):
        Machine(os.getcwd(), str(tmp_path / "mark"), "another")
    with pytest.raises(UserError, match=f"does not see '{tmp_path}/absent'"):
        Machine(str(tmp_path / "absent"), str(tmp_path / "mark"), "token")
    Machine(os.getcwd(), str(tmp_path / "mark"), "token")


def _pid(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def _runs(pid: int) -> bool:
    """Whether it does anything; one that has ended and that nobody has asked about is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
