"""Random numbers for the episodes of many seeds at once.

An episode depends on its seed alone, not on the batch that it is drawn in: row ``r`` draws what numpy's
``Generator(PCG64(seeds[r]))`` draws, bit for bit.  Making 4,096 of those and drawing a scene from each takes half a
second; so the rows of many seeds do it by the same few operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

_MANY = 64  # rows from which on together is faster than one by one
_LOW = np.uint64(0xFFFFFFFF)
_HALF, _ONE = np.uint64(32), np.uint64(1)
_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645  # of the 128-bit generator
_HIGH_MULTIPLIER, _LOW_MULTIPLIER = np.uint64(_MULTIPLIER >> 64), np.uint64(_MULTIPLIER & (2**64 - 1))
_FACTORS = _LOW_MULTIPLIER & _LOW, _LOW_MULTIPLIER >> _HALF  # the halves of the lower half


class Generators:
    """``R`` generators of numpy.  ``generators[rows]`` are some of them: what these draw, the whole has drawn."""

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self._generators = generators

    @staticmethod
    def of_seeds(seeds: np.ndarray) -> Generators:
        """``Generator(PCG64(seed))`` of each of ``seeds`` [R], at least one."""
        if len(seeds) >= _MANY:
            return _Together(seeds)
        return Generators([np.random.Generator(np.random.PCG64(seed)) for seed in seeds.tolist()])

    def __len__(self) -> int:
        return len(self._generators)

    def __getitem__(self, rows: np.ndarray) -> Self:
        return type(self)([self._generators[row] for row in rows.tolist()])

    def uniform(self, low: float | np.ndarray, high: float | np.ndarray, shape: tuple[int, ...] = ()) -> np.ndarray:
        """float64 [R,*shape] of at least ``low`` and less than ``high``, which have that shape or less."""
        return np.array([generator.uniform(low, high, shape) for generator in self._generators])

    def integers(self, low: int, high: int) -> np.ndarray:
        """int64 [R] of at least ``low`` and less than ``high``."""
        return np.array([generator.integers(low, high) for generator in self._generators])

    def permutation(self, size: int) -> np.ndarray:
        """int64 [R,size]: 0 to ``size`` - 1 in random order."""
        return np.array([generator.permutation(size) for generator in self._generators])

    def until(self, good: Callable[[np.ndarray], np.ndarray], draw: Callable[[Self], np.ndarray]) -> np.ndarray:
        """[R,...]: what ``draw`` of these generators returns, drawn again in rows that are not ``good`` (bool [R])."""
        found = draw(self)
        left = np.flatnonzero(~good(found))
        while left.size:
            found[left] = again = draw(self[left])
            left = left[~good(again)]
        return found


class _Together(Generators):
    """Those of many seeds: every operation is one of numpy on all rows.

    The formulas are O'Neill's PCG XSL-RR 128/64 and ``seed_seq`` (2014 and 2015), and Lemire's bounded integers (2019).
    """

    def __init__(self, seeds: np.ndarray) -> None:
        high, low, self._high_step, self._low_step = _states(seeds.astype(np.uint64))
        state = self._stepped(np.zeros_like(high), np.zeros_like(low), np.arange(len(high)))
        self._high, self._low = _sum(*state, high, low)
        self._rows = np.arange(len(high))
        self._half = np.zeros(len(high), np.uint64)  # of a drawn number, whose other half was used
        self._has_half = np.zeros(len(high), bool)
        self._next()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: np.ndarray) -> Self:
        some = object.__new__(type(self))
        some.__dict__.update(self.__dict__, _rows=self._rows[rows])
        return some

    def uniform(self, low: float | np.ndarray, high: float | np.ndarray, shape: tuple[int, ...] = ()) -> np.ndarray:
        drawn = [self._next() >> np.uint64(11) for _ in range(int(np.prod(shape, dtype=int)))]
        unit = np.stack(drawn, axis=1) * 2.0**-53 if drawn else np.zeros((len(self), 0))
        return low + (np.asarray(high) - low) * unit.reshape(len(self), *shape)

    def integers(self, low: int, high: int) -> np.ndarray:
        count = high - low  # some products stand for more numbers than others: those of a lower half below ``odd``
        if count == 1:
            return np.full(len(self), low)
        odd = np.uint64(2**32 % count)
        scaled = self.until(lambda found: (found & _LOW) >= odd, lambda rows: rows._next_half() * np.uint64(count))
        return low + (scaled >> _HALF).astype(np.int64)

    def permutation(self, size: int) -> np.ndarray:
        order, rows = np.tile(np.arange(size), (len(self), 1)), np.arange(len(self))
        for last in range(size - 1, 0, -1):
            other = self._at_most(last)
            order[rows, other], order[:, last] = order[:, last].copy(), order[rows, other]
        return order

    def _at_most(self, most: int) -> np.ndarray:
        """int64 [R] of at most ``most``: of as many bits as that has, drawn again where they are more."""
        mask = np.uint64(2 ** most.bit_length() - 1)
        return self.until(lambda found: found <= most, lambda rows: (rows._next_half() & mask).astype(np.int64))

    def _next_half(self) -> np.ndarray:
        """uint64 [R] of 32 random bits: the lower half of a new number, then its upper half."""
        rows, second = self._rows, self._has_half[self._rows]
        found = self._half[rows]
        if not second.all():
            first = np.flatnonzero(~second)
            new = self[first]._next()
            found[first], self._half[rows[first]] = new & _LOW, new >> _HALF
        self._has_half[rows] = ~second
        return found

    def _next(self) -> np.ndarray:
        """uint64 [R] of 64 random bits."""
        rows = self._rows
        high, low = self._stepped(self._high[rows], self._low[rows], rows)
        self._high[rows], self._low[rows] = high, low
        turn, mixed = high >> np.uint64(58), high ^ low
        return (mixed >> turn) | (mixed << ((np.uint64(64) - turn) & np.uint64(63)))

    def _stepped(self, high: np.ndarray, low: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states after ``high`` and ``low`` [R]: times the multiplier, plus the rows' own step, modulo 2^128."""
        lower, upper = low & _LOW, low >> _HALF
        middle = upper * _FACTORS[0] + ((lower * _FACTORS[0]) >> _HALF)
        carried = (lower * _FACTORS[1] + (middle & _LOW)) >> _HALF
        above = upper * _FACTORS[1] + (middle >> _HALF) + carried + high * _LOW_MULTIPLIER + low * _HIGH_MULTIPLIER
        return _sum(above, low * _LOW_MULTIPLIER, self._high_step[rows], self._low_step[rows])


def _sum(
    high: np.ndarray, low: np.ndarray, more_high: np.ndarray, more_low: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of numbers of 128 bits, in two halves."""
    total = low + more_low
    return high + more_high + (total < low), total


# -- from a seed to the state of its generator -------------------------------------------------------------------------

_POOL = 4  # numbers of 32 bits


def _states(seeds: np.ndarray) -> tuple[np.ndarray, ...]:
    """uint64 [R] each, for the generators of ``seeds``: halves of what is added to the first state, of the step."""
    words = ((seeds & _LOW).astype(np.uint32), (seeds >> _HALF).astype(np.uint32))
    scramble = _Scramble(0x43B0D7E5, 0x931E8875)
    pool = [scramble(word) for word in (*words, *(np.zeros_like(words[0]),) * (_POOL - len(words)))]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _folded(
                    pool[target] * np.uint32(0xCA01F9DD) - scramble(pool[source]) * np.uint32(0x4973F715)
                )
    scramble = _Scramble(0x8B51F9DD, 0x58F38DED)
    out = [scramble(pool[number % _POOL]).astype(np.uint64) for number in range(2 * _POOL)]
    high, low, high_step, low_step = (out[number] | (out[number + 1] << _HALF) for number in range(0, 2 * _POOL, 2))
    return high, low, (high_step << _ONE) | (low_step >> np.uint64(63)), (low_step << _ONE) | _ONE


class _Scramble:
    """A hash of 32 bits that differs from call to call."""

    def __init__(self, constant: int, factor: int) -> None:
        self._constant, self._factor = constant, factor

    def __call__(self, word: np.ndarray) -> np.ndarray:
        before, self._constant = self._constant, self._constant * self._factor % 2**32
        return _folded((word ^ np.uint32(before)) * np.uint32(self._constant))


def _folded(word: np.ndarray) -> np.ndarray:
    return word ^ (word >> np.uint32(16))
