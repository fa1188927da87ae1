"""``python convert.py DATASET``: the real converter makes v3.0 of a v2.1, in its place."""

from __future__ import annotations

import sys
from pathlib import Path

import real  # noqa: F401  (before what imports torchvision)
from lerobot.datasets.v30.convert_dataset_v21_to_v30 import convert_dataset

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    convert_dataset(f"{folder.parent.name}/{folder.name}", root=folder.parent.parent, push_to_hub=False)
