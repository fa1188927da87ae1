"""A downloaded OpenVLA folder is opened as it is; what is missing, foreign or does not fit is one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.policies.openvla.tiny import SPEC, golden_outputs, observed, tiny, tiny_shape
from tests.policies.vla.public_folders import word_tokenizer
from vla_rl.contract.errors import UserError
from vla_rl.policies.openvla.base import OpenVLAPrompts, critics_scale
from vla_rl.policies.openvla.decoding import Autoregressive, OpenVLAOptions, Parallel
from vla_rl.policies.openvla.policy import OpenVLA
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.options import TrainExpert, TrainLoRA, VLAOptions
from vla_rl.policies.vla.tokenizer import open_tokenizer

EMPTY = 29871
PROMPT = "<s> In : What action should the robot take to lift the cube ? Out :"
WORDS = ["<unk>", *dict.fromkeys([*PROMPT.split(), "</s>"])]
STATISTICS = {
    "q01": [-1.0, 0.0, 0.0],
    "q99": [0.5, 4.0, 1.0],
    "min": [-9.0] * 3,
    "max": [9.0] * 3,
    "mask": [True, True, False],
}
CONFIG: dict[str, Any] = {
    "model_type": "openvla",
    "image_resize_strategy": "resize-naive",
    "use_fused_vision_backbone": True,
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "n_action_bins": tiny.BINS,
    "pad_to_multiple_of": tiny.PADDING,
    "text_config": {"model_type": "llama", "torch_dtype": "bfloat16", **tiny.LLAMA, "vocab_size": EMPTY + 1 + 256 + 64},
    "norm_stats": {"bridge": {"action": STATISTICS, "proprio": {"q01": [0.0, 0.0], "q99": [0.0, 0.0]}}},
}
ONE = replace(SPEC, images={"front": SPEC.images["front"]}, tasks=("Lift the cube", "take the cube"))


@lru_cache(maxsize=1)
def weights() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        network = replace(tiny_shape(), llama=CONFIG["text_config"]).build()
    shapes = {name: tuple(item.shape) for name, item in network.state_dict().items()}
    return {name: torch.from_numpy(tiny.weight(name, shape)).bfloat16() for name, shape in shapes.items()}


def published(folder: Path, **changes: Any) -> Path:
    """A folder as OpenVLA's are: config, two shards with an index, Llama's tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    tensors = weights()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    word_tokenizer(WORDS).save(str(folder / "tokenizer.json"))
    return folder


def test_the_prompt_is_openvlas(tmp_path):
    prompts = OpenVLAPrompts(str(published(tmp_path / "it")))
    tokens, mask = prompts.encode(["Lift the CUBE"])
    assert tokens[0].tolist() == [*(WORDS.index(word) for word in PROMPT.split()), EMPTY] and mask.all()
    learnt = prompts.learn(["Lift the CUBE"])
    (tmp_path / "it" / "tokenizer.json").unlink()
    open_tokenizer.cache_clear()
    assert torch.equal(learnt.encode(["Lift the CUBE"])[0], tokens)


def test_a_folder_is_opened_as_it_is(tmp_path):
    folder = published(tmp_path / "it")
    policy = OpenVLA.from_public(folder, ONE)
    assert policy.horizon == 1 and policy.cameras == ("front",) and policy.config.decoding == Autoregressive()
    features = policy.encode(replace(observed(), task=observed().task % 2))
    out, _ = policy.act(features, {}, "eval", None)
    assert out.action.shape == (6, 1, 3)
    bins = torch.tensor([[0, 128, 3]])
    middle = (bins + 0.5) * 2 / 255 - 1
    expected = (middle + 1) / 2 * torch.tensor([1.5, 4.0, 2.0]) + torch.tensor([-1.0, 0.0, -1.0])
    torch.testing.assert_close(policy.actions(bins), expected, rtol=0, atol=1e-6)
    assert all(item.dtype is torch.float32 for item in policy.parameters())
    saved = load_file(folder / "model-00001-of-00002.safetensors")
    name = "language_model.lm_head.weight"
    found = {**saved, **load_file(folder / "model-00002-of-00002.safetensors")}[name]
    assert torch.equal(policy.network.state_dict()[name], found.float())
    policy.save_pretrained(tmp_path / "ours")
    again = load_policy(tmp_path / "ours", ONE)
    assert torch.equal(again.act(features, {}, "eval", None)[0].sample, out.sample)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_checkpoint_on_a_base_holds_what_was_learnt(tmp_path, dtype):
    """LoRA in the language model's layers: patches stay as they are, so they can be kept; the vocabulary stays too."""
    folder, spec = published(tmp_path / "it"), ONE
    options = OpenVLAOptions(decoding=Parallel(2), trains=TrainLoRA(rank=2), dtype=dtype, kept="prefix")
    policy = OpenVLA.from_public(folder, spec, options)
    adapters = {name for name in policy.trainable() if ".lora_" in name}
    assert len(adapters) == 2 * 7 * 2 and policy.trainable().keys() - adapters == {
        "network.language_model.model.norm.weight"
    }
    features = policy.encode(replace(observed(), task=observed().task % 2))
    before, _ = policy.act(features, {}, "sample", torch.Generator().manual_seed(0))
    frozen = OpenVLA.from_public(folder, spec, replace(options, trains=TrainExpert(), dtype="float32"))
    if dtype == "float32":
        unchanged, _ = frozen.act(features, {}, "sample", torch.Generator().manual_seed(0))
        assert torch.equal(before.sample, unchanged.sample), "adapters start at nothing"
    policy.log_prob(features, before.sample, {}).logprob.sum().backward()
    with torch.no_grad():
        for item in policy.trainable().values():
            item -= 0.05 * item.grad.sign()
    after, _ = policy.act(features, {}, "sample", torch.Generator().manual_seed(0))
    gap = (policy.log_prob(features, after.sample, {}).logprob - after.logprob).abs().max()
    assert not torch.equal(after.logprob, before.logprob) and gap <= 1e-5 * 6**0.5
    policy.save_pretrained(tmp_path / "ours")
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == policy.trainable().keys()
    again = load_policy(tmp_path / "ours", spec)
    same, _ = again.act(
        again.encode(replace(observed(), task=observed().task % 2)), {}, "sample", torch.Generator().manual_seed(0)
    )
    assert torch.equal(same.sample, after.sample) and torch.equal(same.logprob, after.logprob)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "changed": True}))
    with pytest.raises(UserError, match=r"are not those that .* was trained on"):
        load_policy(tmp_path / "ours", spec)


def test_its_patches_are_those_of_timm(tmp_path):
    """Weights of the vision part are those of the golden data but for their rounding to bfloat16."""
    policy = OpenVLA.from_public(published(tmp_path / "it"), ONE)
    features = policy.encode(replace(observed(3), task=observed(3).task % 2))
    expected = golden_outputs()["projected"][:, :4]
    assert (features["prefix/patches"] - expected).abs().max() < 0.02 * expected.abs().max()


def test_oft_sees_several_pictures_and_executes_part_of_a_chunk(tmp_path):
    spec = replace(SPEC, tasks=ONE.tasks)
    options = OpenVLAOptions(
        decoding=Parallel(8), horizon=5, cameras={"primary": "front", "hand": "wrist"}, dtype="bfloat16", crop=0.9
    )
    policy = OpenVLA.from_public(published(tmp_path / "it"), spec, options)
    assert policy.cameras == ("front", "wrist") and policy.horizon == 5 and policy.network.shape.crop == 0.9
    assert policy.network.projector.fc1.weight.dtype is torch.bfloat16
    assert {item.dtype for item in policy.trainable().values()} == {torch.float32}
    features = policy.encode(replace(observed(), task=observed().task % 2))
    out, _ = policy.act(features, {}, "sample", torch.Generator().manual_seed(0))
    assert out.action.shape == (6, 5, 3)
    gap = (policy.log_prob(features, out.sample, {}).logprob - out.logprob).abs().max()
    assert gap <= 1e-5 * 15**0.5


def test_oft_reads_the_state_where_the_folder_has_its_projector(tmp_path):
    stats = {"action": STATISTICS, "proprio": {"q01": [0.0, -1.0], "q99": [1.0, 1.0]}}
    folder = published(tmp_path / "it", norm_stats={"libero": stats})
    names = {"fc1.weight": (32, 2), "fc1.bias": (32,), "fc2.weight": (32, 32), "fc2.bias": (32,)}
    tensors = {f"module.{name}": torch.from_numpy(tiny.weight(name, shape)) for name, shape in names.items()}
    save_file(tensors, folder / "proprio_projector--150000_checkpoint.safetensors")
    policy = OpenVLA.from_public(folder, ONE)
    assert policy.network.shape.state == 2
    assert torch.equal(policy.network.proprio_projector.fc1.weight, tensors["module.fc1.weight"])
    torch.testing.assert_close(policy.state_scale.normalize(torch.tensor([1.0, 0.0])), torch.tensor([1.0, 0.0]))
    obs = replace(observed(), task=observed().task % 2)
    one, other = (policy.encode(replace(obs, state=item)) for item in (obs.state, -obs.state))
    bins = torch.zeros(6, 1, 3, dtype=torch.int64)
    assert (policy.log_prob(one, bins, {}).logprob - policy.log_prob(other, bins, {}).logprob).abs().min() > 1e-4


def test_the_gripper_opens_where_the_environment_opens_it(tmp_path):
    """LIBERO closes at 1 and opens at -1; a checkpoint's 1 means open and 0 closed, and is not normalised."""
    folder = published(tmp_path / "it")
    wide = replace(ONE, action=replace(ONE.action, low=-10.0, high=10.0))
    opened, closed = (torch.tensor([100, 100, 127 + way]) for way in (127, 0))
    for values in ((0.0, 1.0), (1.0, -1.0), (-1.0, 1.0)):
        policy = OpenVLA.from_public(folder, wide, OpenVLAOptions(gripper=values))
        for bins, expected in ((closed, values[0]), (opened, values[1])):
            assert policy.actions(bins)[-1].item() == pytest.approx(expected, abs=0.01)
        back = policy.bins(policy.action_scale.normalize(policy.actions(opened)))
        assert (back - opened).abs().max() <= 1
        assert torch.equal(policy.actions(opened)[:2], policy.actions(closed)[:2])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "lacks 1 of the 2 shards"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "proprio_projector--1_checkpoint.pt").touch(), "is a pickle.*save_file"),
    ],
    ids=["shard", "tokenizer", "pickled projector"],
)
def test_what_is_missing_or_not_supported_is_named(tmp_path, damage, sentence):
    folder = published(tmp_path / "it")
    damage(folder)
    with pytest.raises(UserError, match=sentence):
        OpenVLA.from_public(folder, ONE)


@pytest.mark.parametrize(
    ("changes", "spec", "options", "sentence"),
    [
        ({"timm_override_act_layers": ["quick_gelu", None]}, ONE, None, "sets timm_override_act_layers to"),
        ({"image_resize_strategy": "letterbox"}, ONE, None, "sets image_resize_strategy to letterbox"),
        ({"norm_stats": {}}, ONE, None, "no normalization statistics"),
        ({"norm_stats": {"a": {"action": STATISTICS}, "b": {"action": STATISTICS}}}, ONE, None, "statistics of a, b"),
        ({}, SPEC, None, "has the cameras image and the environment 'tiny' has front, wrist"),
        ({}, ONE, VLAOptions(cameras={"image": "side"}), "'side' is none of them"),
        (
            {},
            replace(ONE, action=replace(ONE.action, shape=(4,), low=-1, high=1)),
            None,
            "statistics of 3 action entries",
        ),
    ],
    ids=["activation", "letterbox", "no statistics", "two datasets", "cameras", "camera", "action"],
)
def test_what_does_not_fit_is_named(tmp_path, changes, spec, options, sentence):
    with pytest.raises(UserError, match=sentence):
        OpenVLA.from_public(published(tmp_path / "it", **changes), spec, options)


def test_critics_read_bounded_entries_on_one_scale():
    scale = critics_scale(
        replace(SPEC, state=replace(SPEC.state, shape=(3,), low=(-2.0, 0.0, -float("inf")), high=4.0))
    )
    assert scale.offset == (1.0, 2.0, 0.0) and scale.scale == (3.0, 2.0, 1.0)


def test_a_new_one_learns_from_nothing():
    torch.manual_seed(0)
    policy = OpenVLA.new(SPEC, critics_scale(SPEC), options=OpenVLAOptions(decoding=Parallel(2)))
    assert sum(item.numel() for item in policy.parameters()) < 1e6 and policy.cameras == ("front", "wrist")
    features = policy.encode(observed())
    out, _ = policy.act(features, {}, "sample", torch.Generator().manual_seed(0))
    assert out.action.shape == (6, 2, 3)
    assert (policy.log_prob(features, out.sample, {}).logprob - out.logprob).abs().max() <= 1e-5 * 6**0.5
