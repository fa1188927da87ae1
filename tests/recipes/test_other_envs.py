"""Every shipped config of RL starts in an environment of one's own, or refuses it in one sentence with the cure."""

from __future__ import annotations

import io
import json
import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch
from rich.console import Console

from docs.examples import ball_env
from sims.catalog import make as make_env
from vla_rl.cli import main
from vla_rl.cli.override import _fields
from vla_rl.experience.collect import collect_demonstrations
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.config_files import config_files, functions_of
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.improve import Improve

SMALL = {
    "loop.iterations": "1",
    "loop.collectors": "1",
    "experience.num_envs": "4",
    "experience.decisions": "2",
    "experience.groups": "2",
    "experience.size": "2",
    "experience.ahead": "0",
    "experience.limit": "2",
    "algorithm.offline_steps": "2",
    "algorithm.minibatch": "8",
    "policy.imitation.fit.steps": "1",
    "evaluation.validation": "2",
    "evaluation.test": "2",
    "evaluation.num_envs": "2",
    "evaluation.processes": "1",
}
CONFIGS = {
    f"{path.name}:{name}": config
    for path in config_files()
    for name, function in functions_of(path).items()
    if isinstance(config := function(), Improve) and isinstance(config.env, EnvConfig)
}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """A folder with a policy for the ball and demonstrations of it."""
    folder, spec = tmp_path_factory.mktemp("given"), ball_env.SPEC
    torch.manual_seed(0)
    config = TinyConfig(width=32, blocks=1, sampler=FlowSampler(FlowSde(0.5), LastStep(), 4))
    policy = TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), config)
    policy.save_pretrained(folder / "policy")
    with closing(ball_env.make(2)) as env:
        save_demonstrations(collect_demonstrations(env, ball_env.BallExpert().act, [1, 2]), folder / "data")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_it_starts_there_or_says_what_it_needs(name, given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known = _fields(CONFIGS[name])
    options = ["--env", "docs.examples.ball_env:make", "--out", "run"]
    for field, value in SMALL.items():
        option = next((one for one in (field, f"rl.{field}") if one in known), "")
        options += [f"--{option}", value] if option else []
    options += ["--policy", str(given / "policy")] if CONFIGS[name].policy else []
    options += ["--demonstrations", str(given / "data")] if "demonstrations" in known else []
    try:
        main(["train", name, *options])
    except SystemExit as end:
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert end.code == 2 and said.startswith("vla-rl: ") and said.endswith((".", "?")), said
    else:
        assert json.loads(Path("run/summary.json").read_text())["env_steps"] > 0


def test_while_environments_are_made_a_terminal_shows_what_their_simulator_does(monkeypatch):
    shown = []
    terminal = Console(force_terminal=True, width=80, file=io.StringIO())
    monkeypatch.setattr("vla_rl.recipes.terminal.console", terminal)
    monkeypatch.setattr("rich.status.Status.update", lambda self, text: shown.append(text))
    log = logging.getLogger("sims")
    level = log.level

    def make(name, num_envs):
        logging.getLogger("sims.some").info("%d of 3 kernels", num_envs)
        return make_env(name, num_envs=num_envs)

    monkeypatch.setattr("vla_rl.recipes.env_config.sims.make_env", make)
    EnvConfig("counting").make(2).close()
    logging.getLogger("sims.some").info("nobody looks on")
    assert shown == ["making 2 x counting: 2 of 3 kernels"] and "making 2 x counting" in terminal.file.getvalue()
    assert log.level == level and not log.handlers
