"""What strangers wrote imports nothing that is not ours: every place where data name a class or function is tried.

Each kind of folder or file that we write is written once.  Then, at one place after the other, a stranger's module
stands for the name, and the public way to read it must refuse in one sentence, before that module is imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from robot_drivers.config import Part, RobotConfig
from tests.commands import save_untrained
from tests.hostile import code, forget
from tests.hostile_data import dataset
from tests.policies.test_tiny import SPEC
from tests.policies.vla.toy_family import TARGET, ToyVLA, write_folder
from tests.recipes.imagine.runs import run_folder
from tests.world_models import small_models
from vla_rl.contract import trust
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.policies.advantage_conditioned import AdvantageConditioned
from vla_rl.policies.diffusion import DiffusionPolicy
from vla_rl.policies.feed_forward import SquashedPolicy
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.latent_noise import SquashedLatent
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.real_time_chunking import RealTimeChunking
from vla_rl.policies.residual import DeterministicResidual
from vla_rl.policies.tiny import TinyVLA
from vla_rl.policies.vla.checkpoint import FAMILIES
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import TokenizerPrompts
from vla_rl.pretrained import load_module
from vla_rl.recipes.config_files import load_config, read_config
from vla_rl.recipes.fleet import learners
from vla_rl.recipes.imagine.recipe import load_run
from vla_rl.rewards.judge import VLMJudge, VLMJudgeConfig
from vla_rl.rewards.progress import ProgressConfig, ProgressCritic, SuccessClassifier, SuccessConfig
from vla_rl.rewards.reward_model import load_reward
from vla_rl.training.tracking import RunFolder, config_of
from vla_rl.training.world_model import load_world_model, save_world_model

STRANGER = "stranger:Thing"
CAMERA = {"front": (16, 16, 3)}


def tiny(folder: Path) -> TinyVLA:
    return TinyVLA.from_pretrained(save_untrained(folder.parent / "base"))


def on_top(kind: Callable[[TinyVLA], Any]) -> Callable[[Path], None]:
    """Saves a policy on top of a small flow policy, whose checkpoint lies in its own."""
    return lambda folder: kind(tiny(folder)).save_pretrained(folder)


def function(folder: Path) -> None:
    FunctionPolicy(SPEC, lambda obs: obs, "sims.mujoco.tasks.lift:act").save_pretrained(folder)


def vision_language_action(folder: Path) -> None:
    ToyVLA.from_public(write_folder(folder.parent / "public", SPEC), SPEC, VLAOptions()).save_pretrained(folder)


def judge(folder: Path) -> None:
    config: Any = VLMJudgeConfig()
    VLMJudge(config, None).save_pretrained(folder)  # type: ignore[arg-type]  # nobody is asked


def run(config: str) -> Callable[[Path], None]:
    return lambda folder: RunFolder(folder, load_config(config)).close()


def robot(folder: Path) -> None:
    front = Part("robot_drivers.cameras.opencv:OpenCVCamera", {"index": 0})
    arm = Part("robot_drivers.so101:SO101", {"port": "/dev/ttyX", "id": "arm"})
    folder.mkdir()
    RobotConfig(arm, cameras={"front": front}).save(folder / "arm.json")


def learner(folder: Path) -> None:
    learners.prepare(load_config("fleet.py:learn_corrections"), folder, None)


Write, Read = Callable[[Path], Any], Callable[[Path], Any]
# Everything that we write and read again, and that says by name what it is made of: how it is written, and read.
WRITTEN: dict[str, tuple[Write, Read]] = {
    "policy": (save_untrained, load_policy),
    "policy of features": (on_top(SquashedPolicy), load_policy),
    "residual": (on_top(DeterministicResidual), load_policy),
    "diffusion": (on_top(DiffusionPolicy), load_policy),
    "latent noise": (on_top(SquashedLatent), load_policy),
    "real-time chunking": (on_top(RealTimeChunking), load_policy),
    "advantage": (on_top(AdvantageConditioned), load_policy),
    "function": (function, load_policy),
    "VLA": (vision_language_action, lambda at: [load_module(at / "prompts", "prompts"), load_policy(at)]),
    "prompts": (
        lambda folder: TokenizerPrompts("nowhere").save_pretrained(folder),
        lambda at: load_module(at, "prompts"),
    ),
    "success": (lambda at: SuccessClassifier(CAMERA, ["up"], SuccessConfig()).save_pretrained(at), load_reward),
    "progress": (lambda at: ProgressCritic(CAMERA, ["up"], ProgressConfig()).save_pretrained(at), load_reward),
    "judge": (judge, load_reward),
    "world model": (lambda folder: save_world_model(small_models.model(), folder), load_world_model),
    "run": (run("demo.py:demo"), read_config),
    "run that is resumed": (run("compare.py:residual_td3"), config_of),
    "run of imagination": (lambda folder: run_folder(folder, policy=False), load_run),
    "fleet's learner": (learner, lambda folder: read_config(folder / learners.LEARNER)),
    "robot": (robot, lambda folder: RobotConfig.load(folder / "arm.json")),
}


@pytest.fixture(autouse=True)
def a_user(tmp_path, monkeypatch):
    """Nobody has written anything here yet, and the stranger's module lies in the working folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_accepted", set())
    monkeypatch.setattr(trust, "_all", [])
    monkeypatch.setitem(FAMILIES, "toy", TARGET)
    code(tmp_path / "work" / "stranger.py", tmp_path / "imported")
    path = list(sys.path)
    yield
    sys.path[:] = path


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where ``value`` names a class, a function or an environment."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        named = isinstance(item, str) and (key in trust.KINDS or trust._NAME.fullmatch(item))
        if named or (key == "name" and value.get("class") == "EnvConfig"):
            yield (*at, key)
        else:
            yield from places(item, (*at, key))


def harmless(value: Any) -> Any:
    """``value`` without what else is refused: paths, which the user alone may name, and classes of these tests."""
    if isinstance(value, dict):
        return {key: harmless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [harmless(item) for item in value]
    of_tests = isinstance(value, str) and value.startswith("tests.")
    return "TinyVLA" if of_tests else "" if isinstance(value, str) and "/" in value else value


def replaced(value: Any, at: tuple[Any, ...], name: str) -> Any:
    """A copy of ``value`` with ``name`` at that place."""
    if not at:
        return name
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value.get(at[0]) if isinstance(value, dict) else value[at[0]], at[1:], name)
    return copy


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_strangers_class_is_imported_from_nowhere(kind, tmp_path):
    write, read = WRITTEN[kind]
    write(folder := tmp_path / "theirs")
    files = {path: harmless(json.loads(path.read_text())) for path in sorted(folder.rglob("*.json"))}
    for path, value in files.items():
        path.write_text(json.dumps(value))
    tried = [(path, at) for path, value in files.items() for at in places(value)]
    assert tried
    for path, at in tried:
        forget()
        path.write_text(json.dumps(replaced(files[path], at, STRANGER)))
        with pytest.raises(UserError) as refusal:
            read(folder)
        assert re.fullmatch(rf"[^\n]*{STRANGER}[^\n]*[.?]", str(refusal.value)), (path, at)
        assert not (tmp_path / "imported").exists() and "stranger" not in sys.modules, (path, at)
        path.write_text(json.dumps(files[path]))


@pytest.mark.parametrize("key", [*trust.KINDS, "function", "env", "name", "from_pretrained"])
def test_names_where_none_belong_are_not_followed(key, tmp_path):
    """In the files of a dataset, which name nothing, and deep in a checkpoint's spec."""
    dataset(tmp_path / "dataset")
    save_untrained(tmp_path / "policy")
    for path in (*(tmp_path / "dataset").rglob("*.json"), tmp_path / "policy" / "config.json"):
        value = json.loads(path.read_text())
        (value.get("spec") or value)[key] = STRANGER
        path.write_text(json.dumps(value))
    forget()
    for read, folder in ((load_demonstrations, "dataset"), (load_policy, "policy")):
        with suppress(UserError):
            read(tmp_path / folder)
        assert not (tmp_path / "imported").exists(), folder


@pytest.mark.parametrize("options", [{"env": STRANGER}, {"wrappers": {STRANGER: {}}}, {"deep": [{"class": STRANGER}]}])
def test_a_client_names_no_code_to_a_server(options, tmp_path):
    """Of environments, which make what their clients ask for."""
    with pytest.raises(UserError, match="which it may not choose here"):
        trust.check_options(options, "a client")
    assert not (tmp_path / "imported").exists()
