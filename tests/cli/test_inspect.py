"""``vla-rl inspect``: what it prints about every kind of target; ``vla-rl sims``: the table of installations."""

from __future__ import annotations

import io
import json
import re
import sys
from importlib import metadata

import pytest
import torch
from rich.console import Console

from sims.catalog import CATALOG, make
from sims.installations import SHIPPED
from vla_rl.cli import main
from vla_rl.cli.inspect import inspect
from vla_rl.contract.errors import UserError
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.pretrained import save_folder


def text(target: str | None, *given: str) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    inspect(target, console, given)
    return console.export_text()


def lines(printed: str) -> list[list[str]]:
    """The cells of every table row."""
    return [[cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")] for line in printed.splitlines()]


@pytest.fixture
def checkpoint(tmp_path):
    def save(name="lift", **options):
        env = make(name, num_envs=1, **options)
        spec = env.spec
        env.close()
        torch.manual_seed(0)
        config = TinyConfig(width=32, blocks=1, sampler=FlowSampler(FlowSde(0.5), LastStep(), 4))
        policy = TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), config)
        policy.save_pretrained(tmp_path / "best")
        return tmp_path / "best", policy

    return save


def test_without_a_target_it_shows_what_is_installed_and_works():
    printed = text(None)
    for package in ("numpy", "torch", "mujoco", "gymnasium", "av", "safetensors"):
        assert [package, metadata.version(package)] in lines(printed)
    assert any(row[0] == "cpu" and row[1].endswith("cores") for row in lines(printed))
    assert {"egl", "osmesa"} <= {row[0] for row in lines(printed)}
    assert {*CATALOG, "contract"} <= {row[0] for row in lines(printed)}
    assert "pick up the red cube" in printed  # lift's one line


def test_without_torch_and_mujoco_it_says_how_to_get_them(monkeypatch):
    real = metadata.version

    def version(package):
        if package in ("torch", "mujoco"):
            raise metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(metadata, "version", version)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mujoco" or name.startswith("sims.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torch", "mujoco"):
        monkeypatch.setitem(sys.modules, name, None)
    printed = text(None)
    assert ["torch", "not installed: pip install 'vla-rl[train]'"] in lines(printed)
    assert ["mujoco", "not installed: pip install 'vla-rl[mujoco]'"] in lines(printed)
    assert "torch cannot be imported" in printed and "mujoco cannot be imported" in printed
    assert "pick up the red cube" in printed
    with pytest.raises(UserError, match=r"'lift' needs mujoco, which is not installed: pip install 'vla-rl\[mujoco\]'"):
        text("lift")


def test_an_environment_is_checked_and_its_units_shown():
    printed = text("lift")
    rows = lines(printed)
    checked = ("observation", "episode", "idle environments", "determinism", "chunking", "validation")
    assert set(checked) <= {row[0] for row in rows} and ["snapshot", "continues bit for bit"] in rows
    assert ["opening", "-0.01 .. 0.078", "m"] in rows and ["grip", "-1 .. 1", "1"] in rows
    assert any(row[:2] == ["image front", "uint8[64, 64, 3]"] for row in rows)
    assert ["friction", "1", "0.02 .. 2", "factor"] in [row[:4] for row in rows]
    assert "pick up the green cube" in printed


def test_an_environment_is_made_with_the_options_that_are_given():
    printed = lines(text("lift", "--env.options", json.dumps({"image_size": 12, "cameras": ["top"]})))
    assert ["image top", "uint8[12, 12, 3]", "0 .. 255", "RGB", "top"] in printed


def test_a_checkpoint_shows_sizes_and_acts(checkpoint):
    folder, policy = checkpoint()
    printed = text(str(folder))
    total, frozen = (sum(p.numel() for p in module.parameters()) for module in (policy, policy.backbone))
    assert ["all", f"{total:,}", f"{total - frozen:,}"] in lines(printed)
    assert ["backbone", f"{frozen:,}", "0"] in lines(printed)
    for expected in ("FlowSde", "LastStep", "steps: 4", "TinyVLA", "cube", "pick up the red cube"):
        assert expected in printed
    assert ["act", "in bounds"] in lines(printed)
    assert any(row[0] == "log-prob gap" for row in lines(printed))


def test_a_run_shows_its_summary_and_checkpoints(tmp_path, checkpoint):
    folder, _ = checkpoint()
    (tmp_path / "checkpoints").mkdir()
    folder.rename(tmp_path / "checkpoints" / "best")
    (tmp_path / "config.json").write_text('{"class": "Demo"}')
    assert "no summary yet" in text(str(tmp_path))
    rate = {"success": 0.925, "low": 0.899, "high": 0.945, "episodes": 512}
    (tmp_path / "summary.json").write_text(json.dumps({"rl": rate, "seconds": {"collect": 1.25}}))
    printed = text(str(tmp_path))
    assert "rl: 92.5% [89.9, 94.5] of 512 episodes" in printed
    assert "collect: 1.25" in printed
    assert "checkpoints/best" in printed.replace("\n", "")


_SMALL = (
    *("--env.options", '{"deadline": 5}', "--env.training-options", "{}"),
    *("--rl.experience.num-envs", "4", "--rl.experience.decisions", "2", "--evaluation.num-envs", "4"),
)


@pytest.mark.full
def test_a_config_shows_its_sizes_and_the_memory_of_a_run(checkpoint):
    folder, policy = checkpoint()
    printed = text("demo.py:last_step", "--policy", str(folder), *_SMALL)
    assert "sampler: FlowSampler" in printed and "4 environments x 2 decisions = 8" in printed and "gamma" in printed
    rows = lines(printed)
    phases = {row[0]: float(row[3].replace(",", "")) for row in rows if len(row) == 5 and row[3][:1].isdigit()}
    assert set(phases) == {"build", "validate", "collect", "learn", "peak"}
    assert phases["peak"] == max(phases.values()) > 0
    weights = sum(item.numel() for item in policy.parameters())
    assert ["all", f"{weights:,}", f"{sum(p.numel() for p in policy.trainable().values()):,}"] in rows
    named = {row[0] for row in rows}
    assert {"gradients", "state of the optimizers", "observation: image_features", "decision: points"} <= named


def test_without_a_policy_the_memory_is_not_estimated(tmp_path):
    printed = text("demo.py:last_step", "--policy", str(tmp_path / "none"))
    assert "No estimate of the memory:" in printed and "has no config.json" in printed.replace("\n", " ")


@pytest.mark.full
def test_a_vla_shows_both_that_it_could_keep_and_what_was_chosen(tmp_path):
    env = make("lift", num_envs=1)
    spec = env.spec
    env.close()
    shape = SmolVLAShape.small(state=spec.state.shape[0], action=spec.action_dim)
    policy = SmolVLA.new(spec, Affine.from_bounds(spec.state), shape, VLAOptions(horizon=5, kept="pictures"))
    policy.save_pretrained(tmp_path / "vla")
    rows = lines(text("demo.py:last_step", "--policy", str(tmp_path / "vla"), *_SMALL))
    prefix = policy.network.prefix_bytes(("front",), policy.tokens.shape[1])
    assert ["prefix", f"{prefix:,}"] in rows
    assert ["pictures", f"{64 * 64 * 3:,}", 'chosen, because kept is "pictures"'] in rows


def test_a_policy_that_lerobot_runs_is_described_without_it(tmp_path, complaint):
    folder = tmp_path / "act" / "pretrained_model"
    features = {"input_features": {"observation.state": {"type": "STATE", "shape": [8]}}, "output_features": {}}
    save_folder(folder, {"type": "act", **features}, {"weight": torch.zeros(3, 2)})
    steps = [{"registry_name": "normalizer_processor"}, {"class": "lerobot.processor.Other"}]
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    rows = dict(row[:2] for row in lines(text(f"lerobot:{tmp_path / 'act'}")) if len(row) > 1)
    assert rows["family"] == "act" and rows["input"] == "observation.state [8]"
    assert rows["policy_preprocessor"] == "normalizer_processor, lerobot.processor.Other"
    assert rows["policy_postprocessor"] == "none" and rows["weights"] == "1 tensors in 1 file: 6 F32"
    for damaged in ({"type": "act"}, {"input_features": 3}, features | {"output_features": {"action": []}}):
        (folder / "config.json").write_text(json.dumps(damaged))
        assert "does not describe its policy" in complaint("inspect", f"lerobot:{folder}")


def test_unknown_targets_get_help(tmp_path):
    with pytest.raises(UserError, match=r"'lfit'.*did you mean 'lift'"):
        text("lfit")
    with pytest.raises(UserError, match="did you mean 'demo'"):
        text("demo.py:dmeo")
    with pytest.raises(UserError, match=r"neither config\.json, summary\.json nor"):
        text(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        text(str(tmp_path))


def test_the_command_takes_one_target(capsys, complaint):
    main(["inspect", "counting"])
    assert "declared equals delivered" in capsys.readouterr().out
    assert "one target" in complaint("inspect", "lift", "counting")


# -- vla-rl sims -------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_RL_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def test_the_table_says_what_is_missing_and_how_to_install_it(nothing_installed, capsys, tmp_path):
    (tmp_path / "sims" / "mine").mkdir(parents=True)
    main(["sims"])
    printed = capsys.readouterr().out
    for name in SHIPPED:
        assert re.search(rf"{name} .*missing.*install it: vla-rl sims install {name}", printed)
    assert re.search(r"mine .*unfinished.*finish it: vla-rl sims install mine", printed)


def test_a_simulator_that_nobody_knows_is_refused(nothing_installed, complaint, tmp_path):
    assert "no simulator of ours is called 'metaword'" in complaint("sims", "install", "metaword")
    assert "sims install needs NAME" in complaint("sims", "install")
    assert "did you mean 'install'?" in complaint("sims", "instal")
    assert "absent.txt cannot be read" in complaint(
        "sims", "install", "mine", "--requirements", str(tmp_path / "absent.txt")
    )
    assert not (tmp_path / "sims").exists()  # not even a file that locks it


def test_ctrl_c_says_that_a_half_made_installation_is_not_used(nothing_installed, capsys, monkeypatch):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("sims.installations.install", stop)
    with pytest.raises(SystemExit) as ended:
        main(["sims", "install", "metaworld"])
    said = capsys.readouterr().err
    assert ended.value.code == 130 and "metaworld is half installed and will not be used until 'vla-rl sims" in said
