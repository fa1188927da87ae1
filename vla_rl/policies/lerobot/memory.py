"""What a policy of LeRobot keeps between two actions, taken apart by environments and put together again.

Such a policy keeps one memory for its whole batch, whose episodes begin together: queues of observations and of actions
that are still to be executed, the last plan of a planner, the averages of an ensemble.  ``reset()`` clears all of it.
Which attributes these are, and which axis of their tensors is the batch, is measured here (:func:`measure`), by two
batches of different sizes: nothing depends on the family.  Episodes that are equally far, whose memories have equal
shapes, are computed together.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.wire import pack, unpack

Axes: TypeAlias = dict[str, int | None]
"""By the name of a memory's tensor: its batch axis, None where all environments share it."""
_OF_MODULES = frozenset(vars(nn.Module()))
_MOST_STEPS = 512  # of a batch that is measured
_DEEPEST = 4  # objects inside one another that are looked into


@dataclass(frozen=True)
class Kept:
    """The memory of ``size`` environments: ``leaves`` in ``tree``, and the batch axis of each that has one."""

    size: int
    leaves: tuple[Any, ...]
    tree: Any
    axes: tuple[int | None, ...]

    def rows(self, index: Sequence[int]) -> Kept:
        """The memory of the environments ``index`` among these."""
        if list(index) == list(range(self.size)):
            return self
        chosen = torch.as_tensor(index)
        leaves = tuple(
            leaf if axis is None else leaf.index_select(axis, chosen.to(leaf.device))
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        )
        return Kept(len(index), leaves, self.tree, self.axes)

    @property
    def key(self) -> tuple[Any, ...]:
        """Memories with equal keys can be joined."""
        return self.tree, tuple(map(_alike, self.leaves, self.axes))

    @staticmethod
    def joined(parts: Sequence[Kept]) -> Kept:
        """One memory of all environments of ``parts``, in their order."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(part.leaves for part in parts), strict=True)
        leaves = tuple(
            column[0] if axis is None else torch.cat(column, axis)
            for column, axis in zip(columns, parts[0].axes, strict=True)
        )
        return Kept(sum(part.size for part in parts), leaves, parts[0].tree, parts[0].axes)

    def packed(self) -> bytes:
        """The memory as bytes; raises ContractError where it holds what is no tensor, number or text."""
        tree = json.loads(pytree.treespec_dumps(self.tree))
        return pack({"tree": tree, "axes": list(self.axes), "leaves": [_packed(leaf) for leaf in self.leaves]})

    @classmethod
    def unpacked(cls, data: bytes, device: torch.device) -> Kept:
        """The memory of one environment, of what :meth:`packed` returned."""
        saved = unpack(data)
        leaves = tuple(_unpacked(leaf, device) for leaf in saved["leaves"])
        return cls(1, leaves, pytree.treespec_loads(json.dumps(saved["tree"])), tuple(saved["axes"]))


def _alike(leaf: Any, axis: int | None) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf if isinstance(leaf, str | int | float | None) else id(leaf)
    shape = tuple(size for i, size in enumerate(leaf.shape) if i != axis)
    return leaf.dtype, axis, shape, () if axis is not None else tuple(leaf.flatten().tolist())


def _packed(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    plain = leaf.detach().cpu().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    numbers = plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain  # which numpy does not have
    return {"dtype": name, "numbers": numbers.numpy()}


def _unpacked(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, dict):
        return leaf
    numbers = torch.from_numpy(leaf["numbers"])
    return (numbers.view(torch.bfloat16) if leaf["dtype"] == "bfloat16" else numbers).to(device)


class Memory:
    """The memory of ``policy``: attributes ``names``, whose tensors have the batch ``axes``."""

    def __init__(self, policy: Any, names: Sequence[str], axes: Axes) -> None:
        self._policy, self._names, self._axes = policy, tuple(names), axes

    def fresh(self, size: int) -> Kept:
        """That of ``size`` environments whose episodes begin."""
        self._policy.reset()
        return self.take(size)

    def put(self, kept: Kept) -> None:
        """Let the policy go on from ``kept``, which stays as it is: a policy changes its queues and sums in place."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in kept.leaves]
        for name, value in pytree.tree_unflatten(leaves, kept.tree).items():
            holder = getattr(self._policy, name)
            if _is_object(holder):
                for attribute, item in value.items():
                    setattr(holder, attribute, item)
            else:
                setattr(self._policy, name, value)

    def take(self, size: int) -> Kept:
        """What the policy keeps now of ``size`` environments; raises ContractError for what was never measured."""
        pairs, tree = pytree.tree_flatten_with_path({name: _opened(self._policy, name) for name in self._names})
        axes = []
        for path, leaf in pairs:
            name = _name(path)
            axis = self._axes.get(name) if isinstance(leaf, Tensor) else None
            unknown = isinstance(leaf, Tensor) and name not in self._axes
            if unknown or (axis is not None and leaf.shape[axis] != size):
                raise ContractError(
                    f"the policy keeps {name} {list(leaf.shape)} for {size} environments, which cannot be told apart "
                    "in it, so nothing was executed; play one environment at a time (num_envs 1)."
                )
            axes.append(axis)
        return Kept(size, tuple(leaf for _, leaf in pairs), tree, tuple(axes))


@dataclass(frozen=True)
class Measured:
    """A policy's memory, and how many actions it chooses at once (``decided``)."""

    memory: Memory
    decided: int


def measure(policy: Any, step: Callable[[int], object]) -> Measured:
    """Play two batches by ``step(size)``, one action of ``size`` environments.

    Raises UserError for a policy that keeps something in its networks, which cannot be taken apart.
    """
    names, decided = _changed(policy, step)
    sizes = [_shapes(policy, names, partial_step(step, size), decided) for size in (2, 3)]
    axes: Axes = {}
    for name, shapes in sizes[0].items():
        pairs = [(small, large) for small, large in zip(shapes, sizes[1].get(name, ()), strict=False)]
        found = {tuple(i for i, (a, b) in enumerate(zip(*pair, strict=True)) if (a, b) == (2, 3)) for pair in pairs}
        axes[name] = next(iter(found))[0] if len(found) == 1 and next(iter(found)) else None
    policy.reset()
    return Measured(Memory(policy, names, axes), decided)


def partial_step(step: Callable[[int], object], size: int) -> Callable[[], object]:
    """``step`` of ``size`` environments."""
    return lambda: step(size)


def _changed(policy: Any, step: Callable[[int], object]) -> tuple[list[str], int]:
    """The attributes that an action changes, and for how many actions its networks compute once."""
    policy.reset()
    step(2)  # whatever is made once, such as tables of positions, is there now
    policy.reset()
    own = _fingerprints(policy)
    decided = 1
    with _counted() as calls:
        step(2)
        while decided < _MOST_STEPS:
            before = calls[0]
            step(2)
            if calls[0] > before:
                break
            decided += 1
    names = [name for name, found in _fingerprints(policy).items() if found != own.get(name)]
    inner = []
    for size in (2, 3):
        policy.reset()
        step(size)
        inner.append(_inner_shapes(policy))
    if changed := [name for name, found in inner[1].items() if found != inner[0].get(name)]:
        raise UserError(
            f"a {type(policy).__name__} keeps {', '.join(changed[:3])} between two actions inside its networks, where "
            "environments cannot be told apart, so it cannot be played here; run it in LeRobot."
        )
    return names, decided


def _shapes(
    policy: Any, names: Sequence[str], step: Callable[[], object], decided: int
) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that every tensor of the memory has over more than one chunk, by its name."""
    policy.reset()
    found: dict[str, list[tuple[int, ...]]] = {}
    for _ in range(decided + 1):
        step()
        pairs, _ = pytree.tree_flatten_with_path({name: _opened(policy, name) for name in names})
        for path, leaf in pairs:
            if isinstance(leaf, Tensor):
                found.setdefault(_name(path), []).append(tuple(leaf.shape))
    return found


def _name(path: Sequence[Any]) -> str:
    """The name of a tensor; those of a queue share one."""
    return ".".join(str(getattr(key, "key", "*")) for key in path)


def _is_object(value: Any) -> bool:
    """Whether ``value`` is a plain object with attributes, such as an ensemble of LeRobot's ACT."""
    plain = (str, bytes, int, float, Tensor, nn.Module, dict, list, tuple, set, deque, torch.device, torch.dtype)
    return (
        value is not None
        and not isinstance(value, (*plain, type))
        and not callable(value)
        and hasattr(value, "__dict__")
    )


def _opened(policy: Any, name: str) -> Any:
    value = getattr(policy, name)
    return dict(vars(value)) if _is_object(value) else value


def _fingerprints(policy: nn.Module) -> dict[str, Any]:
    """What tells whether an attribute of ``policy`` has changed, by its name."""
    return {name: _fingerprint(value) for name, value in vars(policy).items() if name not in _OF_MODULES}


def _inner_shapes(policy: nn.Module) -> dict[str, Any]:
    """The shapes of all tensors that the modules inside hold besides weights: those of a batch grow with it."""
    inner = [(path, module) for path, module in policy.named_modules() if path]
    return {
        f"{path}.{name}": _shapes_in(value)
        for path, module in inner
        for name, value in vars(module).items()
        if name not in _OF_MODULES
    }


def _shapes_in(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if depth > _DEEPEST:
        return ()
    if isinstance(value, Mapping):
        return [_shapes_in(item, depth + 1) for item in value.values()]
    if isinstance(value, list | tuple | deque):
        return [_shapes_in(item, depth + 1) for item in value]
    return _shapes_in(vars(value), depth + 1) if _is_object(value) else ()


def _fingerprint(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, nn.Module) or depth > _DEEPEST:
        return id(value)
    if isinstance(value, Mapping):
        return [(str(key), _fingerprint(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return [_fingerprint(item, depth + 1) for item in value]
    if _is_object(value):
        return id(value), _fingerprint(vars(value), depth + 1)
    return value if isinstance(value, str | int | float | None) else id(value)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """How often a network is called meanwhile, as the one entry of a list."""
    calls = [0]

    def count(module: nn.Module, inputs: Any) -> None:
        calls[0] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


_NORMAL = (torch.randn, torch.randn_like)
_UNIFORM = (torch.rand, torch.rand_like)


class RowNoise(TorchFunctionMode):
    """What is drawn meanwhile for a batch is drawn for each environment from its own generator.

    A draw is for the batch if its first axis is as long.  All others, and samples of other distributions, come from
    torch's global generator, which is seeded as well: they repeat if the same environments are computed together.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seeds[0])
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seeds[0])
        self._seeds, self._own = seeds, list[torch.Generator]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func(*args, **(kwargs or {}))
        if func not in _NORMAL + _UNIFORM or drawn.shape[:1] != (len(self._seeds),):
            return drawn
        self._own = self._own or [torch.Generator().manual_seed(seed) for seed in self._seeds]
        draw = torch.randn if func in _NORMAL else torch.rand
        return drawn.copy_(torch.stack([draw(drawn.shape[1:], generator=own) for own in self._own]))
