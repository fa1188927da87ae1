"""No seed serves two purposes."""

from __future__ import annotations

import itertools

from vla_rl.evaluation.seed_ranges import TEST, TRAIN, VALIDATION, held_out, training_seeds

PURPOSES = ("demonstrations", "grounding", "reinforcement", "rewards")


def disjoint(ranges):
    ordered = sorted(ranges, key=lambda part: part.start)
    return all(len(part) > 0 for part in ordered) and all(
        one.stop <= other.start for one, other in itertools.pairwise(ordered)
    )


def test_the_three_ranges_are_disjoint():
    assert disjoint([TRAIN, VALIDATION, TEST])


def test_every_run_and_purpose_has_training_seeds_of_its_own():
    blocks = [training_seeds(run, purpose) for run in range(100) for purpose in PURPOSES]
    assert disjoint(blocks) and min(len(block) for block in blocks) >= 1_000_000
    assert all(block.start in TRAIN and block[-1] in TRAIN for block in blocks)


def test_held_out_seeds_come_in_order_and_can_be_offset():
    assert held_out(TEST, 3) == [1_100_000_000, 1_100_000_001, 1_100_000_002]
    assert held_out(VALIDATION, 2, offset=5) == [1_000_000_005, 1_000_000_006]
