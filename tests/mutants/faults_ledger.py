"""Faults in the store of records: every sync, and what keeps it exact."""

from __future__ import annotations

from tests.mutants.fault import Fault

_DISK, _INDEX, _LEDGER, _RECORD, _RECOVERY, _SEGMENTS = (
    f"vla_rl/fleet/{name}.py" for name in ("disk", "index", "ledger", "record", "recovery", "segments")
)
_CUT, _BAD, _ON = (f"tests/fleet/test_{name}.py::" for name in ("power_cut", "bad_disk", "ledger"))
_POWER = f"{_CUT}test_a_power_cut_at_any_point_loses_nothing_that_was_acknowledged"
_TORN = f"{_CUT}test_a_power_cut_that_tears_what_was_not_synced_loses_nothing"
_KILL = f"{_CUT}test_what_is_said_after_a_kill_holds_after_a_power_cut"
_FLIP = f"{_BAD}test_a_flipped_bit_is_told_and_costs_only_the_record_that_it_is_in"
_FULL = f"{_BAD}test_what_ran_out_at_any_write_is_told_and_the_ledger_goes_on_when_there_is_some_again"
_REAL = f"{_BAD}test_the_real_disk_syncs_files_and_folders"

FAULTS = (
    Fault(
        "what a disk cannot read for a moment is damaged",
        _SEGMENTS,
        "        if gone or (error.errno == errno.EIO and time.monotonic() - since > PATIENCE_S):",
        "        if gone or error.errno == errno.EIO:",
        (
            f"{_BAD}test_what_cannot_be_read_for_a_moment_is_not_damaged",
            "tests/fleet/test_spool.py::test_a_spool_gives_nothing_up_that_cannot_be_read_for_a_moment",
        ),
    ),
    Fault(
        "what a disk could not read is damaged for ever",
        _RECOVERY,
        "        _try_again(index, folder, disk)",
        "        pass",
        (f"{_BAD}test_what_cannot_be_read_for_long_is_left_out_until_it_can_when_the_ledger_is_opened",),
    ),
    Fault(
        "what a failed sync left in memory counts as stored once the ledger is open again",
        _LEDGER,
        "self._segment.cut(self._segment.synced)",
        "pass",
        (f"{_BAD}test_what_a_failed_sync_left_in_memory_is_not_taken_for_stored",),
    ),
    Fault(
        "a segment that cannot be made keeps its file open",
        _SEGMENTS,
        "            self._file.close()",
        "            pass",
        (f"{_BAD}test_a_ledger_that_can_open_no_file_keeps_none_open_and_leaves_none_behind",),
    ),
    Fault(
        "a ledger without a file to open ends",
        "vla_rl/fleet/errors.py",
        "errno.EFBIG, errno.EMFILE,",
        "errno.EFBIG,",
        (f"{_BAD}test_a_ledger_that_can_open_no_file_keeps_none_open_and_leaves_none_behind",),
    ),
    Fault("a batch is acknowledged without a sync", _LEDGER, "self._sync(segment)", "pass", (_POWER,)),
    Fault(
        "a commit of the index is not synced",
        _INDEX,
        'self._db.execute("PRAGMA synchronous = FULL")',
        'self._db.execute("PRAGMA synchronous = NORMAL")',
        (_POWER,),
    ),
    Fault("the name of a new segment is not synced", _SEGMENTS, "disk.sync_folder(folder)", "pass", (_POWER,)),
    Fault(
        "the name of a ledger's folder is not synced", _RECOVERY, "disk.sync_folder(folder.parent)", "pass", (_POWER,)
    ),
    Fault(
        "what a killed process wrote is taken up without a sync",
        _RECOVERY,
        "file.sync()",
        "pass",
        (_KILL,),
    ),
    Fault("the real disk syncs no file", _DISK, "_flush(self._handle)", "pass", (_REAL,)),
    Fault("the real disk syncs no folder", _DISK, "os.fsync(handle)", "pass", (_REAL,)),
    Fault(
        "a segment is not in the index before it is written",
        _LEDGER,
        "                    self._index.set_segment(segment.name, 0)",
        "                    pass",
        (_TORN,),
    ),
    Fault("a changed frame passes for a whole one", _SEGMENTS, "!= crc:", "== -1:", (_FLIP,)),
    Fault(
        "a full disk leaves half a batch",
        _LEDGER,
        "segment.cut(end)",
        "pass",
        (_FULL,),
    ),
    Fault(
        "a short write is taken for a whole one",
        _SEGMENTS,
        "rest = rest[taken:]",
        "rest = rest[len(rest) :]",
        (f"{_BAD}test_short_writes_are_finished",),
    ),
    Fault(
        "a gap is stored",
        _LEDGER,
        "if record.seq > head.last + 1:",
        "if record.seq > head.last + 100:",
        (f"{_ON}test_a_gap_is_refused_and_says_what_is_expected",),
    ),
    Fault(
        "another record of the same number passes for the same",
        _LEDGER,
        "if stored is not None and stored != record.hash:",
        "if stored is None:",
        (f"{_ON}test_another_record_of_the_same_number_is_refused_and_set_aside",),
    ),
    Fault(
        "a record that follows another one is stored",
        _LEDGER,
        "if record.previous != head.hash:",
        "if len(record.previous) != len(head.hash):",
        (f"{_ON}test_another_record_of_the_same_number_is_refused_and_set_aside",),
    ),
    Fault(
        "the chain does not cover the payload",
        _RECORD,
        "hashlib.sha256(self.encoded).digest()",
        "hashlib.sha256(self.encoded[: _HEAD.size]).digest()",
        ("tests/fleet/test_record.py::test_a_changed_byte_is_refused_or_changes_the_hash",),
    ),
    Fault(
        "nobody looks whether a number that is there holds the same record",
        _LEDGER,
        "                stored = batch.get((sender, record.last)) or self._index.hash_at(sender, record.last)",
        "                pass",
        (f"{_ON}test_another_record_of_the_same_number_is_refused_and_set_aside",),
    ),
    Fault(
        "a robot forgets what the server has not acknowledged",
        "vla_rl/fleet/attempt.py",
        "            self._source.acknowledged(durable)",
        "            self._source.acknowledged(self._source.next_seq - 1)",
        (
            "tests/fleet/test_faults.py::test_whoever_is_killed_comes_back_and_all_is_stored_and_learnt_from_once_and_in_order",
        ),
    ),
    Fault(
        "a removed segment may come back",
        _LEDGER,
        "self._disk.sync_folder(self.folder)",
        "pass",
        (f"{_CUT}test_what_was_trimmed_stays_away_after_a_kill_and_a_power_cut",),
    ),
    Fault(
        "a segment whose removal was finished at opening may come back",
        _RECOVERY,
        "disk.sync_folder(folder)",
        "pass",
        (f"{_CUT}test_what_was_trimmed_stays_away_after_a_kill_and_a_power_cut",),
    ),
)
