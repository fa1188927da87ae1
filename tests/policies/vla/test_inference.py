"""How a flow VLA runs when it acts changes no number but by rounding: compiled, or recorded and replayed."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.benchmarks.gpu import TINY_PI0
from tests.benchmarks.vla_sizes import TINY, Scene, policy_of
from tests.toys import seeded
from vla_rl.contract.config import from_json, to_json
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.inference import Compiled, CudaGraph, Fused, Graphs, Inference
from vla_rl.policies.vla.network import cross_attended, normalized, rotations, self_attended
from vla_rl.policies.vla.options import VLAOptions

SCENE = Scene(side=32, words=6)
SDE = FlowSampler(FlowSde(0.5), AllSteps(), 4)


def policy(inference: Inference | None = None, shape: Any = TINY) -> FlowVLA:
    options = VLAOptions(sampler=SDE, kept="prefix")
    made = policy_of(
        shape, SCENE, options if inference is None else VLAOptions(**{**vars(options), "inference": inference})
    )
    with torch.no_grad():
        for parameter in made.network.parameters():  # a network of Hugging Face's small weights does next to nothing
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return made


def sample(acting: FlowVLA, count: int = 3, seed: int = 0) -> torch.Tensor:
    out, _ = acting.act(acting.encode(SCENE.observe(count, seed)), {}, "sample", seeded(1))
    return out.sample


class Tape:
    """Stands for CUDA: a replay computes again from where the inputs lie and writes to where the outputs lie."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, call: Any) -> Any:
        self.recorded += 1
        outputs = {name: item.clone() for name, item in call().items()}

        def replay() -> None:
            for name, item in call().items():
                outputs[name].copy_(item)

        return replay, outputs


def taped(shape: Any = TINY) -> tuple[FlowVLA, Tape]:
    made, tape = policy(shape=shape), Tape()
    made._acting = Graphs(Fused(made.network), tape)
    return made, tape


@pytest.mark.parametrize("shape", [TINY, TINY_PI0], ids=["smolvla", "pi0"])
def test_what_is_recorded_once_is_right_ever_after(shape):
    plain, (graphs, tape) = policy(shape=shape), taped(shape)
    for count, seed in ((3, 0), (3, 1), (1, 2), (3, 3), (1, 0)):
        torch.testing.assert_close(sample(graphs, count, seed), sample(plain, count, seed))
    assert tape.recorded == 2 * 2  # an observation and its decision, two batch sizes


def test_an_input_that_changes_in_place_is_copied_again():
    plain, (graphs, _) = policy(), taped()
    features = [item.encode(SCENE.observe(2)) for item in (plain, graphs)]
    for change in (0.0, 0.7):
        for item in features:
            item["state"] += change
            item["prefix/cache"] += change
        one, two = (
            item.act(given, {}, "eval", seeded())[0].sample
            for item, given in zip((plain, graphs), features, strict=True)
        )
        torch.testing.assert_close(one, two)


def test_what_was_returned_stays_when_the_next_observation_comes():
    graphs, _ = taped()
    features = graphs.encode(SCENE.observe(2))
    before = {name: item.clone() for name, item in features.items()}
    graphs.encode(SCENE.observe(2, seed=1))
    assert all(torch.equal(item, before[name]) for name, item in features.items())


@pytest.mark.parametrize("shape", [TINY, TINY_PI0], ids=["smolvla", "pi0"])
def test_what_learns_is_seen_without_recording_again(shape):
    (graphs, tape), plain = taped(shape), policy(shape=shape)
    before = sample(graphs)
    for number, made in enumerate((graphs, plain)):
        for name, item in made.network.expert_parameters().items():
            with torch.no_grad():
                item.add_(0.02 * torch.randn(item.shape, generator=seeded(len(name))))
        assert number or not torch.allclose(sample(graphs), before, atol=1e-2)
    torch.testing.assert_close(sample(graphs), sample(plain))
    assert tape.recorded == 2


@pytest.mark.parametrize("move", [lambda made: made.double().float(), lambda made: made.network.double().float()])
def test_weights_that_lie_elsewhere_are_recorded_again(move):
    graphs, tape = taped()
    before = sample(graphs)
    move(graphs)
    with torch.no_grad():
        graphs.network.model["action_out_proj"].weight.zero_()
    plain = policy()
    plain.load_state_dict(graphs.state_dict())
    torch.testing.assert_close(sample(graphs), sample(plain))
    assert tape.recorded == 4 and not torch.allclose(sample(graphs), before, atol=1e-2)


@pytest.mark.parametrize("shape", [TINY, TINY_PI0], ids=["smolvla", "pi0"])
def test_a_decision_on_an_observation_is_one_replay(shape):
    """Condition, steps and density; the observation is another, which the decision may be asked for twice."""
    graphs, tape = taped(shape)
    features = graphs.encode(SCENE.observe(2))
    for mode in ("sample", "eval", "sample"):
        graphs.act(features, {}, mode, seeded())
    assert tape.recorded == 3


def test_old_shapes_make_room_for_new_ones():
    graphs, tape = taped()
    for count in (*range(1, 10), 9, 1):
        sample(graphs, count)
    assert tape.recorded == 2 * 10 and len(graphs._acting._recorded) == 2 * 8


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_copy_of_a_policy_runs_its_own_network(compiled):
    first = policy(Compiled("eager")) if compiled else taped()[0]
    expected, second = sample(first), copy.deepcopy(first)
    with torch.no_grad():
        second.network.model["action_out_proj"].weight.zero_()
    assert not torch.allclose(sample(second), expected, atol=1e-2)
    torch.testing.assert_close(sample(first), expected)


def close(compiled: FlowVLA) -> None:
    plain = policy()
    features = compiled.encode(SCENE.observe(8))
    out, _ = compiled.act(features, {}, "sample", seeded(1))
    torch.testing.assert_close(out.sample, sample(plain, 8), atol=1e-5, rtol=1e-5)
    again = compiled.log_prob(features, out.sample, out.aux).logprob
    assert (again - out.logprob).abs().max() <= 1e-5 * math.sqrt(4 * math.prod(compiled.latent_shape))


def test_what_is_compiled_acts_and_learning_sees_its_density(monkeypatch):
    """What torch makes of it: with torch's compiler, see the next ones."""
    made: list[tuple[Any, str]] = []
    monkeypatch.setattr(torch, "compile", lambda call, backend, dynamic: made.append((call, backend)) or call)
    close(policy(Compiled("eager")))
    assert len(made) > 1 and {backend for _, backend in made} == {"eager"}


@pytest.mark.full
def test_a_compiled_policy_acts_and_learns_alike():
    close(policy(Compiled("eager")))


@pytest.mark.full
def test_a_policy_compiled_to_machine_code_acts_alike():
    close(policy(Compiled()))


def test_a_checkpoint_says_how_it_runs():
    options = VLAOptions(inference=CudaGraph(Compiled()))
    assert from_json(to_json(options)) == options


class OneDevice(TorchDispatchMode):
    """Refuses whatever lies on the host, for a graph can neither read it nor wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [item for item in tree_leaves(out) if isinstance(item, torch.Tensor)]
        assert all(item.is_meta for item in made), f"{func} makes a tensor on the host"
        return out


@pytest.mark.parametrize("shape", [TINY, TINY_PI0], ids=["smolvla", "pi0"])
def test_nothing_that_is_recorded_waits_for_the_host(shape):
    """On the device "meta", which has no values to wait for."""
    with torch.device("meta"):
        network = shape.build().eval().requires_grad_(False)
        pictures = [torch.zeros(2, 48, 64, 3, dtype=torch.uint8) for _ in range(2)]
        tokens, mask = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6, dtype=torch.bool)
        state, x, t = torch.zeros(2, shape.state_size), torch.zeros(2, shape.chunk, shape.action_size), torch.ones(2)
    with OneDevice():
        condition = network.condition(network.encode([*pictures, None], tokens, mask), state)
        assert network.velocity(condition, x, t)[0].shape == x.shape


class Kernels(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns)
        self.count += not view and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def kernels(function: Any, *inputs: Any) -> int:
    with Kernels() as seen:
        function(*inputs)
    return seen.count


@pytest.mark.parametrize("shape", [TINY, TINY_PI0], ids=["smolvla", "pi0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_a_denoising_step_is_at_most_twelve_kernels(shape, dtype):
    """Without a mask.  A GPU has one for an RMSNorm; here it is several."""
    network = policy(shape=shape).network
    for module in network.expert_layers():
        layer = replace(module, dtype=dtype).fused()
        hidden, size = torch.zeros(1, 10, len(layer.before), dtype=dtype), layer.head_size
        past = torch.zeros(1, 2 * module.shared, 9, size, dtype=dtype)
        rotation = rotations(torch.arange(10)[None], size, dtype)
        attend = cross_attended if module.cross else self_attended
        found = kernels(attend, layer, hidden, layer.tables(rotation) if layer.shared else rotation, None, past)
        norm = kernels(normalized, hidden, layer.before, layer.epsilon)
        assert found - 2 * (norm - 1) == (11 if module.cross else 12)
