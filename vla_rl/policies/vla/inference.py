"""How the network of a flow VLA runs when it acts: operation by operation, compiled, or recorded as CUDA graphs.

Learning always runs it operation by operation.  At batch 1 a GPU waits for Python between a thousand small kernels; a
graph starts all kernels of a call at once.  Shapes of a prefix are fixed, because prompts are padded to the longest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.network import Acting, FlowNetwork

Tensors = dict[str, Tensor]
_SHAPES = 8  # of inputs, of which a call keeps its graphs
_WARM_UP = 3  # calls before recording, in which libraries choose kernels and reserve memory


class Inference(Protocol):
    """The frozen dataclass that chooses how a network runs when it acts."""

    def prepare(self, network: FlowNetwork) -> Acting:
        """``network`` as it acts.  A deep copy of the two together belongs together."""


@dataclass(frozen=True)
class Eager:
    """Operation by operation."""

    def prepare(self, network: FlowNetwork) -> Acting:
        return Operations(network)


@dataclass(frozen=True)
class Compiled:
    """By ``torch.compile`` in its default mode, for ``reduce-overhead`` regressed in torch 2.10; needs a C++ compiler.

    The first decision takes up to minutes, and so does one of another batch size.  Actions differ by rounding, so
    that PPO's first ratios are 1 within 1e-5 a root of terms, not exactly.
    """

    backend: str = "inductor"

    def prepare(self, network: FlowNetwork) -> Acting:
        return CompiledOperations(network, self.backend)


@dataclass(frozen=True)
class CudaGraph:
    """As CUDA graphs of what ``of`` runs, one per call and batch size, recorded at the first decision of that size.

    It holds a second copy of a prefix in memory.  Raises UserError at the first decision of a policy that is not on a
    GPU.
    """

    of: Inference = Eager()

    def prepare(self, network: FlowNetwork) -> Acting:
        return Graphs(network, self.of.prepare(network), cuda_graph)


class Operations:
    """The network itself, in a box: a module in a module's attribute would count twice."""

    def __init__(self, network: FlowNetwork) -> None:
        self.network = network

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor) -> Tensors:
        return self.network.encode(pictures, tokens, token_mask)

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> Tensors:
        return self.network.condition(prefix, state)

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return self.network.velocity(condition, x, t)


class CompiledOperations(Operations):
    """Its three calls compiled, each at its first use."""

    def __init__(self, network: FlowNetwork, backend: str) -> None:
        super().__init__(network)
        self._backend = backend
        for name in ("encode", "condition", "velocity"):
            setattr(self, name, torch.compile(getattr(network, name), backend=backend))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledOperations:
        return CompiledOperations(copy.deepcopy(self.network, memo), self._backend)


Record = Callable[[Callable[[], Tensors]], tuple[Callable[[], None], Tensors]]


class Graphs:
    """The three calls recorded by ``record`` and replayed; what they return are copies.

    What is recorded reads weights where they lay then: a graph is thrown away when they lie elsewhere (``.to()``).
    """

    def __init__(self, network: FlowNetwork, inner: Acting, record: Record) -> None:
        self._network, self._inner, self._record = network, inner, record
        self._weights: tuple[int, ...] = ()
        self._recorded: dict[tuple[Any, ...], Recorded] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs(copy.deepcopy(self._network, memo), copy.deepcopy(self._inner, memo), self._record)

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor) -> Tensors:
        self._forget_if_moved()
        shown = {str(i): item for i, item in enumerate(pictures) if item is not None}
        count = len(pictures)

        def call(given: Tensors) -> Tensors:
            seen = [given.get(str(i)) for i in range(count)]
            return self._inner.encode(seen, given["tokens"], given["mask"])

        return self._run("encode", call, {**shown, "tokens": tokens, "mask": token_mask})

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> Tensors:
        self._forget_if_moved()

        def call(given: Tensors) -> Tensors:
            rest = {name.removeprefix("prefix/"): item for name, item in given.items() if name != "state"}
            return self._inner.condition(rest, given["state"])

        return self._run("condition", call, {**{f"prefix/{key}": item for key, item in prefix.items()}, "state": state})

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        def call(given: Tensors) -> Tensors:
            rest = {name.removeprefix("seen/"): item for name, item in given.items() if name not in ("x", "t")}
            velocity, hidden = self._inner.velocity(rest, given["x"], given["t"])
            return {"velocity": velocity, "hidden": hidden}

        found = self._run(
            "velocity", call, {**{f"seen/{key}": item for key, item in condition.items()}, "x": x, "t": t}
        )
        return found["velocity"], found["hidden"]

    @torch.no_grad()
    def _run(self, name: str, call: Callable[[Tensors], Tensors], given: Tensors) -> Tensors:
        key = (name, *((key, item.shape, item.dtype, item.device) for key, item in given.items()))
        if key not in self._recorded:
            same = [item for item in self._recorded if item[0] == name]
            if len(same) == _SHAPES:
                del self._recorded[same[0]]
            with torch.cuda.device_of(next(iter(given.values()))):
                self._recorded[key] = Recorded(call, given, self._record)
        return self._recorded[key](given)

    def _forget_if_moved(self) -> None:
        weights = tuple(item.data_ptr() for _, item in self._network.named_parameters())
        if weights != self._weights:
            self._weights, self._recorded = weights, {}


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
