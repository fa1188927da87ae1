"""How finely a policy gives its likelihood, and hence how finely PPO and GRPO form and clip ratios."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from vla_rl.contract.config import check_choice

LogprobPer: TypeAlias = Literal["chunk", "action", "token"]


def check_logprob_per(config: Any) -> None:
    """Raise UserError unless ``config.logprob_per`` is one of :data:`LogprobPer`."""
    check_choice(config, "logprob_per", "chunk", "action", "token")


def sum_per(terms: Tensor, horizon: int, logprob_per: LogprobPer) -> Tensor:
    """The log-prob of every part from those of all entries, ``terms`` [B,H*D].

    float64 [B] per chunk, [B,H] per action and [B,H*D] per token (an entry of the chunk); float64 so that ratios keep
    their precision.
    """
    if logprob_per == "token":
        return terms.double()
    if logprob_per == "action":
        return terms.unflatten(-1, (horizon, -1)).sum(-1, dtype=torch.float64)
    return terms.sum(-1, dtype=torch.float64)
