"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): a large network learns through a few small matrices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class Lora:
    """Which linear layers get a correction of which rank."""

    rank: int = 16
    scale: float = 1.0  # what the correction is multiplied by: the paper's alpha / rank
    layers: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")  # ends of names

    def adapt(self, network: nn.Module) -> None:
        """Freeze ``network`` and correct its layers, which changes nothing until the corrections have learnt.

        Raises UserError when no layer has such a name, or for a rank below 1.
        """
        found = [
            name
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear) and f".{name}".endswith(tuple(f".{end}" for end in self.layers))
        ]
        if not found or self.rank < 1:
            raise UserError(
                f"corrections of rank {self.rank} of layers named {', '.join(self.layers) or '(none)'} leave nothing "
                "to train; give a rank of at least 1 and the ends of names of linear layers."
            )
        network.requires_grad_(False)
        for name in found:
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, LoraLinear(network.get_submodule(name), self))


class LoraLinear(nn.Module):
    """``W x + b + scale * B A x`` with ``A`` [rank, in] and ``B`` [out, rank]; ``B`` is zero at first."""

    def __init__(self, linear: nn.Module, config: Lora) -> None:
        """``linear``: an ``nn.Linear``, which stays as it is."""
        super().__init__()
        assert isinstance(linear, nn.Linear)
        self.linear, self.scale = linear, config.scale
        self.down = nn.Linear(linear.in_features, config.rank, bias=False)
        self.up = nn.Linear(config.rank, linear.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + self.scale * self.up(self.down(x))
        return out
