"""Policies that do not fit one GPU: each of torchrun's processes holds a share of every large weight (FSDP2).

Weights, gradients and the optimizer's moments are DTensors, cut along their first dimension.  A part of the network is
gathered when its ``forward`` is called, computes, and is dropped again; in the backward pass once more, and its
gradient is summed into the shards.  Parts are the linear, convolutional and embedding ones of at least ``SMALLEST``
numbers, since the families call these and not whole layers.  Norms and critics are whole in every process, and their
gradients are summed as without sharding.  Source: torch.distributed.fsdp.fully_shard.

Acting with shared weights: a process that has nothing to compute gathers for those who have.

Gathering a layer takes all processes, but they do not act equally often: where an episode is truncated, its last
observation is encoded as well.  So they agree before every call of the network which one comes next.  Who wants another
one, or none, only gathers what the call needs, which is the same for all calls of a name.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Features, Likelihood, LikelihoodPolicy, Mode, State
from vla_rl.contract.tracker import is_shard
from vla_rl.training.distributed import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

SMALLEST = 2**14  # numbers of a part that is shared
_PARTS = (nn.Linear, nn.Embedding, nn.Conv2d)


class ShardedGroup(ProcessGroup):
    """The processes of a run that share the weights of one policy.

    A sum is where all of them meet: who comes first takes part in what the others still compute.
    """

    def __init__(self, smallest: int = SMALLEST) -> None:
        super().__init__()
        self.smallest = smallest
        self._lockstep: Lockstep | None = None

    def sum(self, values: Tensor) -> Tensor:
        if self._lockstep is not None:
            self._lockstep.meet()
        return super().sum(values)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Those of shards are sums already."""
        super().sum_gradients(item for item in parameters if not is_shard(item))

    def passes(self, own: int) -> int:
        """The most of any process, for each pass gathers in all of them."""
        counts = torch.zeros(self.size, dtype=torch.float64)
        counts[self.rank] = own
        return int(self.sum(counts).max())

    def shard(self, policy: Any, device: torch.device) -> None:
        """Keep this process's share of the weights of ``policy``, on ``device``, to which the rest goes whole.

        Call it once, before an optimizer is made.  Raises UserError for a policy that cannot be shared.
        """
        if not hasattr(policy, "act_through") or not isinstance(getattr(policy, "network", None), nn.Module):
            raise UserError(
                f"{type(policy).__name__} has no network of which a process could hold a share, so it cannot be "
                "trained with sharded; leave it out, or train a flow policy that itself is a vision-language-action "
                "model."
            )
        from torch.distributed.fsdp import fully_shard  # see is_shard

        network, mesh = policy.network, mesh_on(device.type)
        units = [fully_shard(unit, mesh=mesh, reshard_after_forward=True) for unit in _units(network, self.smallest)]
        whole = {item for item in network.parameters() if not is_shard(item)}
        root = _Pass(network)
        for unit in (*units, fully_shard(root, mesh=mesh, ignored_params=whole)):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for name in CALLS:
            setattr(network, name, functools.partial(root, getattr(network, name)))
        lockstep = Lockstep(root, units, super().sum)
        policy.act_through(lambda acting: LockstepActing(acting, lockstep))
        stand_in = _StandIn(policy)
        policy.act, policy.log_prob = stand_in.act, stand_in.log_prob
        if isinstance(policy, nn.Module):
            policy.to(device)
        self._lockstep = lockstep


def sharing(evaluators: int) -> ShardedGroup:
    """The processes of a sharded run.

    Raises UserError without torchrun, and when ``evaluators`` other processes would evaluate a policy of shards.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "sharded shares the weights among torchrun's processes, but this is one process, so nothing could be "
            "shared; start it with torchrun --nproc-per-node N -m vla_rl.cli train, or leave sharded out."
        )
    if evaluators > 1:
        raise UserError(
            f"{evaluators} processes that hold no weights cannot evaluate a sharded policy, so nothing was started; "
            "set evaluation.processes to 1."
        )
    return ShardedGroup()


class _StandIn:
    """A decision of this process for those that ``log_prob`` is asked for without any.

    So the pass on nothing is a whole one, forward and backward, whose result has no rows and gradients are 0.
    """

    def __init__(self, policy: LikelihoodPolicy) -> None:
        self._act, self._log_prob = policy.act, policy.log_prob
        self._decision: tuple[Features, Tensor, Features] | None = None

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        out, state = self._act(features, state, mode, generator)
        if mode == "sample" and self._decision is None:
            self._decision = _rows(features, 1), out.sample[:1].clone(), _rows(out.aux, 1)
        return out, state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        if len(sample) or self._decision is None:
            return self._log_prob(features, sample, aux)
        found = self._log_prob(*self._decision)
        return Likelihood(found.logprob[:0], found.entropy[:0], {name: item[:0] for name, item in found.params.items()})


def _rows(items: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    return {name: item[:count].clone() for name, item in items.items()}


class _Pass(nn.Module):
    """What FSDP takes for the forward pass of ``network``: any call of it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, call: Callable[..., Any], *given: Any) -> Any:
        return call(*given)


def _units(network: nn.Module, smallest: int) -> list[nn.Module]:
    """The parts that are gathered when they are called; a parameter that two parts have stays whole."""
    shared = Counter(id(item) for _, item in network.named_parameters(remove_duplicate=False))
    return [
        part
        for part in network.modules()
        if isinstance(part, _PARTS)
        and part.weight.numel() >= smallest
        and all(shared[id(item)] == 1 for item in part.parameters())
    ]


T = TypeVar("T")
CALLS = ("encode", "condition", "velocity")


class Lockstep:
    """Calls of one network, whose ``units`` FSDP gathers one by one; ``total`` sums float64 over all processes.

    ``root`` is the module around the network through which FSDP begins a pass.
    """

    def __init__(self, root: nn.Module, units: Sequence[Any], total: Callable[[Tensor], Tensor]) -> None:
        self._root, self._total = root, total
        self._gathered: dict[str, list[Any]] = {}  # what a call needs, in order
        self._recording: list[Any] | None = None
        for unit in units:
            unit.register_forward_pre_hook(self._note)

    def call(self, name: str, compute: Callable[[], T]) -> T:
        """``compute()``, which is the call ``name``, when all processes make or join it."""
        while (agreed := self._agree(name)) != name:
            self._join(agreed)
        self._recording = self._gathered[name] = []
        try:
            return compute()
        finally:
            self._recording = None

    def meet(self) -> None:
        """Return when all processes have come here; until then join the calls of the others."""
        while agreed := self._agree(""):
            self._join(agreed)

    def _agree(self, wanted: str) -> str:
        """The first of all calls that a process wants, "" when none wants any."""
        wants = self._total(torch.tensor([float(name == wanted) for name in CALLS], dtype=torch.float64))
        return next((name for name, count in zip(CALLS, wants.tolist(), strict=True) if count), "")

    def _join(self, name: str) -> None:
        self._root(self._gather, self._gathered[name])

    def _gather(self, units: Sequence[Any]) -> None:
        for unit in units:
            unit.unshard()
            unit.reshard()

    def _note(self, unit: nn.Module, given: Any) -> None:
        if self._recording is not None:
            self._recording.append(unit)


class LockstepActing:
    """A network as it acts (``Acting``), in step with the other processes."""

    def __init__(self, acting: Any, lockstep: Lockstep) -> None:
        self._acting, self._lockstep = acting, lockstep

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> dict[str, Tensor]:
        return self._lockstep.call("encode", lambda: self._acting.encode(pictures, tokens, token_mask))

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        return self._lockstep.call("condition", lambda: self._acting.condition(prefix, state))

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._lockstep.call("velocity", lambda: self._acting.velocity(condition, x, t))

    def decide(self, key: Any, call: Callable[[Any, Any], T], given: Any) -> T:
        return call(self, given)


@functools.cache
def mesh_on(kind: str) -> DeviceMesh:
    """All processes in a row, which compute on devices of this ``kind`` ("cpu", "cuda")."""
    from torch.distributed.device_mesh import init_device_mesh  # see is_shard

    return init_device_mesh(kind, (dist.get_world_size(),))


def shard_of(own: Tensor, shape: torch.Size, kind: str) -> DTensor:
    """The tensor of ``shape`` that is cut along its first dimension and of which this process has ``own``."""
    stride = torch.empty(shape, device="meta").stride()
    from torch.distributed.tensor import DTensor, Shard  # see is_shard

    return DTensor.from_local(own, mesh_on(kind), [Shard(0)], run_check=False, shape=shape, stride=stride)
