"""Full disks, failing writes and syncs, short writes, flipped bits: told, nothing acknowledged is lost, it goes on."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.fleet.records import EPOCH, chain
from tests.fleet.test_power_cut import BATCHES, CHAINS, Story
from tests.fleet.torn_disk import Point, TornDisk, Truncate
from vla_rl.contract.errors import UserError
from vla_rl.fleet.disk import FRAME_BYTES, Disk, StoreEndedError, StoreFullError
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import Sender

GROWTH, SYNCS = ("write", "create", "folder"), ("sync", "sync_folder")
CHANGES = (*GROWTH, "truncate", "remove", "rename")
ARM = Sender("arm", EPOCH)


class Failing:
    """Points of the kinds ``what`` fail from ``start`` on, until ``mended``."""

    def __init__(self, start: int, what: tuple[str, ...], code: int) -> None:
        self.start, self.what, self.code, self.mended, self.failed = start, what, code, False, 0

    def __call__(self, point: Point) -> None:
        if not self.mended and point.number >= self.start and point.what in self.what:
            self.failed += 1
            raise OSError(self.code, "the test's disk")


def failing(tmp_path: Path, what: tuple[str, ...], code: int, stride: int = 1) -> None:
    """A story with failures from every point on, which end when the ledger said that something is wrong.

    It goes on when the disk does, after it was opened again where it ended; then the power is cut.
    """
    seen: list[Point] = []
    (tmp_path / "dry").mkdir()
    sound = Story(TornDisk(tmp_path / "dry"))
    sound.disk.before = seen.append
    sound.live()
    sound.close()
    numbers = [point.number for point in seen if point.what in what]
    assert len(numbers) > 15
    for number in [*numbers[::stride], len(seen) + 1]:
        root = tmp_path / f"at{number}"
        root.mkdir()
        story = Story(TornDisk(root))
        fails = story.disk.before = Failing(number, what, code)
        said = None
        try:
            story.live()
        except (UserError, OSError) as error:
            said = error
        fails.mended = True
        if fails.failed and isinstance(said, StoreEndedError):
            assert story.ledger is not None
            for _ in range(2):
                with pytest.raises(StoreEndedError, match="open it again"):
                    story.append(BATCHES[-1])
            if number % 2:  # the others are opened by another process
                fails.mended = False
                if fails.what == CHANGES:
                    with pytest.raises((UserError, OSError)):
                        story.ledger.reopen()
                fails.mended = True
                story.ledger.reopen()
                story.durable |= {sender: head.last for sender, head in story.ledger.senders().items()}
                goes_on(story)
        elif isinstance(said, StoreFullError):
            goes_on(story)  # as soon as there is room
        story.close()
        Story(story.disk.left(tmp_path / f"left{number}", "nothing")).check(story)
        assert fails.failed or (said is None and number > len(seen))


def goes_on(story: Story) -> None:
    story.append(BATCHES[-1])
    story.check_records()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE])
def test_what_ran_out_at_any_write_is_told_and_the_ledger_goes_on_when_there_is_some_again(code, tmp_path):
    failing(tmp_path, GROWTH, code, stride=9)


def test_a_ledger_that_can_open_no_file_keeps_none_open_and_leaves_none_behind(tmp_path):
    def opened() -> int:
        return len(os.listdir("/dev/fd"))

    story = Story(TornDisk(tmp_path))
    story.open()
    before = opened()
    story.disk.before = Failing(0, ("sync_folder",), errno.EMFILE)
    for _ in range(5):
        with pytest.raises(StoreFullError, match="or what else ran out"):
            story.append(BATCHES[0])
    assert opened() == before
    story.disk.before = lambda point: None
    goes_on(story)
    story.close()


class Forgetful(TornDisk):
    """A disk that, as Linux does, takes what a failed sync left for written from then on."""

    def synced(self, path: Path) -> None:
        try:
            super().synced(path)
        except OSError:
            content, changes = self._files[self._names[path]]
            self._files[self._names[path]] = (content, [one for one in changes if isinstance(one, Truncate)])
            raise


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_what_a_failed_sync_left_in_memory_is_not_taken_for_stored(code, tmp_path):
    (root := tmp_path / "disk").mkdir()
    story = Story(Forgetful(root))
    story.open()
    story.append(BATCHES[0])
    fails = story.disk.before = Failing(0, ("sync",), code)
    with pytest.raises(StoreEndedError):
        story.append(BATCHES[1])
    fails.mended = True
    with pytest.raises(StoreEndedError):
        story.append(BATCHES[1])
    story.ledger.reopen()
    assert {sender: story.ledger.durable(*sender) for sender in CHAINS} == story.durable
    story.append(BATCHES[1])
    story.close()
    Story(story.disk.left(tmp_path / "left", "nothing")).check(story)


@pytest.mark.parametrize(("what", "stride"), [(CHANGES, 9), (SYNCS, 3)])
def test_a_disk_that_fails_ends_the_ledger_which_says_so(what, stride, tmp_path):
    failing(tmp_path, what, errno.EIO, stride)


@pytest.mark.full
@pytest.mark.parametrize(("what", "code"), [(GROWTH, errno.ENOSPC), (CHANGES, errno.EIO), (SYNCS, errno.EIO)])
def test_the_same_at_every_write(what, code, tmp_path):
    failing(tmp_path, what, code)


def test_short_writes_are_finished(tmp_path):
    story = Story(TornDisk(tmp_path))
    story.disk.taken = 7
    story.live()
    story.check_records()
    story.close()
    story.check(story)


@pytest.fixture
def small(tmp_path):
    """A ledger of one segment with four records of two robots, closed; its folder, and the segment's bytes."""
    root = tmp_path / "sound"
    root.mkdir()
    ledger = Ledger(root / "ledger", TornDisk(root), reserve=0)
    for i in range(2):
        ledger.append([CHAINS[sender][i] for sender in CHAINS])
    ledger.close()
    (segment,) = (root / "ledger").glob("*.seg")
    return root, segment.relative_to(root), segment.read_bytes()


def opened_with(small: tuple[Path, Path, bytes], place: int, target: Path, index: bool) -> Ledger:
    root, segment, data = small
    shutil.copytree(root, target)
    changed = bytearray(data)
    changed[place] ^= 1 << place % 8
    (target / segment).write_bytes(changed)
    if not index:
        for path in (target / "ledger").glob("index.sqlite*"):
            path.unlink()
    disk = TornDisk(target)
    disk.adopt()
    return Ledger(target / "ledger", disk, reserve=0)


def expected_without(place: int, data: bytes) -> list[int]:
    """Which records (0 to 3) are whole when the byte at ``place`` is changed; the frames follow the first one."""
    records = [CHAINS[sender][i] for i in range(2) for sender in CHAINS]
    ends = [data.index(record.encoded) + len(record.encoded) for record in records]
    starts = [data.index(records[0].encoded) - FRAME_BYTES, *ends[:-1]]
    return [i for i in range(4) if not starts[i] <= place < ends[i]]


@pytest.mark.parametrize("index", [True, False])
def test_a_flipped_bit_is_told_and_costs_only_the_record_that_it_is_in(index, small, tmp_path, caplog):
    flip(index, small, tmp_path, caplog, stride=29)


@pytest.mark.full
@pytest.mark.parametrize("index", [True, False])
def test_the_same_of_every_byte(index, small, tmp_path, caplog):
    flip(index, small, tmp_path, caplog, stride=1)


def flip(index, small, tmp_path, caplog, stride):
    data = small[2]
    records = [CHAINS[sender][i] for i in range(2) for sender in CHAINS]
    for place in range(0, len(data), stride):
        caplog.clear()
        ledger = opened_with(small, place, tmp_path / f"flipped{place}", index)
        expected = expected_without(place, data)
        assert [record for _, record in ledger.read(0, 100)] == [records[i] for i in expected]
        if len(expected) < 4:
            assert "damaged" in caplog.text or "cannot be read" in caplog.text or "cut off" in caplog.text
        if index:
            assert ledger.damaged() == [i + 1 for i in range(4) if i not in expected]
            assert [head.last for head in ledger.senders().values()] == [1, 1]
        follows = [CHAINS[sender][ledger.durable(*sender) + 1] for sender in CHAINS]
        assert ledger.append(follows).refused == {}
        ledger.close()


def test_a_segment_that_lost_its_end_is_told(small, tmp_path, caplog):
    root, segment, data = small
    (root / segment).write_bytes(data[:-1])
    ledger = Ledger(root / "ledger", Disk(), reserve=0)
    assert "ends after" in caplog.text
    assert len(ledger.read(0, 100)) == 3 and ledger.damaged() == [4]
    ledger.close()


def test_a_segment_that_is_gone_is_told(small, caplog):
    root, segment, _ = small
    (root / segment).unlink()
    ledger = Ledger(root / "ledger", Disk(), reserve=0)
    assert "is gone" in caplog.text and ledger.read(0, 100) == [] and ledger.damaged() == [1, 2, 3, 4]
    ledger.close()


class Unreadable(Disk):
    """Cannot read segments while ``fails``."""

    fails = False

    def read(self, path: Path, start: int = 0, length: int | None = None) -> bytes:
        if self.fails:
            raise OSError(errno.EIO, "the test's disk")
        return super().read(path, start, length)


def test_what_cannot_be_read_for_a_moment_is_not_damaged(tmp_path):
    ledger = Ledger(tmp_path / "ledger", disk := Unreadable(), reserve=0)
    ledger.append(records := chain(3))
    disk.fails = True
    with pytest.raises(OSError, match="the test's disk"):
        ledger.read(0, 100)
    disk.fails = False
    assert [record for _, record in ledger.read(0, 100)] == records and ledger.damaged() == []
    ledger.close()


def test_what_cannot_be_read_for_long_is_left_out_until_it_can_when_the_ledger_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rl.fleet.disk.PATIENCE_S", -1.0)
    ledger = Ledger(tmp_path / "ledger", disk := Unreadable(), reserve=0)
    ledger.append(records := chain(3))
    disk.fails = True
    assert ledger.read(0, 100) == [] and ledger.damaged() == [1, 2, 3]
    ledger.close()
    ledger = Ledger(tmp_path / "ledger", disk, reserve=0)
    assert ledger.damaged() == [1, 2, 3]
    ledger.close()
    disk.fails = False
    ledger = Ledger(tmp_path / "ledger", disk, reserve=0)
    assert [record for _, record in ledger.read(0, 100)] == records and ledger.damaged() == []
    ledger.close()


@pytest.fixture
def calls(monkeypatch):
    """What the operating system is told to sync."""
    found: list[str] = []
    monkeypatch.setattr("vla_rl.fleet.disk._flush", lambda handle: found.append("file"))
    monkeypatch.setattr("os.fsync", lambda handle: found.append("folder"))
    return found


def test_the_real_disk_syncs_files_and_folders(calls, tmp_path):
    disk = Disk()
    file = disk.open(tmp_path / "file")
    file.write(b"data")
    file.sync()
    disk.sync_folder(tmp_path)
    assert calls == ["file", "folder"]
    file.close()
