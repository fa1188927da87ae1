"""Writes ``expected.npz`` beside this file with transformers' own pi0.

Made with transformers 5.23.0, torch 2.13.0 (cpu) and numpy 2.4.6, all of constraints.txt, by
``python -m tests.golden.vla.pi0.write`` in the repository.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.golden.vla.pi0 import theirs
from tests.golden.vla.pi0.cases import CASES

if __name__ == "__main__":
    network = theirs.model()
    made = {f"{name}/{key}": item.numpy() for name in CASES for key, item in theirs.outputs(name, network).items()}
    np.savez_compressed(Path(__file__).with_name("expected.npz"), **made)
    for key, item in made.items():
        print(f"{key:50} {item.shape!s:15} std {item.std():.3f}")
