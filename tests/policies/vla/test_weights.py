"""Weights of public folders: shards, names, what is missing, and how much memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.patience import PATIENCE
from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.weights import load_public_weights, tensor_sizes, weight_files, without_weights


class Net(nn.Module):
    """A shared embedding, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)


def numbers(name: str, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + len(name)


TENSORS = {
    "embed.weight": numbers("embed.weight", 5, 3),
    "body.weight": numbers("body.weight", 3, 3),
    "body.bias": numbers("body.bias", 3),
    "count": torch.tensor([7, 8]),
}


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One tensor a shard."""
    files = {name: f"model-{i + 1:05d}-of-{len(tensors):05d}.safetensors" for i, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def empty() -> Net:
    with without_weights():
        return Net()


def test_without_weights_buffers_are_real_and_shares_stay() -> None:
    net = empty()
    assert all(item.is_meta for item in net.parameters()) and len(list(net.parameters())) == 3
    assert net.frequencies.tolist() == [0.0, 1.0, 2.0]
    assert not any(item.is_meta for item in Net().parameters())  # only inside the block


@pytest.mark.parametrize("sharded", [False, True])
def test_one_file_and_shards_fill_a_module(tmp_path: Path, sharded: bool) -> None:
    if sharded:
        write_shards(tmp_path, TENSORS)
    else:
        save_file(TENSORS, tmp_path / "model.safetensors")
    net = empty()
    net.body.weight.requires_grad_(False)
    load_public_weights(net, tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(net.state_dict()[name], tensor)
    assert net.head.weight is net.embed.weight  # saved under one of its names
    assert (net.body.weight.requires_grad, net.body.bias.requires_grad) == (False, True)
    assert tensor_sizes(tmp_path) == {
        name: ("I64" if name == "count" else "F32", item.numel()) for name, item in TENSORS.items()
    }


def test_names_are_mapped_and_left_out_and_numbers_converted(tmp_path: Path) -> None:
    saved = {
        f"model.{name}": tensor.to(torch.bfloat16) if name != "count" else tensor for name, tensor in TENSORS.items()
    }
    save_file({**saved, "normalize_inputs.mean": torch.ones(1)}, tmp_path / "model.safetensors")
    rename = lambda name: name.removeprefix("model.") if name.startswith("model.") else None  # noqa: E731
    for dtype, kept in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (None, torch.bfloat16)):
        net = empty()
        load_public_weights(net, tmp_path, rename, dtype)
        assert net.body.weight.dtype == kept and net.count.dtype == torch.int64
        torch.testing.assert_close(net.body.weight.float(), TENSORS["body.weight"])


def test_missing_extra_and_misshapen_tensors_are_listed(tmp_path: Path) -> None:
    many = {f"old.{i}": torch.ones(1) for i in range(7)}
    kept = {"body.bias": torch.ones(4), "count": TENSORS["count"]}
    save_file({**kept, **many}, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load_public_weights(empty(), tmp_path)
    text = str(caught.value)
    # The head's weight is the embedding's, but nothing says so in the file: both names are missing.
    assert "4 tensors of the model are not in its files (body.bias, body.weight, embed.weight, head.weight)" in text
    assert "7 of its tensors have no place in the model (old.0, old.1, old.2, old.3 and 3 more)" in text
    assert "1 have another shape (body.bias [4] instead of [3])" in text
    assert "download the whole folder again" in text


def test_what_may_be_absent_keeps_what_it_holds(tmp_path: Path) -> None:
    save_file({name: item for name, item in TENSORS.items() if name != "count"}, tmp_path / "model.safetensors")
    net = empty()
    load_public_weights(net, tmp_path, absent=("count",))
    assert net.count.tolist() == [0, 0]
    with pytest.raises(UserError, match=r"1 tensors of the model are not in its files \(count\)"):
        load_public_weights(empty(), tmp_path)


def test_a_missing_or_damaged_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS)
    shard = weight_files(tmp_path)[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-3])
    with pytest.raises(UserError, match=f"{shard.name}' is damaged.*download it again"):
        load_public_weights(empty(), tmp_path)
    shard.unlink()
    with pytest.raises(UserError, match=rf"lacks 1 of the 4 shards.*\({shard.name}\)"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="has no weight_map"):
        weight_files(tmp_path)


def test_pickles_are_refused_and_nothing_is_missing_silently(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no model.safetensors, so the folder is incomplete"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match=r"pickles \(pytorch_model.bin\).*convert them to model.safetensors"):
        weight_files(tmp_path)


_PEAK = """
import re, sys
from pathlib import Path
import torch
from torch import nn
from vla_rl.policies.vla.weights import load_public_weights, without_weights

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

before = peak()
with without_weights():
    net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))
built = peak()
load_public_weights(net, Path(sys.argv[1]))
print(built - before, peak() - before, float(net[11].weight[0, 0]))
"""


@pytest.mark.full
def test_a_model_is_never_in_memory_twice(tmp_path: Path) -> None:
    """12 shards of 16 MB: one model and a few shards, where reading all before filling would take two models."""
    write_shards(tmp_path, {f"{i}.weight": torch.full((2048, 2048), float(i)) for i in range(12)})
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    built, loaded, value = map(float, done.stdout.split())
    assert value == 11.0
    assert built < 32  # MB: parameters without memory
    assert 190 < loaded < 192 + 80


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "", 7])
def test_shards_lie_in_the_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"no file beside it|has no weight_map"):
        weight_files(tmp_path)


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapter_of(tmp_path: Path, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Path, nn.Module]:
    """The folder that PEFT writes for an adapter of ``TENSORS``, and the model that it made."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    save_file(TENSORS, base / "model.safetensors")
    model = Net()
    load_public_weights(model, base)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["body"], lora_alpha=3, **options))
    torch.manual_seed(0)
    for item in (item for item in wrapped.parameters() if item.requires_grad):
        torch.nn.init.normal_(item)
    wrapped.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": str(base)}
    path.write_text(json.dumps(config | (changes or {})), encoding="utf-8")
    return folder, wrapped


@pytest.mark.parametrize("options", [{"r": 2}, {"r": 2, "use_rslora": True}, {"r": 4, "rank_pattern": {"body": 1}}])
def test_an_adapter_is_merged_into_what_it_was_trained_on(tmp_path: Path, options: dict[str, Any]) -> None:
    folder, wrapped = adapter_of(tmp_path, **options)
    net, x = empty(), torch.randn(4, 3)
    load_public_weights(net, folder)
    torch.testing.assert_close(net.body(x), wrapped.base_model.model.body(x))
    assert not net.body.weight.allclose(TENSORS["body.weight"])
    assert weight_files(folder) == (tmp_path / "base" / "model.safetensors",)


def test_what_was_trained_as_a_whole_is_taken_whole(tmp_path: Path) -> None:
    folder, wrapped = adapter_of(tmp_path, r=1, modules_to_save=["embed"])
    net = empty()
    load_public_weights(net, folder)
    embedded = wrapped.base_model.model.embed(torch.arange(5))
    torch.testing.assert_close(net.embed.weight, embedded)
    assert not embedded.allclose(TENSORS["embed.weight"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"alpha_pattern": {"body": 9}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"a_new_one": [1]}, "a_new_one"),
        ({"base_model_name_or_path": None}, "does not name"),
        ({"base_model_name_or_path": "downloads/gone"}, "downloads/gone"),
    ],
)
def test_an_adapter_that_is_not_understood_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder, _ = adapter_of(tmp_path, changes, r=2)
    with pytest.raises(UserError, match=words):
        load_public_weights(empty(), folder)


def test_half_an_adapter_and_one_of_another_model_are_refused(tmp_path: Path) -> None:
    folder, _ = adapter_of(tmp_path, r=2)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    first = next(name for name in tensors if "lora_A" in name)
    save_file({name: item for name, item in tensors.items() if name != first}, path)
    with pytest.raises(UserError, match="not in its files"):
        load_public_weights(empty(), folder)
    save_file({name.replace("body", "arm"): item for name, item in tensors.items()}, path)
    with pytest.raises(UserError, match="no place in the model"):
        load_public_weights(empty(), folder)
    path.unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors"):
        load_public_weights(empty(), folder)
