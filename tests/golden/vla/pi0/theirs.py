"""What transformers' own pi0 does with the cases: for the script that writes golden numbers, and for the tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.golden.vla.pi0.cases import CASES, CONFIG, PATCHES, STEPS, TIMES, VOCABULARY, inputs
from tests.golden.vla.weights import weight


def model() -> Any:
    """PI0ForConditionalGeneration with the weights of the rule."""
    made = transformers.PI0ForConditionalGeneration(transformers.PI0Config(**CONFIG)).eval()
    with torch.no_grad():
        for name, item in made.named_parameters():
            item.copy_(torch.from_numpy(weight(name, item.shape)))
    return made


def given(name: str) -> dict[str, Any]:
    """The inputs of a case as transformers' processor lays them out: words for pictures first, padding last."""
    case, drawn = CASES[name], {key: torch.from_numpy(item) for key, item in inputs(CASES[name]).items()}
    batch = len(case.lengths)
    words = torch.full((batch, sum(case.cameras) * PATCHES), VOCABULARY)
    return {
        "state": drawn["state"],
        "input_ids": torch.cat([words, drawn["tokens"]], 1),
        "attention_mask": torch.cat([torch.ones_like(words), drawn["mask"].long()], 1),
        "pixel_values": drawn["pictures"].permute(1, 0, 4, 2, 3) / 127.5 - 1.0,
        "pixel_attention_mask": torch.tensor(case.cameras).expand(batch, -1),
        "noise": drawn["noise"],
    }


@torch.no_grad()
def outputs(name: str, of: Any) -> dict[str, Tensor]:
    """``sample`` [B,C,A] of a few steps from the noise, ``velocity`` [times,B,C,A] at it, the training ``loss``."""
    seen, drawn = given(name), {key: torch.from_numpy(item) for key, item in inputs(CASES[name]).items()}
    velocity = [of(**seen, timestep=torch.full((len(seen["state"]),), time)).logits for time in TIMES]
    loss = of(**seen, timestep=drawn["time"], actions=drawn["actions"]).loss
    sample = of.sample_actions(**seen, num_steps=STEPS)
    return {"sample": sample, "velocity": torch.stack(velocity), "loss": loss}
