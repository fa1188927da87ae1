"""Storing records in a ledger, against appending the same bytes to a file with a sync after every batch."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tests.benchmarks.measure import Contender, Row, interleave, rate_row
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import NO_HASH, FleetRecord, Sender

PAYLOAD = 15_000  # bytes: three JPEG pictures and the state of an arm


def ingest_vs_disk(quick: bool = False) -> list[Row]:
    """Megabytes per second of records of 15 kB in batches of 64, with everything durable after each batch."""
    batches, size, repeats = (2, 4, 1) if quick else (40, 64, 5)
    records = _chain(batches * size)
    parts = [records[i : i + size] for i in range(0, len(records), size)]
    encoded = [b"".join(record.encoded for record in part) for part in parts]
    with tempfile.TemporaryDirectory(prefix="vla-rl-ingest-", dir=".") as folder:
        ours, other = Path(folder) / "ours", Path(folder) / "other"

        def ledger() -> None:
            store = Ledger(ours)
            for part in parts:
                # Fresh objects, as they arrive: nothing about them is computed yet.
                receipt = store.append([FleetRecord(**_fields_of(record)) for record in part])
                assert not receipt.refused
            store.close()

        def disk() -> None:
            handle = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for data in encoded:
                assert os.write(handle, data) == len(data)
                os.fdatasync(handle)
            os.close(handle)

        contenders = {
            "ours": Contender(ledger, lambda: shutil.rmtree(ours, ignore_errors=True)),
            "other": Contender(disk, lambda: other.unlink(missing_ok=True)),
        }
        seconds = interleave(contenders, repeats)
        store = Ledger(ours)
        assert store.durable(*Sender("arm", "0" * 32)) == len(records) - 1
        store.close()
    amount = sum(map(len, encoded)) / 1e6
    detail = {"batches": batches, "records_per_batch": size, "bytes": int(1e6 * amount)}
    return [rate_row("ingest_vs_disk", "ingest_vs_disk", amount, (seconds["ours"], seconds["other"]), "MB/s", **detail)]


def _fields_of(record: FleetRecord) -> dict:
    """The fields of a record."""
    return {name: getattr(record, name) for name in FleetRecord.__dataclass_fields__}


def _chain(count: int) -> list[FleetRecord]:
    found: list[FleetRecord] = []
    previous = NO_HASH
    for seq in range(count):
        payload = os.urandom(PAYLOAD)
        found.append(FleetRecord(robot="arm", epoch="0" * 32, seq=seq, kind="step", previous=previous, payload=payload))
        previous = found[-1].hash
    return found
