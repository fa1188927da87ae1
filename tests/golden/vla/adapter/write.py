"""Writes the adapter beside this file with LeRobot's own SmolVLA and PEFT, and ``expected.npz``: ``python write.py``.

Made with Python 3.12, lerobot 0.6.1, peft 0.21.2, transformers 5.5.4 and torch 2.13.0, by what ``lerobot-train`` calls
for ``--peft.r=4 --peft.full_training_modules='["state_proj"]'``.  The base has the weights of ``../weights.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "smolvla"), str(HERE.parent)]

from cases import CASES  # noqa: E402
from weights import weight  # noqa: E402
from write import batch_of, policy_of  # noqa: E402

CASE = "one row"


def main() -> None:
    policy = policy_of(CASES[CASE])
    policy.config.pretrained_path = Path("a/base")
    overrides = {"r": 4, "lora_alpha": 6, "full_training_modules": ["state_proj"]}
    wrapped = policy.wrap_with_peft(peft_cli_overrides=overrides)
    with torch.no_grad():
        for name, item in wrapped.named_parameters():
            if item.requires_grad:
                item.copy_(torch.from_numpy(weight(name, item.shape)))
    wrapped.save_pretrained(HERE)
    wrapped.config.save_pretrained(HERE)
    (HERE / "README.md").unlink(missing_ok=True)
    given, batch = batch_of(CASE)
    sample = policy.predict_action_chunk(batch, noise=given["noise"])
    np.savez_compressed(HERE / "expected.npz", sample=sample.numpy())


if __name__ == "__main__":
    main()
