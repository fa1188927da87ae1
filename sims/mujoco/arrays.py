"""What the rules of tasks need to run on numpy arrays and on torch tensors alike.

Rules are functions of the array API standard (data-apis.org), whose functions ``array_namespace(array)`` has for both
libraries.  A simulator on a GPU then applies the same rules as one on the processor, without a copy to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, to_device

from vla_rl.contract.env import Array


class Constant:
    """A fixed array for use beside numpy arrays and tensors of any device; it is moved to each device once."""

    def __init__(self, value: Any, dtype: Any = None) -> None:
        self.value = np.asarray(value, dtype)
        self._moved: dict[str, Array] = {}

    def beside(self, array: Array) -> Array:
        """The constant as an array of the library and on the device of ``array``."""
        if isinstance(array, np.ndarray):
            return self.value
        place = str(device(array))
        if place not in self._moved:
            self._moved[place] = to_device(array_namespace(array).asarray(self.value), device(array))
        return self._moved[place]


def count(size: int, array: Array) -> Array:
    """int64 [size]: 0, 1, ... beside ``array``."""
    return array_namespace(array).arange(size, device=device(array))


def pick(array: Array, index: Array) -> Array:
    """[R,...]: the entry ``index[r]`` of every row of ``array`` [R,n,...]; ``index`` is of any integer type."""
    xp = array_namespace(array)
    return array[count(array.shape[0], array), xp.astype(index, xp.int64)]


def first_case(cases: Sequence[tuple[Array, int]]) -> Array:
    """int8 [R]: the number of the first case (bool [R], number) that holds, -1 where none does."""
    xp = array_namespace(cases[0][0])
    found = xp.full(cases[0][0].shape, -1, dtype=xp.int8, device=device(cases[0][0]))
    for condition, number in reversed(cases):
        # Filled there: a number that comes from the host makes it wait for the device.
        found = xp.where(condition, xp.full((), number, dtype=xp.int8, device=device(condition)), found)
    return found


def cases_of(which: Array, values: Sequence[Array]) -> Array:
    """[R,...]: row ``r`` of ``values[which[r]]``, for ``values`` of one shape [R,...] and type."""
    xp = array_namespace(which)
    found = values[0]
    for number, value in enumerate(values[1:], start=1):
        chosen = xp.reshape(which == number, (-1, *(1,) * (value.ndim - 1)))
        found = xp.where(chosen, value, found)
    return found
