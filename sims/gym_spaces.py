"""Gymnasium's spaces in the contract's terms: observations as images and one vector, actions as one vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from vla_rl.contract.env import ArraySpec, on_host
from vla_rl.contract.errors import ContractError, UserError

Path: TypeAlias = tuple[str | int, ...]  # keys of nested Dict and Tuple spaces
_SMALLEST_GREY = 8  # pixels; a smaller uint8 matrix is a board, not a picture


@dataclass(frozen=True)
class Leaf:
    """A space without parts, and where it is in the whole."""

    path: Path
    space: Space[Any]
    owner: str = ""  # the environment's name, for errors

    @property
    def name(self) -> str:
        """``"arm/wrist"`` of nested dicts; "" for a space that has no parts at all."""
        return "/".join(map(str, self.path))

    @cached_property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.space.shape or ())

    def of(self, whole: Any) -> Any:
        """The value of this leaf in ``whole``, as an array; raises ContractError for one that it does not have."""
        try:
            for key in self.path:
                whole = whole[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ContractError(
                f"an observation of {self.owner!r} has no part {self.name!r}, which its space declares, so it cannot "
                "be read; correct the space or the environment."
            ) from error
        value = on_host(whole)
        if value.dtype.kind not in "biuf" or value.size != self.size:
            raise self.misread("observation", f"{value.dtype}{list(value.shape)}")
        return value

    def misread(self, what: str, found: str) -> ContractError:
        """The sentence about a value ``found`` that is not of this space."""
        return ContractError(
            f"the {what}{_called(self)} of {self.owner!r} is {found} but {short(self.space)} is declared, so it would "
            "be misread; correct the space or the environment."
        )


def leaves(space: Space[Any], path: Path = (), owner: str = "") -> Iterator[Leaf]:
    """The parts of nested Dict and Tuple spaces, in Gymnasium's order."""
    if isinstance(space, Dict):
        for key, part in space.spaces.items():
            yield from leaves(part, (*path, key), owner)
    elif isinstance(space, Tuple):
        for i, part in enumerate(space.spaces):
            yield from leaves(part, (*path, i), owner)
    else:
        yield Leaf(path, space, owner)


def short(space: Space[Any]) -> str:
    """``space`` in a sentence: its kind, dtype and shape, without the bounds of every entry."""
    if isinstance(space, Dict):
        return f"Dict({', '.join(f'{key}: {short(part)}' for key, part in space.spaces.items())})"
    if isinstance(space, Tuple):
        return f"Tuple({', '.join(map(short, space.spaces))})"
    if isinstance(space, Box):
        return f"a Box of {space.dtype}{list(space.shape)}"
    return str(space)[:100]


class ObservationReader:
    """Takes observations of ``space`` apart.

    Images: uint8 with three axes, channels last (or first, where the first axis is the shorter one), and uint8
    matrices of at least 8 pixels a side, which get a channel axis.  Everything else is in one vector, part after part:
    numbers as they are, an index (Discrete, each entry of MultiDiscrete) as a one-hot vector, bits as 0 and 1.
    Raises UserError for other spaces, such as texts and graphs.
    """

    def __init__(self, owner: str, space: Space[Any]) -> None:
        """``owner`` is the environment's name, for errors."""
        found = list(leaves(space, owner=owner))
        self._images = {leaf.name or "image": leaf for leaf in found if _is_image(leaf.space)}
        self._vectors = [(leaf, _vector(owner, leaf)) for leaf in found if not _is_image(leaf.space)]
        self.image_specs = {name: _image_spec(name, leaf.space) for name, leaf in self._images.items()}
        bounds = [(part.low, part.high) for _, part in self._vectors] or [(np.zeros(0), np.zeros(0))]
        self.low, self.high = (np.concatenate(ends) for ends in zip(*bounds, strict=True))
        self._places = _places([part for _, part in self._vectors])

    def vectors(self, observations: Sequence[Any]) -> np.ndarray:
        """float32 [R,N] of ``R`` observations: everything but the images."""
        found = np.zeros((len(observations), len(self.low)), np.float32)
        for (leaf, part), place in zip(self._vectors if len(observations) else (), self._places, strict=False):
            found[:, place] = [part.encode(leaf.of(obs)) for obs in observations]
        return found

    def images(self, obs: Any) -> dict[str, np.ndarray]:
        """{camera: uint8 [h,w,c]}."""
        return {name: _channels_last(_image(leaf, leaf.of(obs))) for name, leaf in self._images.items()}

    def entries(self, name: str, chosen: str | Sequence[int]) -> list[int]:
        """The entries of the vector that ``chosen`` names: numbers, or a part of a Dict observation.

        Raises UserError, which calls them ``name``, when there is no such part or entry.
        """
        parts, start = {}, 0
        for leaf, part in self._vectors:
            parts[leaf.name] = list(range(start, start + len(part.low)))
            start += len(part.low)
        if isinstance(chosen, str):
            if chosen not in parts:
                raise UserError(
                    f"privileged {name!r} is {chosen!r}, which is no part of the observation, so it cannot be set "
                    f"apart; choose from {sorted(parts)} or give numbers of entries."
                )
            return parts[chosen]
        entries = [int(entry) for entry in chosen]
        if not entries or len(set(entries)) < len(entries) or not all(0 <= entry < start for entry in entries):
            raise UserError(
                f"privileged {name!r} names the entries {entries} of an observation that has {start}, so they cannot "
                f"be set apart; give different ones from 0 to {start - 1}."
            )
        return entries


class ActionWriter:
    """Makes actions of ``space`` from the contract's vectors.

    ``spec``: float32 for numbers, int64 for indices (Discrete, MultiDiscrete, MultiBinary, a Box of integers).  Dict
    and Tuple spaces whose parts are all numbers, or all indices, are one vector.  Raises UserError for parts of both
    kinds, numbers without bounds and other spaces.
    """

    def __init__(self, owner: str, space: Space[Any], bounds: Sequence[float] | None = None) -> None:
        """``owner`` is the environment's name, for errors; ``bounds`` (low, high) hold where the space has none."""
        self._space = space
        self._leaves = [(leaf, _action_part(owner, leaf, bounds)) for leaf in leaves(space)]
        kinds = {part.dtype for _, part in self._leaves}
        if len(kinds) > 1:
            raise UserError(
                f"the actions of {owner!r} are {short(space)}: numbers and indices at once, which no policy chooses; "
                "wrap it so that all parts are of one kind (gymnasium.ActionWrapper)."
            )
        low = np.concatenate([part.low for _, part in self._leaves])
        high = np.concatenate([part.high for _, part in self._leaves])
        self.spec = ArraySpec(low.shape, kinds.pop(), tuple(low.tolist()), tuple(high.tolist()))
        self._places = _places([part for _, part in self._leaves])

    def __call__(self, action: np.ndarray) -> list[Any]:
        """The actions of the space for ``action`` [R,D]."""
        if isinstance(self._space, Box) and self._space.shape:  # all at once, which costs a tenth
            return list(action.reshape(len(action), *self._space.shape).astype(self._space.dtype))
        return [self._assemble(self._space, (row[place] for place in self._places)) for row in action]

    def _assemble(self, space: Space[Any], values: Iterator[np.ndarray]) -> Any:
        if isinstance(space, Dict):
            return {key: self._assemble(part, values) for key, part in space.spaces.items()}
        if isinstance(space, Tuple):
            return tuple(self._assemble(part, values) for part in space.spaces)
        shaped: np.ndarray = next(values).reshape(space.shape).astype(space.dtype)
        return shaped[()] if isinstance(space, Discrete) else shaped


def _places(parts: Sequence[_Part]) -> list[slice]:
    """Where each of ``parts`` is in a vector of all."""
    ends = accumulate((len(part.low) for part in parts), initial=0)
    return [slice(*pair) for pair in pairwise(ends)]


@dataclass(frozen=True)
class _Part:
    """A leaf as a vector: inclusive bounds [n], dtype in the contract, and how a value becomes one."""

    low: np.ndarray
    high: np.ndarray
    dtype: str
    encode: Callable[[Any], np.ndarray] = np.ndarray.ravel


def _vector(owner: str, leaf: Leaf) -> _Part:
    space = leaf.space
    if isinstance(space, Box):
        return _Part(space.low.ravel().astype(float), space.high.ravel().astype(float), "float32")
    if isinstance(space, MultiBinary):
        size = int(np.prod(space.shape))
        return _Part(np.zeros(size), np.ones(size), "float32")
    if isinstance(space, Discrete | MultiDiscrete):
        start, counts = _indices(space)
        size = int(counts.sum())
        return _Part(np.zeros(size), np.ones(size), "float32", lambda value: _one_hot(leaf, value, start, counts))
    raise UserError(
        f"the observation{_called(leaf)} of {owner!r} is {short(space)}: neither numbers, nor indices, nor an image, "
        "so no policy could read it; leave it out by a wrapper (gymnasium.wrappers:FilterObservation)."
    )


def _action_part(owner: str, leaf: Leaf, bounds: Sequence[float] | None) -> _Part:
    space = leaf.space
    if isinstance(space, Discrete | MultiDiscrete):
        start, counts = _indices(space)
        return _Part(start, start + counts - 1, "int64")
    if isinstance(space, MultiBinary):
        size = int(np.prod(space.shape))
        return _Part(np.zeros(size, np.int64), np.ones(size, np.int64), "int64")
    if not isinstance(space, Box):
        raise UserError(
            f"the action{_called(leaf)} of {owner!r} is {short(space)}: neither numbers nor indices, so no policy "
            "could choose it; change it by a wrapper (gymnasium.ActionWrapper)."
        )
    whole = np.issubdtype(space.dtype, np.integer)
    low, high = (bound.ravel().astype(np.int64 if whole else float) for bound in (space.low, space.high))
    endless = _endless(low) | _endless(high)
    if endless.any():
        if bounds is None:
            raise UserError(
                f"the actions of {owner!r} have no bounds, so none would be safe; say between which numbers they are "
                "to be chosen by the option action_bounds (--env.options "
                f'\'{{"id": ..., "action_bounds": [-1, 1]}}\').'
            )
        low, high = np.where(_endless(low), bounds[0], low), np.where(_endless(high), bounds[1], high)
        if not (low < high).all():
            raise UserError(
                f"action_bounds {list(bounds)} leave no actions of {owner!r} to choose from; give [low, high]."
            )
    return _Part(low, high, "int64" if whole else "float32")


def _endless(bound: np.ndarray) -> np.ndarray:
    """bool like ``bound``: where there is none, which many say by the largest number of their dtype."""
    return np.abs(bound) >= (np.iinfo(np.int32).max if bound.dtype.kind == "i" else 1e30)


def _indices(space: Discrete | MultiDiscrete) -> tuple[np.ndarray, np.ndarray]:
    """First value and number of values of every index, both int64 [n]."""
    counts = space.n if isinstance(space, Discrete) else space.nvec
    return np.ravel(np.int64(space.start)), np.ravel(np.int64(counts))


def _one_hot(leaf: Leaf, value: np.ndarray, start: np.ndarray, counts: np.ndarray) -> np.ndarray:
    index = np.ravel(value) - start
    if not ((index >= 0) & (index < counts) & (index == np.rint(index))).all():
        raise leaf.misread("observation", str(np.ravel(value).tolist()))
    hot = np.zeros(int(counts.sum()), np.float32)
    hot[np.cumsum(counts) - counts + index.astype(int)] = 1
    return hot


def _is_image(space: Space[Any]) -> bool:
    if not isinstance(space, Box) or space.dtype != np.uint8:
        return False
    return len(space.shape) == 3 or (len(space.shape) == 2 and min(space.shape) >= _SMALLEST_GREY)


def _image(leaf: Leaf, value: np.ndarray) -> np.ndarray:
    """``value``; raises ContractError unless it is uint8 of the declared shape: others would be shown dark or torn."""
    if value.dtype != np.uint8 or value.shape != leaf.space.shape:
        raise leaf.misread("picture", f"{value.dtype}{list(value.shape)}")
    return value


def _channels_last(image: np.ndarray) -> np.ndarray:
    if image.ndim == 2:
        return image[..., None]
    return image if image.shape[2] <= image.shape[0] else np.moveaxis(image, 0, 2)


def _image_spec(name: str, space: Space[Any]) -> ArraySpec:
    shape = _channels_last(np.zeros(space.shape or (), np.uint8)).shape
    return ArraySpec(shape, "uint8", 0, 255, unit="RGB" if shape[2] == 3 else "", frame=name)


def _called(leaf: Leaf) -> str:
    return f" {leaf.name!r}" if leaf.path else ""


def spec_of_entries(reader: ObservationReader, entries: Sequence[int] | np.ndarray) -> ArraySpec:
    """Declared bounds of ``entries``; where they are infinite, a policy has to normalize by statistics of data."""
    low, high = (tuple(bound[list(entries)].tolist()) for bound in (reader.low, reader.high))
    return ArraySpec((len(entries),), "float32", low, high)


Privileged: TypeAlias = Mapping[str, str | Sequence[int]]
"""{name: a part of a Dict observation, or entries of the vector}."""
