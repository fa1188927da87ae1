"""Draws of policies: a seed means the same on every device and precision, and an environment's noise is its own."""

from __future__ import annotations

import pytest
import torch

from tests.elsewhere import elsewhere
from tests.toys import seeded
from vla_rl.contract.errors import ContractError
from vla_rl.policies.noise import generators_of, integers, normal, uniform


def test_one_generator_draws_as_torch_does():
    like = torch.zeros(1)
    assert torch.equal(normal((4, 3), seeded(), like), torch.randn(4, 3, generator=seeded()))
    assert torch.equal(uniform((4, 3), seeded(), like), torch.rand(4, 3, generator=seeded()))
    assert torch.equal(integers(9, (4, 3), seeded()), torch.randint(9, (4, 3), generator=seeded()))
    double = normal((4, 3), seeded(), like.double())
    assert torch.equal(double, torch.randn(4, 3, generator=seeded(), dtype=torch.float64))


def test_half_precision_rounds_the_noise_of_single_precision():
    for dtype in (torch.bfloat16, torch.float16):
        drawn = normal((64,), seeded(), torch.zeros(1, dtype=dtype))
        assert drawn.dtype == dtype and torch.equal(drawn, normal((64,), seeded(), torch.zeros(1)).to(dtype))


def test_a_seed_draws_the_same_on_another_device():
    with elsewhere() as device:
        drawn = normal((4, 3), seeded(), torch.zeros(1, device=device))
        assert drawn.device == device
        assert torch.equal(drawn.cpu(), normal((4, 3), seeded(), torch.zeros(1)))


def test_the_noise_of_a_row_does_not_depend_on_its_neighbours():
    def drawn(*seeds: int) -> list[list[float]]:
        generators = [seeded(seed) for seed in seeds]
        drawn = [normal((len(seeds), 5), generators, torch.zeros(1)) for _ in range(2)]
        choice = integers(1000, (len(seeds), 1), generators)
        return torch.cat([*drawn, uniform((len(seeds), 2), generators, torch.zeros(1)), choice], 1).tolist()

    together = drawn(3, 1, 2)
    assert together == [drawn(seed)[0] for seed in (3, 1, 2)] == drawn(2, 3, 1)[1:] + drawn(2)
    assert together[0] != together[1]


def test_some_rows_keep_their_generators():
    generators = [seeded(i) for i in range(4)]
    assert generators_of(generators, torch.tensor([2, 0])) == [generators[2], generators[0]]
    assert generators_of(generators[0], torch.tensor([2, 0])) is generators[0]


def test_generators_that_do_not_fit_the_batch_are_refused():
    with pytest.raises(ContractError, match="2 generators were given for a batch of 3"):
        normal((3, 2), [seeded(), seeded(1)], torch.zeros(1))
