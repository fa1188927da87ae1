"""Low-rank adapters: nothing at first, then exactly ``alpha / rank * B A``; nothing else is trained."""

from __future__ import annotations

import pytest
import torch

from tests.policies.test_tiny import SPEC, observations
from tests.policies.vla.tiny_vlas import PI0, SMOLVLA, STATE
from tests.toys import seeded
from vla_rl.contract.errors import UserError
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde, OneRandomStep
from vla_rl.policies.pi0.policy import Pi0
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.options import TrainLoRA, VLAOptions

SDE = FlowSampler(FlowSde(0.5), AllSteps(), 3)
FAMILIES = {
    "pi0": (Pi0, PI0, "model.dit.layers.1.mlp.up_proj", "model.vlm.language_model.layers.1.mlp.up_proj"),
    "smolvla": (
        SmolVLA,
        SMOLVLA,
        "model.vlm_with_expert.lm_expert.layers.1.mlp.up_proj",
        "model.vlm_with_expert.vlm.model.text_model.layers.1.mlp.up_proj",
    ),
}


def made(family: str, trains: TrainLoRA, **options: str):
    torch.manual_seed(0)
    kind, shape, *_ = FAMILIES[family]
    return kind.new(SPEC, STATE, shape, VLAOptions(sampler=SDE, trains=trains, **options))


def velocity(policy) -> torch.Tensor:
    features, count = policy.encode(observations()), 16
    x = torch.randn(count, 1, policy.network.chunk * policy.network.action_size, generator=seeded(3))
    return policy.field(features)(x, torch.full((count, 1), 0.4)).velocity


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("within", [pytest.param("expert", marks=pytest.mark.full), "all"])
def test_adapters_change_nothing_and_then_what_b_times_a_says(family, within):
    policy = made(family, TrainLoRA(rank=2, alpha=6.0, within=within))
    plain = FAMILIES[family][0].new(SPEC, STATE, FAMILIES[family][1], VLAOptions(sampler=SDE))
    weights = {name.replace(".base_layer", ""): item for name, item in policy.state_dict().items()}
    plain.load_state_dict({name: item for name, item in weights.items() if ".lora_" not in name})
    torch.testing.assert_close(velocity(policy), velocity(plain), atol=1e-6, rtol=0)
    for part in FAMILIES[family][2:] if within == "all" else FAMILIES[family][2:3]:
        adapted, same = (item.network.get_submodule(part) for item in (policy, plain))
        torch.nn.init.normal_(adapted.lora_B["default"].weight)
        with torch.no_grad():
            same.weight += 3.0 * adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight  # alpha / rank
    assert (velocity(policy) - velocity(made(family, TrainLoRA(rank=2, alpha=6.0, within=within)))).abs().max() > 1e-3
    torch.testing.assert_close(velocity(policy), velocity(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_what_is_beside_the_layers_are_trained(family):
    policy = made(family, TrainLoRA(rank=2))
    expert, other = FAMILIES[family][2:]
    names = set(policy.trainable())
    assert {f"network.{expert}.lora_A.default.weight", f"network.{expert}.lora_B.default.weight"} <= names
    assert not {name for name in names if other.rpartition(".layers.")[0] in name or "base_layer" in name}
    assert any("state_proj" in name for name in names) and any("action_out_proj" in name for name in names)
    features = policy.encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded())
    policy.log_prob(features, out.sample, out.aux).logprob.sum().backward()
    assert {name for name, item in policy.named_parameters() if item.grad is not None} <= names
    both = set(made(family, TrainLoRA(rank=2, within="all"), kept="pictures").trainable())
    assert both > names and f"network.{other}.lora_A.default.weight" in both


def test_a_kept_prefix_does_not_go_with_adapters_in_front_of_it():
    with pytest.raises(UserError, match="a kept prefix would be out of date"):
        made("pi0", TrainLoRA(within="all"), kept="prefix")


def test_frozen_weights_in_bfloat16_leave_adapters_in_float32():
    """One noisy step: then learning runs the expert on as many queries as acting did, and rounds as it did."""
    policy = made("pi0", TrainLoRA(rank=2), dtype="bfloat16")
    policy.with_sampler(FlowSampler(FlowSde(0.5), OneRandomStep(), 3))
    trained = policy.trainable()
    dtypes = {name: item.dtype for name, item in policy.named_parameters() if name.startswith("network.")}
    assert {item for name, item in dtypes.items() if name in trained} == {torch.float32}
    assert {item for name, item in dtypes.items() if name not in trained} == {torch.bfloat16}
    features = policy.encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded())
    again = policy.log_prob(features, out.sample, out.aux).logprob
    assert (again - out.logprob).abs().max() < 1e-3


def test_saved_and_loaded_they_decide_the_same(tmp_path):
    policy = made("pi0", TrainLoRA(rank=2, within="all"), kept="pictures")
    for name, item in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(item)
    policy.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    assert again.config.trains == TrainLoRA(rank=2, within="all")
    assert torch.equal(velocity(policy), velocity(again))
