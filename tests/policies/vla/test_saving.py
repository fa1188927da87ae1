"""A checkpoint on a public folder holds what was learnt; the folder must be there and unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policies.test_tiny import SPEC, observations
from tests.policies.vla.public_folders import write
from tests.policies.vla.toy_family import ToyVLA, write_folder
from tests.toys import seeded
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import mark
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.options import TrainAll, VLAOptions
from vla_rl.policies.vla.saving import fingerprint
from vla_rl.policies.vla.tokenizer import open_tokenizer


def opened(folder: Path, options: VLAOptions | None = None) -> ToyVLA:
    policy = ToyVLA.from_public(write_folder(folder, SPEC), SPEC, options or VLAOptions())
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1)  # it learns
    return policy


def decide(policy: ToyVLA) -> torch.Tensor:
    return policy.act(policy.encode(observations()), {}, "eval", seeded())[0].action


@pytest.mark.parametrize(
    "options", [VLAOptions(), VLAOptions(dtype="bfloat16"), VLAOptions(trains=TrainAll())], ids=str
)
def test_what_was_learnt_and_the_base_are_the_policy_again(tmp_path: Path, options: VLAOptions) -> None:
    policy = opened(tmp_path / "base", options)
    policy.save_pretrained(tmp_path / "ours")
    again = load_policy(tmp_path / "ours", SPEC)
    assert torch.equal(decide(again), decide(policy)) and again.base == policy.base
    for name, item in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], item) and again.state_dict()[name].dtype == item.dtype


def test_the_bytes_of_a_save_are_those_of_what_was_learnt(tmp_path: Path) -> None:
    """A frozen part a thousand times as large adds nothing to a save."""
    policy = opened(tmp_path / "base")
    policy.network.words = torch.nn.Embedding(1_000_000, 8).requires_grad_(False)
    policy.save_pretrained(tmp_path / "ours")
    learnt = sum(item.numel() * item.element_size() for item in policy.trainable().values())
    written = sum(path.stat().st_size for path in (tmp_path / "ours").rglob("*") if path.is_file())
    assert learnt < written < learnt + 20_000  # names, shapes, spec and prompts


def test_without_a_base_everything_is_saved(tmp_path: Path) -> None:
    policy = opened(tmp_path / "base")
    policy.base = None
    policy.save_pretrained(tmp_path / "ours")
    shutil.rmtree(tmp_path / "base")
    assert torch.equal(decide(load_policy(tmp_path / "ours", SPEC)), decide(policy))


def test_a_base_that_is_not_there_is_said_with_its_cure(tmp_path: Path) -> None:
    policy = opened(tmp_path / "base")
    policy.save_pretrained(tmp_path / "ours")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"base', which is not there.*write its new place into base.folder of .*config"):
        load_policy(tmp_path / "ours", SPEC)
    path = tmp_path / "ours" / "config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["base"]["folder"] = str(tmp_path / "moved")
    path.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(UserError, match=r"did not write it on this machine.*add --trust once"):
        load_policy(tmp_path / "ours", SPEC)
    mark(path.read_bytes())  # as --trust does
    assert torch.equal(decide(load_policy(tmp_path / "ours", SPEC)), decide(policy))


def test_a_base_that_has_changed_is_refused(tmp_path: Path) -> None:
    policy = opened(tmp_path / "base")
    policy.save_pretrained(tmp_path / "ours")
    (tmp_path / "base" / "README.md").write_text("a note", encoding="utf-8")
    load_policy(tmp_path / "ours", SPEC)  # a file that the policy does not consist of
    weights = tmp_path / "base" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.words.weight"] += 1.0
    save_file(tensors, weights)
    with pytest.raises(
        UserError, match=r"are not those that .*ours' was trained on top of.*put the original files back"
    ):
        load_policy(tmp_path / "ours", SPEC)


def test_the_fingerprint_sees_other_weights_and_configs(tmp_path: Path) -> None:
    def folder(name: str, change: int = 0, size: int = 1_000_000, config: str = "{}", file: str = "") -> str:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(config, encoding="utf-8")
        content = np.random.default_rng(change).bytes(size)
        (made / (file or "model.safetensors")).write_bytes(content)
        return fingerprint(made)

    found = [
        folder("a"),
        folder("b", 1),
        folder("c", size=999_999),
        folder("d", config="[]"),
        folder("e", file="m.safetensors"),
    ]
    assert len(set(found)) == len(found) and folder("f") == found[0]


def test_the_fingerprint_sees_a_change_at_the_end(tmp_path: Path) -> None:
    """Another policy of the same architecture has the same header."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    found = []
    for value in (0.0, 1.0):
        tensors = {"a": torch.zeros(100_000), "b": torch.full((100_000,), value)}
        save_file(tensors, tmp_path / "model.safetensors")
        found.append(fingerprint(tmp_path))
    assert found[0] != found[1]


def test_the_fingerprint_of_an_adapter_covers_what_it_was_trained_on(tmp_path: Path) -> None:
    base, adapter, found = tmp_path / "base", tmp_path / "adapter", []
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
    for alpha, value in ((1, 0.0), (1, 1.0), (2, 1.0)):
        config = {"peft_type": "LORA", "lora_alpha": alpha, "base_model_name_or_path": str(base)}
        (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file({"a": torch.full((4,), value)}, base / "model.safetensors")
        found.append(fingerprint(adapter))
    assert len(set(found)) == 3


def test_a_checkpoint_with_other_tensors_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "base").save_pretrained(tmp_path / "ours")
    path = tmp_path / "ours" / "model.safetensors"
    saved = load_file(path)
    save_file({name: item for name, item in saved.items() if name != "network.leave.bias"}, path)
    with pytest.raises(UserError, match=r"1 tensors of the model are not in its files \(network.leave.bias\)"):
        load_policy(tmp_path / "ours", SPEC)
    save_file({**saved, "network.other": torch.ones(1)}, path)
    with pytest.raises(UserError, match=r"1 of its tensors have no place in the model \(network.other\)"):
        load_policy(tmp_path / "ours", SPEC)


STATE, ACTION = SPEC.state.shape[0], SPEC.action_dim


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_tokenizer.cache_clear()
    return write_folder(tmp_path / "folder", SPEC)


def test_a_folder_becomes_a_policy_with_all_that_it_holds(folder: Path) -> None:
    policy = load_policy(folder, SPEC)
    assert type(policy) is ToyVLA and not policy.training
    saved = load_file(folder / "model.safetensors")
    for name, item in policy.network.state_dict().items():
        assert torch.equal(item, saved[f"model.{name}"])
    assert policy.horizon == min(3, SPEC.max_chunk) and policy.cameras == tuple(SPEC.images)
    assert policy.state_scale.offset == (0.1,) * STATE and policy.action_scale.offset == (0.1,) * ACTION
    assert set(policy.prompts.known) == set(SPEC.tasks)
    out, _ = policy.act(policy.encode(observations()), {}, "eval", seeded())
    assert out.action.isfinite().all()


def test_options_choose_horizon_cameras_and_statistics(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "data" / "norm_stats.json", {})
    part = {"mean": [0.7] * max(STATE, ACTION), "std": [0.2] * max(STATE, ACTION)}
    data = {"state": {name: item[:STATE] for name, item in part.items()}}
    data["actions"] = {name: item[:ACTION] for name, item in part.items()}
    write(tmp_path / "data" / "norm_stats.json", {"norm_stats": data})
    names = list(SPEC.images)
    options = VLAOptions(statistics=str(tmp_path / "data"), horizon=1, cameras={names[0]: names[-1]})
    policy = load_policy(folder, SPEC, options)
    assert (policy.horizon, policy.cameras[0]) == (1, names[-1])
    assert policy.action_scale.offset == (0.7,) * ACTION


def test_statistics_without_a_state_are_refused(folder: Path) -> None:
    saved = json.loads((folder / "meta/stats.json").read_text(encoding="utf-8"))
    write(folder / "meta/stats.json", {"action": saved["action"]})
    with pytest.raises(UserError, match=r"have none of a state.*--vla.statistics FOLDER"):
        load_policy(folder, SPEC)
