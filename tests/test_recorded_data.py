"""What users have recorded stays readable: a ledger, a spool and a dataset of an earlier version."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.golden.recorded.write import HERE, SENT, demonstrations, records
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.spool import Spool


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy of what was recorded, which is opened for writing."""
    return Path(shutil.copytree(HERE, tmp_path / "kept"))


def test_a_ledger_is_read_and_goes_on(kept):
    ledger = Ledger(kept / "ledger", reserve=0)
    found = [record for _, record in ledger.read(0, 100)]
    assert [record.encoded for record in found] == [record.encoded for record in records()]
    assert not ledger.append(records()).refused and ledger.position == len(records()), "nothing is stored twice"
    ledger.close()


def test_a_spool_is_read_and_goes_on(kept):
    spool = Spool(kept / "spool", "arm")
    assert (spool.first_seq, spool.next_seq) == (0, SENT)
    assert [record.payload for record in spool.unacknowledged(0, 1 << 20)] == [b"%d" % number for number in range(SENT)]
    spool.close()


def test_a_dataset_is_read(kept):
    found, expected = load_demonstrations(kept / "dataset"), demonstrations()
    for name in ("state", "action", "task", "time", "episode"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_array_equal(found.images["front"], expected.images["front"])
    np.testing.assert_array_equal(found.extras["next.success"], expected.extras["next.success"])
    assert (found.tasks, found.fps, found.state_names) == (expected.tasks, expected.fps, expected.state_names)
