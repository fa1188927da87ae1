"""What every learner has: weights, an optimizer, a generator of random numbers, and the state of all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vla_rl.contract.errors import UserError


class BaseLearner:
    """``Resumable``; a subclass names what it has besides.  ``class SAC(OffPolicy, config=SACConfig)``: who builds it.

    resumed   attributes with a state of their own, such as a critic and its optimizer
    counters  attributes that are numbers
    """

    resumed: ClassVar[tuple[str, ...]] = ("optimizer",)
    counters: ClassVar[tuple[str, ...]] = ()
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    generator: torch.Generator

    def __init_subclass__(cls, config: Any = None) -> None:
        """``config``: the class of configs whose ``build`` makes a ``cls``, and so do its subclasses' unless told."""
        super().__init_subclass__()
        if config is not None:
            config.learner = cls

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        set_lr(self.optimizer, value)

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            **{name: getattr(self, name).state_dict() for name in self.resumed},
            "generator": self.generator.get_state(),
            **{name: getattr(self, name) for name in self.counters},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError for a state without all parts of this learner."""
        lacking = {"parameters", "generator", *self.resumed, *self.counters} - state.keys()
        if lacking:
            raise UserError(
                f"the saved state of {type(self).__name__} has no {min(lacking)!r}, which other versions of vla-rl do "
                "not write, so the run cannot go on; start another from its best checkpoint (--policy FOLDER)."
            )
        self.restore(state["parameters"])
        for name in self.resumed:
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        for name in self.counters:
            setattr(self, name, state[name])

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Give the parameters earlier ``weights``."""
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def forget_moments(self) -> None:
        """Clear the state of every optimizer that is an attribute."""
        for item in vars(self).values():
            if isinstance(item, torch.optim.Optimizer):
                item.state.clear()


def set_lr(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give the first group of ``optimizer`` a learning rate; one that is a tensor, for compiled steps, is filled."""
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value
