"""A small FlowNetwork: one attention layer over the patches and words of an observation, and an MLP expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vla_rl.policies.vla.weights import load_public_weights

WIDTH, CELLS = 8, 4


@dataclass(frozen=True)
class ToyShape:
    chunk: int = 4
    action_size: int = 3
    state_size: int = 5
    words: int = 12

    def build(self) -> ToyNetwork:
        return ToyNetwork(self)


class ToyNetwork(nn.Module):
    pooled_size = hidden_size = WIDTH

    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        self.shape, self.chunk = shape, shape.chunk
        self.action_size, self.state_size = shape.action_size, shape.state_size
        self.eye = nn.Linear(3, WIDTH)
        self.words = nn.Embedding(shape.words, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.state = nn.Linear(shape.state_size, WIDTH)
        self.enter = nn.Linear(shape.action_size + 1, WIDTH)
        self.leave = nn.Linear(WIDTH, shape.action_size)
        self.encoded = 0  # calls of encode

    def encode(self, pictures: Sequence[Tensor | None], tokens: Tensor, token_mask: Tensor | None) -> dict[str, Tensor]:
        self.encoded += 1
        dtype, batch = self.eye.weight.dtype, len(tokens)
        cells = [self.words(tokens)]
        valid = [torch.ones_like(tokens, dtype=torch.bool) if token_mask is None else token_mask]
        for picture in pictures:
            seen = torch.zeros(batch, 2, 2, 3) if picture is None else picture
            pooled = nn.functional.adaptive_avg_pool2d(seen.to(self.words.weight).movedim(-1, 1), 2).flatten(2)
            cells.append(self.eye(pooled.transpose(1, 2).to(dtype) / 255))
            valid.append(torch.full((batch, CELLS), picture is not None))
        keys, mask = torch.tanh(self.mix(torch.cat(cells, 1))), torch.cat(valid, 1)
        pooled = (keys * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"keys": keys, "mask": mask, "pooled": pooled.float()}

    def condition(self, prefix: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        return {"keys": prefix["keys"], "mask": prefix["mask"], "state": self.state(state)}

    def velocity(self, condition: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        condition = repeat_each(condition, len(x) // len(condition["mask"]))
        query = self.enter(torch.cat([x, t[:, None, None].expand(-1, self.chunk, 1)], -1)) + condition["state"][:, None]
        keys = condition["keys"].to(query)
        scores = (query @ keys.transpose(1, 2)).masked_fill(~condition["mask"][:, None], -1e9)
        hidden = torch.tanh(query + scores.softmax(-1) @ keys)
        return self.leave(hidden), hidden

    def denoised(self, horizon: int) -> int:
        return self.chunk

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        frozen = ("eye.", "words.", "mix.")
        return {name: item for name, item in self.named_parameters() if not name.startswith(frozen)}

    def load_public(self, folder: Path) -> None:
        load_public_weights(self, folder, lambda name: name.removeprefix("model."), dtype=None)

    def prefix_bytes(self, cameras: Sequence[str | None], tokens: int) -> int:
        cells = len(cameras) * CELLS + tokens  # those of missing ones are masked
        return cells * (WIDTH * self.eye.weight.element_size() + 1)


def repeat_each(condition: Mapping[str, Tensor], times: int) -> Mapping[str, Tensor]:
    """[B,...] with every sample ``times`` times in a row: for a network that cannot share what its points read."""
    return condition if times == 1 else {name: item.repeat_interleave(times, 0) for name, item in condition.items()}
