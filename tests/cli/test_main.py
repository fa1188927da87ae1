"""``vla-rl``: its usage, its overrides, and how it refuses, in one sentence, what it cannot do."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.patience import PATIENCE
from vla_rl.algorithms.group_relative import Constant, GRPOConfig
from vla_rl.cli import COMMANDS, main
from vla_rl.cli.override import override
from vla_rl.cli.train import Collect
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.policies.flow import FlowOu, FlowSde
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.config_files import load_config

VLA_RL = [sys.executable, "-m", "vla_rl.cli"]


# -- usage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_usage_lists_every_command(capsys, arguments):
    main(arguments)
    printed = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", printed, re.M) for name in COMMANDS)


def test_usage_loads_nothing_heavy():
    code = "import sys; from vla_rl.cli import main; main([]); sys.exit(bool({'numpy', 'torch'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_reader_that_leaves_ends_it_silently():
    """As ``| head`` does."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([*VLA_RL, "--help"], stdout=write, stderr=subprocess.PIPE, timeout=PATIENCE)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    """A socket's, say: it must not end as if all were well."""
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setitem(COMMANDS, "certs", (f"{__name__}:write_to_nobody", ""))
        with pytest.raises(SystemExit) as end:
            main(["certs"])
        assert end.value.code == 1


def test_what_nobody_has_foreseen_ends_with_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(COMMANDS, "certs", (f"{__name__}:fail", ""))
    with pytest.raises(SystemExit) as end:
        main(["certs", "key"])
    said = capsys.readouterr().err
    assert end.value.code == 1 and said.count("\n") == 1 and "Traceback" not in said
    assert re.match(r"vla-rl: KeyError: 'key', at test_main.py:\d+, so the command stopped; VLA_RL_TRACEBACK=1 ", said)
    with pytest.raises(SystemExit):
        main(["certs", str(tmp_path)])
    assert f"vla-rl: '{tmp_path}' cannot be used (Is a directory), so the command stopped" in capsys.readouterr().err
    monkeypatch.setenv("VLA_RL_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["certs", "key"])


def fail(arguments: list[str]) -> None:
    """As a command would in a user's own code, and where a file is expected and a folder is there."""
    if arguments[0] == "key":
        raise KeyError("key")
    with open(arguments[0]) as file:
        file.read()


def write_to_nobody(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        os.write(write, b"lost")
    finally:
        os.close(write)


def test_every_command_can_be_loaded():
    assert all(callable(load(target)) for target, _ in COMMANDS.values())


@pytest.mark.parametrize("command", ["compare samplers", "train demo.py:demo", "eval somewhere"])
def test_help_of_a_command_shows_its_fields_and_runs_nothing(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert "--seed" in capsys.readouterr().out


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("trian demo.py:demo", r"no command 'trian'; did you mean 'train'\?"),
        ("train", r"train needs a config, .* FILE\.py:function"),
        ("train dmeo.py:demo", r"no config file 'dmeo\.py'.* did you mean 'demo\.py'\?"),
        ("train demo.py:al_steps", r"no config function 'al_steps'.* did you mean 'all_steps'\?"),
        ("train demo.py:replace", r"no config function 'replace'"),  # what a config file imports is no config
        (
            "train demo.py:demo --rl.algorithm.gama 1",
            r"no field '--rl\.algorithm\.gama'.* did you mean '--rl\.algorithm\.gamma'\?",
        ),
        ("train demo.py:demo --gama=1", r"no field '--gama'.* did you mean '--rl\.algorithm\.gamma'\?"),
        ("train demo.py:demo --out", r"--out needs a value"),
        ("collect --env lift --expert sims.toy.counting:Exprt", r"no 'Exprt'"),
        ("collect --count 2", r"collect needs an environment and none was named.*add --env NAME"),
    ],
)
def test_mistakes_are_answered_with_one_sentence(complaint, command, sentence):
    assert re.search(sentence, complaint(*command.split()))


def test_a_missing_package_says_how_to_get_it(complaint, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(COMMANDS, "film", ("av:film", ""))
    assert re.search(r"import of av .* pip install 'vla-rl\[all\]'", complaint("film"))


def test_a_value_of_the_wrong_type_ends_with_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "demo.py:demo", "--seed", "abc"])
    assert stop.value.code == 2
    assert "--seed" in capsys.readouterr().err


# -- overrides ---------------------------------------------------------------------------------------------------------


def test_fields_are_overridden_however_deep():
    given = "--seed 7 --rl.algorithm.gamma=0.98 --rl.sampler.schedule.a 0.25 --rl.loop.validate-every 3"
    config = override(load_config("demo.py:demo"), given.split(), "test")
    assert (config.seed, config.rl.algorithm.gamma, config.rl.loop.validate_every) == (7, 0.98, 3)
    assert config.rl.sampler.schedule == FlowSde(0.25)
    assert config.env == load_config("demo.py:demo").env


def test_general_fields_have_the_fields_of_their_present_value():
    """Those that a protocol types, and those that a base class types."""
    before = load_config("demo.py:flow_ou").rl.sampler.schedule
    after = override(load_config("demo.py:flow_ou"), ["--rl.sampler.schedule.a", "0.9"], "test").rl.sampler.schedule
    assert isinstance(before, FlowOu) and after != before
    assert vars(after) == {**vars(before), "a": 0.9}
    with pytest.raises(UserError, match=r"no field '--rl\.sampler\.schedule\.b'"):
        override(load_config("demo.py:demo"), ["--rl.sampler.schedule.b", "1"], "test")
    based = GRPOConfig(averaging=Constant(5))
    assert override(based, ["--averaging.max-decisions", "9"], "test").averaging == Constant(9)


def test_collectors_and_staleness_are_short_for_fields_of_the_loop():
    given, before = ["--collectors", "2", "--staleness=3"], load_config("demo.py:flow_ou")
    loop = override(before, given, "test").rl.loop
    assert loop == replace(before.rl.loop, collectors=2, staleness=3)
    with pytest.raises(UserError, match="no field '--collectors'"):
        override(Collect(), given, "test")


def test_options_of_an_environment_are_given_as_json(capsys):
    config = override(Collect(), ["--env.options", '{"image_size": 48, "cameras": ["top"]}'], "test")
    assert config.env.options == {"image_size": 48, "cameras": ["top"]}
    with pytest.raises(SystemExit):
        override(Collect(), ["--env.options", "image_size=48"], "test")
    assert "JSON" in capsys.readouterr().err


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def stop(*given, **named):
    raise KeyboardInterrupt


def test_ctrl_c_while_an_error_is_said_shows_no_traceback(complaint, monkeypatch):
    turns = iter([stop, str])
    monkeypatch.setattr("vla_rl.cli.printable", lambda text: next(turns)(text))
    assert complaint("nosuch", status=130) == "vla-rl: stopped."


def test_ctrl_c_leaves_a_run_from_which_one_can_go_on(untrained, quick, tmp_path):
    out = tmp_path / "run"
    command = [*VLA_RL, "train", quick, "--policy", str(untrained()), "--out", str(out)]
    status, said = interrupt([*command, "--rl.loop.iterations", "100000"], lambda: metrics(out) > 1)
    assert status == 130 and "Traceback" not in said and "stopped; go on with: vla-rl train --resume" in said
    assert not (out / "summary.json").exists()
    assert TinyVLA.from_pretrained(out / "checkpoints" / "best").config.width == 32
    assert shlex.split("vla-rl" + said.strip().rpartition("vla-rl")[2]) == ["vla-rl", "train", "--resume", str(out)]


def test_ctrl_c_before_the_first_iteration_can_be_gone_on_from(complaint, untrained, quick, tmp_path, monkeypatch):
    arguments = ["train", quick, "--policy", untrained(), "--out", tmp_path / "run"]
    with monkeypatch.context() as patched:
        patched.setattr("vla_rl.recipes.improve.improve", stop)
        complaint(*arguments, status=130)
    main(["train", "--resume", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rl"]["episodes"] == 4


def test_ctrl_c_during_a_sweep_keeps_what_is_finished(complaint, tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rl.recipes.compare.run_cells", stop)
    assert f"what is finished stays in {tmp_path}" in complaint("compare", "--out", tmp_path, status=130)


def interrupt(command, when) -> tuple[int, str]:
    """Status and stderr of ``command``, to which Ctrl-C was sent as soon as ``when()``."""

    def hear() -> None:  # a background job ignores Ctrl-C, and its children would, too
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=hear)
    deadline = time.monotonic() + PATIENCE
    while not when() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=PATIENCE)[1]
    return process.returncode, said


def metrics(out) -> int:
    """Whole lines of ``metrics.jsonl``, each of which can be read."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return len([json.loads(line) for line in lines])
