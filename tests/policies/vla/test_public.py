"""A public folder becomes a policy of an environment, or one sentence says what is missing or does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policies.test_tiny import SPEC, observations, seeded
from tests.policies.vla.public_folders import write
from tests.policies.vla.toy_family import ToyVLA, write_folder, write_statistics
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import UserError
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import open_tokenizer

STATE, ACTION = SPEC.state.shape[0], SPEC.action_dim


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_tokenizer.cache_clear()
    return write_folder(tmp_path / "folder", SPEC)


def test_a_folder_becomes_a_policy_with_its_weights_statistics_and_prompts(folder: Path) -> None:
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


def drop_tensor(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    save_file({name: item for name, item in saved.items() if name != "model.leave.bias"}, folder / "model.safetensors")


def break_shard(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(saved, folder / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": {
            **dict.fromkeys(saved, "model-00001-of-00002.safetensors"),
            "b": "model-00002-of-00002.safetensors",
        }
    }
    write(folder / "model.safetensors.index.json", index)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (break_shard, r"lacks 1 of the 2 shards.*\(model-00002-of-00002.safetensors\).*download them"),
        (drop_tensor, r"1 tensors of the model are not in its files \(leave.bias\).*download the whole folder"),
        (lambda folder: (folder / "meta/stats.json").unlink(), r"no normalization statistics.*--vla.statistics FOLDER"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no model.safetensors.*download that file"),
        (lambda folder: (folder / "config.json").write_text('{"type": "toy"'), r"config.json.*(damaged|no config)"),
    ],
)
def test_what_is_missing_is_one_sentence_with_its_key_and_cure(folder: Path, break_it: Any, says: str) -> None:
    break_it(folder)
    with pytest.raises(UserError, match=says) as caught:
        ToyVLA.from_public(folder, SPEC, VLAOptions())
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_one_sentence_with_where_to_copy_it_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str, file: str) -> str:
        raise OSError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer.json and .*copy tokenizer.json of nobody/nothing into the"):
        load_policy(folder, SPEC)


def other(**changes: Any) -> Any:
    return replace(SPEC, **changes)


def vector(size: int) -> ArraySpec:
    return ArraySpec((size,), "float32", -1.0, 1.0)


def picture() -> ArraySpec:
    return ArraySpec((8, 8, 3), "uint8", 0, 255)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            other(action=vector(ACTION + 4)),
            rf"statistics of {ACTION} action entries but .* {ACTION + 4},.*--vla.statistics",
        ),
        (other(state=vector(STATE + 1)), rf"statistics of {STATE} state entries but .* {STATE + 1},.*--vla.statistics"),
        (other(images={"a": picture(), "b": picture()}), r"has a, b, but nothing is known for '.*--vla.cameras"),
    ],
)
def test_another_action_state_or_camera_is_one_sentence_with_the_option(folder: Path, spec: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_policy(folder, spec)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_vector_that_the_model_has_no_room_for_is_refused(folder: Path, tmp_path: Path) -> None:
    write_statistics(tmp_path / "data", STATE, ACTION + 4)
    options = VLAOptions(statistics=str(tmp_path / "data"))
    with pytest.raises(UserError, match=rf"its model takes at most {ACTION + 1}"):
        load_policy(folder, other(action=vector(ACTION + 4)), options)


def test_a_public_folder_needs_an_environment_or_data_to_be_opened(folder: Path) -> None:
    with pytest.raises(UserError, match=r"'toy'.*belongs to no environment.*--env NAME"):
        load_policy(folder)


def test_statistics_without_a_state_are_refused(folder: Path) -> None:
    saved = json.loads((folder / "meta/stats.json").read_text(encoding="utf-8"))
    write(folder / "meta/stats.json", {"action": saved["action"]})
    with pytest.raises(UserError, match=r"have none of a state.*--vla.statistics FOLDER"):
        load_policy(folder, SPEC)
