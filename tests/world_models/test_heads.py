"""The outcome head reads instructions by their words: what it learnt holds for others made of the same words."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from world_models.heads import InstructionParts, OutcomeHead

COLOURS = ("red", "green", "blue")
TEXTS = tuple(f"put the {cube} cube on the {plate} plate" for cube in COLOURS for plate in COLOURS)
SIDES, WIDTH = (3, 3), 16


def test_instructions_share_their_words_and_pairs_and_nothing_else() -> None:
    parts = InstructionParts(("lift the red cube", "lift the blue cube", ""))
    names = ("", "blue", "blue cube", "cube", "lift", "lift the", "red", "red cube", "the", "the blue", "the red")
    assert parts.names == names
    found = parts(torch.tensor([0, 1, 2]))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))
    assert [name for name, entry in zip(names, found[0].tolist(), strict=True) if entry] == [
        name for name in names if "blue" not in name
    ]
    assert found[2].tolist() == [1.0] + [0.0] * 10
    torch.testing.assert_close(found[0] @ found[1], torch.tensor(5 / 8))


def scenes(count: int, tasks: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Cells [count,9,16] with two cubes and two plates, instructions [count], and whether those named are together."""
    task = tasks[torch.randint(len(tasks), (count,), generator=generator)]
    cube, plate = task // 3, task % 3
    cells = torch.zeros(count, 9, WIDTH)
    row, places = torch.arange(count), torch.rand(count, 9, generator=generator).argsort(1)
    together = torch.rand(count, generator=generator) < 0.5
    others = [(one + 1 + torch.randint(2, (count,), generator=generator)) % 3 for one in (cube, plate)]
    cells[row, places[:, 0], cube] = 3.0
    cells[row, torch.where(together, places[:, 0], places[:, 1]), 3 + plate] = 3.0
    cells[row, places[:, 2], others[0]] = 3.0  # the other cube is on the other plate in half of them
    apart = torch.rand(count, generator=generator) < 0.5
    cells[row, torch.where(apart, places[:, 3], places[:, 2]), 3 + others[1]] = 3.0
    return cells, task, together.float()


def test_an_outcome_is_judged_under_an_instruction_that_was_never_given() -> None:
    """A cube of each colour and a plate of each were named, but never the red cube and the blue plate together."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    head = OutcomeHead(WIDTH, SIDES, 1, TEXTS, frames=1)
    never = TEXTS.index("put the red cube on the blue plate")
    given = torch.tensor([task for task in range(len(TEXTS)) if task != never])
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)

    def logits(cells: Tensor, task: Tensor) -> Tensor:
        found: Tensor = head(cells, torch.zeros(len(task), 1), task, torch.zeros_like(task))[:, 0]
        return found

    for _ in range(300):
        cells, task, together = scenes(256, given, generator)
        loss = nn.functional.binary_cross_entropy_with_logits(logits(cells, task), together)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for tasks, least in ((given, 0.95), (torch.tensor([never]), 0.8)):  # a table of the tasks has .57 to .69 there
            cells, task, together = scenes(1000, tasks, generator)
            assert ((logits(cells, task) > 0) == (together > 0.5)).float().mean() > least
