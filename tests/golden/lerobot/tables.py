"""``python tables.py``: ``dataset/`` in Lance tables, as lerobot-lancedb 0.3.1 writes them for LeRobot's own reader.

With lancedb 0.40.0, on Python 3.12, since lerobot 0.6.1 needs that; so ``lance/`` was written once and is kept, without
the files of finished transactions, which nothing reads.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from lerobot_lancedb.convert import convert

HERE = Path(__file__).parent


def main() -> None:
    shutil.rmtree(HERE / "lance", ignore_errors=True)
    convert(HERE / "lance", root=HERE / "dataset")
    for folder in (HERE / "lance").glob("*/_transactions"):
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
