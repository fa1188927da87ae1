"""Three disjoint ranges of seeds (training, validation, test), and in the first one a block per training run."""

from __future__ import annotations

from vla_rl.contract.errors import UserError

TRAIN = range(0, 1_000_000_000)
VALIDATION = range(1_000_000_000, 1_100_000_000)  # all selection, early stops and roll-backs
TEST = range(1_100_000_000, 1_200_000_000)  # once per reported number
MOST = 1_000_000  # episodes of one evaluation; their seeds are held in memory

_BLOCK = 10_000_000  # training seeds of one run
_PURPOSES = {
    "demonstrations": 0,
    "grounding": 1_000_000,
    "reinforcement": 2_000_000,
    "world_model": 8_000_000,
    "rewards": 9_000_000,
}


def training_seeds(run_seed: int, purpose: str) -> range:
    """The training seeds of run ``run_seed`` (0 to 99) for one of the purposes above."""
    if not 0 <= run_seed < len(TRAIN) // _BLOCK:
        raise UserError(
            f"seed {run_seed} is outside 0..{len(TRAIN) // _BLOCK - 1}, so its training seeds would run into the "
            "validation seeds; choose one inside."
        )
    start = run_seed * _BLOCK + _PURPOSES[purpose]
    ends = [run_seed * _BLOCK + offset for offset in [*_PURPOSES.values(), _BLOCK]]
    return range(start, min(end for end in ends if end > start))


def held_out(seeds: range, count: int, offset: int = 0) -> list[int]:
    """``count`` seeds of a held-out range."""
    return list(seeds[offset : offset + count])
