"""Writes ``pictures.npz`` beside this file: what transformers' PI0ImageProcessor makes of pictures.

Made with transformers 5.23.0, torchvision 0.28.0, torch 2.13.0 (cpu) and numpy 2.2.6, by
``PYTHONPATH=. python tests/golden/vla/pi0/write_pictures.py`` in an environment of its own: vla-rl has no torchvision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import library

HERE = Path(__file__).parent
sys.modules["tests"] = ModuleType("tests")  # other packages may have one
sys.modules["tests"].__path__ = [str(HERE.parents[2])]
# torchvision's compiled part does not fit a torch without CUDA; nothing of it is used here.
_LIBRARY = library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from transformers.models.pi0.image_processing_pi0 import PI0ImageProcessor  # noqa: E402

from tests.golden.vla.pi0.cases import PICTURES, SIDE, picture  # noqa: E402

if __name__ == "__main__":
    process = PI0ImageProcessor(size={"max_height": SIDE, "max_width": SIDE}, pad_size={"height": SIDE, "width": SIDE})
    made = {}
    for size in PICTURES:
        seen = torch.from_numpy(picture(size)).permute(0, 3, 1, 2)
        values = process(images=list(seen), return_tensors="pt")["pixel_values"]
        made[f"{size}"] = values.numpy()
    np.savez_compressed(HERE / "pictures.npz", **made)
