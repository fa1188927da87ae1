"""The configs of downloaded models, by the command that a user types, with tiny folders in the public formats."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sims.catalog import declared_spec, spec_of
from tests.policies.vla import tiny_folders
from tests.policies.vla.tiny_folders import MAKERS, tiny_variants
from tests.recipes.test_offline import FEW as LEARNS_OFFLINE
from tests.recipes.test_offline import LIFT as LIFT_ENV
from tests.recipes.test_offline import recorded_failures
from vla_rl.cli import main
from vla_rl.cli.override import override
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.inference import Eager
from vla_rl.policies.vla.tokenizer import open_tokenizer
from vla_rl.recipes.config_files import functions_of, load_config
from vla_rl.recipes.imitate import NewTiny
from vla_rl.recipes.memory import untrained
from vla_rl.recipes.recipe import run
from vla_rl.training.tracking import RunFolder

ROOT = Path(__file__).parents[2]
LIFT = ["--env", "lift", "--env.options", '{"deadline": 10}']
METHODS = ("ppo", "grpo", "residual_td3", "dsrl")
TOKENS = (*METHODS[:3], "residual_ppo")
FAMILIES = {"smolvla": METHODS, "pi0": METHODS, "pi05": METHODS, "openvla_oft": TOKENS}
# Folders of openvla_oft.py with a continuous head, and what takes them.
L1 = ("gaussian_ppo", "gaussian_grpo", "residual_td3", "self_imitation")
HEADS = {"openvla_l1": L1, "openvla_diffusion": ("ppo", "dppo")}
ONE_OF_THEM = ["smolvla", *(pytest.param(name, marks=pytest.mark.full) for name in ("pi0", "pi05", "openvla_oft"))]
OTHERS = ("lift", "place", "push", "mixed", "metaworld")
# As sims/libero.py declares it, which reads the instructions from LIBERO's package.
LIBERO = EnvSpec(
    name="libero",
    images={name: ArraySpec((256, 256, 3), "uint8", 0, 255) for name in ("agentview", "robot0_eye_in_hand")},
    state=ArraySpec((8,), "float32", -math.inf, math.inf),
    action=ArraySpec((7,), "float32", -1.0, 1.0),
    tasks=("pick up the soup and put it in the basket",),
    control_dt=0.05,
    time_limit=280,
    max_chunk=50,
)
# An iteration in moments: what a user with little memory makes smaller, and more of it.
FEW = {"evaluation.validation": 2, "evaluation.test": 2, "evaluation.num-envs": 2, "rl.experience.num-envs": 2}
FEW_STEPS = {"imitation.fit.steps": 2, "imitation.fit.batch": 4}
OFF_POLICY = {
    "rl.experience.decisions": 2,
    "rl.algorithm.learning-starts": 4,
    "rl.algorithm.batch": 4,
    "rl.algorithm.utd-ratio": 0.5,
    "rl.algorithm.critic.width": 16,
}
SMALLER: dict[str, dict[str, Any]] = {
    "ppo": {"rl.experience.decisions": 2, "rl.algorithm.minibatch": 4, "rl.algorithm.critic-warmup": 1},
    "grpo": {f"rl.experience.{name}": n for name, n in {"groups": 1, "size": 2, "ahead": 0, "limit": 1}.items()},
    "residual_td3": {**OFF_POLICY, "rl.algorithm.critic-warmup": 0, "rl.policy.residual.head.width": 16},
    "dsrl": {**OFF_POLICY, "rl.policy.latent.head.width": 16},
}
SMALLER |= {"gaussian_ppo": SMALLER["ppo"], "dppo": SMALLER["ppo"], "gaussian_grpo": SMALLER["grpo"]}
SMALLER["residual_ppo"] = {**SMALLER["ppo"], "rl.policy.residual.head.width": 16}
SMALLER["self_imitation"] = {"rl.experience.decisions": 2, "rl.algorithm.grow": 1, "rl.algorithm.epochs": 1}


def options(given: dict[str, Any]) -> list[str]:
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A downloaded folder of every family for the tabletop."""
    open_tokenizer.cache_clear()
    makers = {**MAKERS, **tiny_folders.HEADS}
    yield {name: make(tmp_path_factory.mktemp(name) / "folder", spec_of("lift")) for name, make in makers.items()}
    open_tokenizer.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def small_variants() -> Iterator[None]:
    with tiny_variants():
        yield


def state(run: Path, step: int) -> str:
    """SHA-256 of all tensors of a saved state: weights, optimizers, environments, generators."""
    return hashlib.sha256((run / "state" / f"{step:08d}" / "tensors.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[pytest.mark.full] * bool(place or method != METHODS[0]))
        for place, (family, methods) in enumerate({**FAMILIES, **HEADS}.items())
        for method in methods
    ],
)
def test_a_downloaded_folder_is_improved_evaluated_and_resumed(folders, tmp_path, capsys, monkeypatch, family, method):
    """A run that is killed after its first iteration goes on from there and ends with the same state, bit for bit."""
    whole, killed, save = tmp_path / "whole", tmp_path / "killed", RunFolder.save_state

    def save_and_copy(self: RunFolder, step: int, content: dict[str, Any]) -> None:
        save(self, step, content)
        if step == 1 and self.path == whole:
            shutil.copytree(whole, killed)

    monkeypatch.setattr(RunFolder, "save_state", save_and_copy)
    given = {**FEW, **SMALLER[method], "rl.loop.iterations": 2, "rl.loop.save-every": 1, "out": whole}
    config = "openvla_oft" if family in HEADS else family
    main(["train", f"{config}.py:{method}", "--policy", str(folders[family]), *LIFT, *options(given)])
    assert json.loads((whole / "summary.json").read_text())["rl"]["episodes"] == 2
    main(["train", "--resume", str(killed)])
    assert state(whole, 2) == state(killed, 2)
    capsys.readouterr()
    main(["eval", str(killed), "--episodes", "2", "--num-envs", "2"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.full
@pytest.mark.parametrize(
    "preset", sorted(functions_of(ROOT / "configs/gpu.py").keys() - {"demo", "imagine", "pick_cube"})
)
def test_a_preset_for_gpus_learns_on_a_processor_when_it_is_small(folders, tmp_path, preset):
    """An iteration; ``make gpu`` runs ``demo`` and ``imagine``, and ``pick_cube`` where ManiSkill is installed."""
    config, policy = load_config(f"gpu.py:{preset}"), folders.get(preset.partition("_")[0], tmp_path / "tiny")
    if policy == tmp_path / "tiny":
        untrained(NewTiny(width=32, blocks=1), config.env.spec()).save_pretrained(policy)
    few = {**FEW, **SMALLER["ppo"], "rl.algorithm.critic-warmup": 0, "rl.loop.iterations": 1, "policy": policy}
    config = replace(config, device="cpu", vla=replace(config.vla, inference=Eager()))
    assert run(override(config, options(few), "test"), str(tmp_path / "run"))["rl"]["episodes"] == 2


@pytest.mark.parametrize("family", ONE_OF_THEM)
def test_a_recorded_dataset_is_imitated(folders, tmp_path, capsys, family):
    data, run = tmp_path / "data", tmp_path / "run"
    main(["collect", "--env", "lift", "--count", "2", "--out", str(data)])
    given = {"policy": folders[family], "dataset": data, "env": "lift", **FEW_STEPS, "out": run}
    main(["train", f"{family}.py:imitate", *options(given)])
    learnt = load_policy(run / "checkpoints" / "imitation")
    assert learnt.config == load_config(f"{family}.py:ppo").vla
    capsys.readouterr()
    main(["eval", str(run), "--episodes", "2", "--num-envs", "2", *LIFT])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.parametrize("method", ["offline", "weighted"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.full) for name in (*MAKERS, *tiny_folders.HEADS)]
)
def test_a_dataset_with_failures_teaches_every_family(folders, tmp_path, capsys, monkeypatch, family, method):
    """By a command without an environment's episodes, and deployed in one."""
    monkeypatch.setattr("vla_rl.recipes.offline._BLOCK", 1)
    data, run, flow = recorded_failures(tmp_path), tmp_path / "run", not family.startswith("openvla")
    horizon = 1 if family == "openvla_oft" else 5  # OpenVLA's own decoding
    given = {
        "policy": folders[family],
        "dataset": data,
        "vla.horizon": horizon,
        **LEARNS_OFFLINE,
        **LIFT_ENV,
        "out": run,
    }
    if method == "offline":
        given["method.guidance"] = 1.5 if flow else 1.0
    main(["train", f"recap.py:{method}", *options(given)])
    kind = type(load_policy(run / "checkpoints" / "best")).__name__
    assert (kind == "AdvantagePrompted") == (method == "offline")
    capsys.readouterr()
    main(["eval", str(run), "--episodes", "2", "--num-envs", "2"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.full
def test_an_l1_head_is_imitated_and_refuses_ppo_in_a_sentence(folders, tmp_path, complaint):
    data, run, l1 = tmp_path / "data", tmp_path / "run", str(folders["openvla_l1"])
    main(["collect", "--env", "lift", "--count", "2", "--out", str(data)])
    given = {"policy": l1, "dataset": data, "env": "lift", **FEW_STEPS, "out": run}
    main(["train", "openvla_oft.py:imitate", *options(given)])
    assert type(load_policy(run / "checkpoints" / "imitation")).__name__ == "OpenVLARegression"
    few = options({**FEW, **SMALLER["ppo"], "out": tmp_path / "ppo"})
    for start in (l1, str(run)):
        said = complaint("train", "openvla_oft.py:ppo", "--policy", start, *LIFT, *few)
        assert "openvla_oft.py:gaussian_ppo" in said and "residual" in said


@pytest.mark.parametrize("family", ONE_OF_THEM)
def test_without_a_folder_it_says_what_to_name(complaint, tmp_path, family):
    for function in ("imitate", *FAMILIES[family]):
        data = {"dataset": ROOT / "tests/golden/lerobot/dataset", **FEW_STEPS}
        given = data if function == "imitate" else {"env": "lift"}
        said = complaint("train", f"{family}.py:{function}", *options({**given, "out": tmp_path / "run"}))
        assert "add --policy" in said


@pytest.mark.parametrize("env", ["libero", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_config_is_built_for_every_environment(tmp_path, family, env):
    """And a folder that was made for its state, action and cameras is opened by the config's options."""
    methods = {*FAMILIES[family], *(method for head in HEADS.values() for method in head if family == "openvla_oft")}
    made = functions_of(ROOT / "configs" / f"{family}.py")
    made = {name: config for name, config in made.items() if not name.startswith("small_")}  # small_: of no download
    assert set(made) == {"imitate", *methods}
    recipes = [override(load_config(f"{family}.py:{name}"), ["--env", env], "test") for name in made]
    assert all(recipe.env.name == env and not recipe.env.training_options for recipe in recipes)
    spec = declared_spec(env) or LIBERO
    folder, opened = MAKERS[family](tmp_path / "folder", spec), load_config(f"{family}.py:ppo").vla
    if family == "openvla_oft":  # its one camera has no name of a simulator's
        opened = replace(opened, cameras={"image": next(iter(spec.images))})
    assert load_policy(folder, spec, opened).horizon == (8 if family == "openvla_oft" else 5)


def test_a_folder_is_served_and_played_in_a_suite_as_it_is(folders, tmp_path, complaint, capsys):
    folder = str(folders["smolvla"])
    assert "belongs to no environment" in complaint("serve-policy", folder)
    few = ["--episodes", "1", "--num-envs", "2", "--videos", "0", "--tasks", "lift"]
    main(["eval", "--suite", "tabletop", "--policy", folder, "--out", str(tmp_path / "results"), *few])
    assert json.loads((tmp_path / "results" / "results.json").read_text())["policy"]["name"] == folder
