"""``python -m tests.golden.recorded.write``: a ledger, a spool and a dataset, which every later version has to read.

They are written once and kept: whoever has to write them anew has made data of users unreadable.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from tests.fleet.records import chained, episode, introduction
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import FleetRecord
from vla_rl.fleet.spool import Spool

HERE = Path(__file__).parent
SENT = 5  # records of the spool, none of which was acknowledged


def records() -> list[FleetRecord]:
    """Two episodes of one robot."""
    return chained([introduction(), *episode("e0", 3), *episode("e1", 2, "failure", version=2)])


def demonstrations() -> Demonstrations:
    """Two episodes, of four and three frames, with pictures, in two tasks."""
    count = 7
    numbers = np.arange(count, dtype=np.float32)
    return Demonstrations(
        images={"front": np.arange(count * 8 * 8 * 3).reshape(count, 8, 8, 3).astype(np.uint8)},
        state=np.stack([numbers, -numbers], 1) / 8,
        task=np.array([0] * 4 + [1] * 3),
        time=np.array([0, 1, 2, 3, 0, 1, 2]),
        action=np.stack([numbers, numbers * 2], 1) / 16,
        episode=np.array([0] * 4 + [1] * 3),
        seed=np.array([5] * 4 + [6] * 3),
        tasks=("lift", "place"),
        fps=10.0,
        state_names=("x", "y"),
        action_names=("x", "y"),
        extras={"next.success": np.array([False, False, False, True, False, False, True])},
    )


def main() -> None:
    ledger = Ledger(HERE / "ledger", reserve=0)
    ledger.append(records())
    ledger.close()
    spool = Spool(HERE / "spool", "arm")
    for number in range(SENT):
        spool.put("event", b"%d" % number)
    while spool.next_seq < SENT:
        time.sleep(0.01)
    spool.close()
    save_demonstrations(demonstrations(), HERE / "dataset", video="never")


if __name__ == "__main__":
    main()
