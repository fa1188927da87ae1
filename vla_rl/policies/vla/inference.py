"""How the network of a flow VLA runs when it acts: operation by operation, compiled, or recorded as CUDA graphs.

It learns operation by operation or compiled.  At batch 1 a GPU waits for Python between a thousand small kernels; a
graph starts all kernels of a call at once.  Shapes of a prefix are fixed, because prompts are padded to the longest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.network import DecoderNetwork, FlowNetwork, Layer, Run, plainly

Tensors = dict[str, Tensor]
Call = Callable[["Operations", Tensors], Tensors]
_SHAPES = 8  # of inputs, of which a call keeps its graphs
_COMPILED = 64  # shapes and kinds of a layer's inputs: a few for each of those
_WARM_UP = 3  # calls before recording, in which libraries choose kernels and reserve memory


class Inference:
    """The frozen dataclass that chooses how a network runs when it acts."""

    def prepare(self, network: FlowNetwork) -> Operations:
        """``network`` as it acts.  A deep copy of the two together belongs together."""
        raise NotImplementedError

    def learning(self, network: FlowNetwork) -> Operations:
        raise NotImplementedError


@dataclass(frozen=True)
class Eager(Inference):
    """Operation by operation."""

    def prepare(self, network: FlowNetwork) -> Operations:
        return Operations(network)

    def learning(self, network: FlowNetwork) -> Operations:
        return Operations(network)


@dataclass(frozen=True)
class Compiled(Inference):
    """By ``torch.compile`` in its default mode, for ``reduce-overhead`` regressed in torch 2.10; needs a C++ compiler.

    The first decision takes up to minutes, and so does one of another batch size.  Actions differ by rounding, so
    that PPO's first ratios are 1 within 1e-5 a root of terms, not exactly.
    """

    backend: str = "inductor"

    def prepare(self, network: FlowNetwork) -> Fused:
        return Fused(_decoder(network, self), CompiledLayers(self.backend))

    def learning(self, network: FlowNetwork) -> Operations:
        return Layers(_decoder(network, self), CompiledLayers(self.backend))


@dataclass(frozen=True)
class CudaGraph(Inference):
    """As CUDA graphs of what ``of`` runs, one per call and batch size, recorded at the first decision of that size.

    It holds a second copy of a prefix in memory.  Raises UserError at the first decision of a policy that is not on a
    GPU.
    """

    of: Eager | Compiled = Eager()

    def prepare(self, network: FlowNetwork) -> Graphs:
        inner = Fused(_decoder(network, self)) if isinstance(self.of, Eager) else self.of.prepare(network)
        return Graphs(inner, cuda_graph)

    def learning(self, network: FlowNetwork) -> Operations:
        return self.of.learning(network)


def _decoder(network: FlowNetwork, way: Inference) -> DecoderNetwork:
    if not isinstance(network, DecoderNetwork):
        raise UserError(
            f"{type(network).__name__} has no expert whose layers could lie together, so it cannot act as "
            f"{type(way).__name__}; set inference to Eager()."
        )
    return network


class Operations:
    """A network as it acts: itself, in a box, for a module in a module's attribute would count twice."""

    network: Any

    def __init__(self, network: Any) -> None:
        self.network = network

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> Tensors:
        return self.network.encode(pictures, tokens, token_mask)

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> Tensors:
        return self.network.condition(prefix, state)

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return self.network.velocity(condition, x, t)

    def decide(self, key: Hashable, call: Call, given: Tensors) -> Tensors:
        """``call(network, given)``, which at the same ``key`` does the same with other ``given`` {name: [...]}."""
        return call(self, given)


class Layers(Operations):
    """The same, each layer by ``run``."""

    def __init__(self, network: DecoderNetwork, run: Run = plainly) -> None:
        super().__init__(network)
        self._run = run
        self._layers: Sequence[Layer] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self.network, memo), self._run)

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> Tensors:
        return self.network.encode(pictures, tokens, token_mask, self._run)

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> Tensors:
        return self.network.condition(prefix, state, self._layers, self._run)

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return self.network.velocity(condition, x, t, self._layers, self._run)


class Fused(Layers):
    """Copies of the expert's weights that lie together and are made anew for every condition.

    So they are always those that learning left, at the cost of reading the expert once more per decision.
    """

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> Tensors:
        self._layers = [layer.fused() for layer in self.network.expert_layers()]
        return super().condition(prefix, state)


class CompiledLayers:
    """Runs a function of one layer compiled: once for all layers of a kind, since they are its inputs."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLayers:
        return self  # it holds no weights

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, backend=self.backend, dynamic=False)
        with torch._dynamo.config.patch(recompile_limit=_COMPILED):
            return self._compiled[function](*inputs)


Record = Callable[[Callable[[], Tensors]], tuple[Callable[[], None], Tensors]]


class Graphs(Operations):
    """Observations and decisions of ``inner`` recorded by ``record`` and replayed; what they return are copies.

    What is recorded reads weights where they lay then: a graph is thrown away when they may lie elsewhere (``.to()``).
    """

    network: DecoderNetwork

    def __init__(self, inner: Fused, record: Record) -> None:
        super().__init__(inner.network)
        self._inner, self._record = inner, record
        self._moves = self.network.moves
        self._recorded: dict[tuple[Hashable, ...], Recorded] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs(copy.deepcopy(self._inner, memo), self._record)

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> Tensors:
        shown = {str(i): item for i, item in enumerate(pictures) if item is not None}
        mask = {} if token_mask is None else {"mask": token_mask}
        count = len(pictures)

        def call(given: Tensors) -> Tensors:
            seen = [given.get(str(i)) for i in range(count)]
            return self._inner.encode(seen, given["tokens"], given.get("mask"))

        return self._replayed("encode", call, {**shown, **mask, "tokens": tokens})

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> Tensors:
        return self._inner.condition(prefix, state)

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner.velocity(condition, x, t)

    def decide(self, key: Hashable, call: Call, given: Tensors) -> Tensors:
        return self._replayed(key, lambda given: call(self._inner, given), given)

    @torch.no_grad()
    def _replayed(self, name: Hashable, call: Callable[[Tensors], Tensors], given: Tensors) -> Tensors:
        if self._moves != self.network.moves:
            self._moves, self._recorded = self.network.moves, {}
        key = (name, *((key, item.shape, item.dtype, item.device) for key, item in given.items()))
        if key not in self._recorded:
            same = [item for item in self._recorded if item[0] == name]
            if len(same) == _SHAPES:
                del self._recorded[same[0]]
            with torch.cuda.device_of(next(iter(given.values()))):
                self._recorded[key] = Recorded(call, given, self._record)
        return self._recorded[key](given)


class Recorded:
    """``call`` on inputs that stay where they are, recorded once."""

    def __init__(self, call: Callable[[Tensors], Tensors], given: Tensors, record: Record) -> None:
        self._inputs = {name: item.clone() for name, item in given.items()}
        self._copied: dict[str, tuple[Tensor, int]] = {}  # what lies there, and its version
        self._replay, self._outputs = record(lambda: call(self._inputs))

    def __call__(self, given: Tensors) -> Tensors:
        """Copies of the outputs for ``given``; what has not changed since the last call is not copied again."""
        for name, item in given.items():
            known, version = self._copied.get(name, (None, -1))
            if known is not item or version != item._version:
                self._inputs[name].copy_(item)
                self._copied[name] = item, item._version
        self._replay()
        return {name: item.clone() for name, item in self._outputs.items()}


def cuda_graph(call: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """A CUDA graph of ``call``: its replay and the tensors into which that writes; raises UserError without a GPU."""
    if not torch.cuda.is_available():
        raise UserError(
            "inference is CudaGraph, but torch sees no GPU, so nothing can be recorded; set inference to Eager() or "
            "Compiled()."
        )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a learner may run in another thread
        outputs = call()
    return graph.replay, outputs
