"""What usually explains that two evaluators' numbers differ: flipped pictures, reordered or rescaled entries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_PICTURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "theirs is upside down": lambda image: image[:, ::-1],
    "theirs is mirrored": lambda image: image[:, :, ::-1],
    "theirs is rotated by 180 degrees": lambda image: image[:, ::-1, ::-1],
    "theirs is BGR": lambda image: image[..., ::-1],
}
_CLOSE = 0.1  # of the unexplained difference may remain
_FIT = 1e-3  # residual of a fit, of the spread of the entry


def explain(ours: np.ndarray, theirs: np.ndarray) -> str:
    """A sentence for ``theirs`` as a transformation of ``ours``, both [T,...] and of one shape; "" for none."""
    for side, name in ((ours, "ours"), (theirs, "theirs")):
        if not np.isfinite(side).all():
            return f"{name} has numbers that are not finite"
    if ours.ndim == 4 and ours.shape[-1] == 3:
        return _pictures(ours.astype(float), theirs.astype(float))
    size = ours.shape[-1] if ours.ndim > 1 else 1
    return _vectors(ours.reshape(-1, size).astype(float), theirs.reshape(-1, size).astype(float))


def _pictures(ours: np.ndarray, theirs: np.ndarray) -> str:
    before = np.abs(ours - theirs).mean()
    for what, change in _PICTURES.items():
        if np.abs(change(ours) - theirs).mean() < _CLOSE * before:
            return what
    return ""


def _vectors(ours: np.ndarray, theirs: np.ndarray) -> str:
    """The entries that are another entry, or a linear function, of ours."""
    order = _order(ours, theirs)
    if order is not None:
        return f"theirs has our entries in the order {order}"
    found = [_linear(ours[:, i], theirs[:, i]) for i in range(ours.shape[1])]
    said = [f"entry {i} of theirs is {text}" for i, text in enumerate(found) if text]
    return ", ".join(said)


def _order(ours: np.ndarray, theirs: np.ndarray) -> list[int] | None:
    """Which of our entries each of theirs is, if each is exactly one and not all are in place."""
    spread = np.abs(ours).max(0) + 1e-9
    same = [
        [bool((np.abs(theirs[:, j] - ours[:, i]) <= _FIT * spread[i]).all()) for i in range(ours.shape[1])]
        for j in range(ours.shape[1])
    ]
    order = [row.index(True) if sum(row) == 1 else -1 for row in same]
    return order if sorted(order) == list(range(len(order))) and order != sorted(order) else None


def _linear(ours: np.ndarray, theirs: np.ndarray) -> str:
    """``ours * a + b`` where that is what ``theirs`` is; "" where they are equal or unrelated."""
    spread = float(ours.std())
    if np.abs(ours - theirs).max() <= _FIT * max(spread, 1e-6):
        return ""
    if len(ours) < 3 or spread < 1e-9:
        return ""
    factor, offset = np.polyfit(ours, theirs, 1)
    scale = max(abs(factor) * spread, 1e-9)
    if np.abs(factor * ours + offset - theirs).max() > 10 * _FIT * scale:
        return ""
    shift = f" {offset:+.4g}" if abs(offset) > _FIT * scale else ""
    return f"ours * {factor:.4g}{shift}"
