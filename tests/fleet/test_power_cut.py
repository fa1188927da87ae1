"""After a power cut or a kill at any point, what was acknowledged is there once, in order, and the ledger goes on."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.fleet.records import EPOCH, chain
from tests.fleet.torn_disk import Point, PowerCut, TornDisk
from vla_rl.contract.errors import UserError
from vla_rl.fleet.disk import StoreEndedError
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import Sender

CHAINS = {Sender(robot, EPOCH): chain(12, robot=robot) for robot in ("arm", "leg")}
ROBOTS = list(CHAINS)
# What is appended one after the other: of each robot, up to which record.  Some batches are of one robot.
BATCHES = [(2, 1), (2, 3), (5, 4), (8, 8)]


class Story:
    """What a program was told by its ledger, which must be true from then on."""

    def __init__(self, disk: TornDisk) -> None:
        self.disk, self.folder = disk, disk.root / "robot" / "ledger"
        self.durable = dict.fromkeys(CHAINS, -1)
        self.ledger: Ledger | None = None

    def open(self) -> None:
        """Open the ledger; what it says is durable counts."""
        self.ledger = Ledger(self.folder, self.disk, reserve=0, segment_bytes=600)
        heads = self.ledger.senders()
        self.durable = {sender: heads[sender].last if sender in heads else -1 for sender in CHAINS}

    def append(self, batch: tuple[int, int]) -> None:
        assert self.ledger is not None
        records = [r for sender, end in zip(CHAINS, batch, strict=True) for r in CHAINS[sender][:end]]
        receipt = self.ledger.append(records)
        assert receipt.refused == {}
        self.durable.update(receipt.durable)  # type: ignore[arg-type]

    def live(self) -> None:
        """Append, close and open again."""
        self.open()
        for batch in BATCHES[:-1]:
            self.append(batch)
        self.close()
        self.open()
        self.append(BATCHES[-1])

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None

    def check(self, told: Story) -> None:
        """What ``told`` was told holds here, and the ledger goes on."""
        self.open()
        assert self.ledger is not None
        for sender, durable in told.durable.items():
            assert self.durable[sender] >= durable, (sender, self.durable, told.durable)
        self.check_records()
        self.append((12, 12))
        self.check_records()
        assert self.ledger.damaged() == []
        self.close()

    def check_records(self) -> None:
        assert self.ledger is not None
        found = [record for _, record in self.ledger.read(0, 1000)]
        for sender, durable in self.durable.items():
            assert [record for record in found if record.sender == sender] == CHAINS[sender][: durable + 1]


def at(number: int, do: Callable[[], None]) -> Callable[[Point], None]:
    def before(point: Point) -> None:
        if point.number == number:
            do()

    return before


def stories(
    tmp_path: Path, what: str, live: Callable[[Story], None] = Story.live, begin: int = 0, stride: int = 1
) -> Iterator[Story]:
    """One story for every point, or every ``stride``-th: there the power is cut, or the process killed."""
    for number in count(1 + begin, stride):
        root = tmp_path / f"{what}{number}"
        root.mkdir()
        story = Story(TornDisk(root))
        story.disk.before = at(number, story.disk.cut)
        with contextlib.suppress(PowerCut, StoreEndedError, UserError, sqlite3.Error):
            live(story)
        over = story.disk.points < number
        story.disk.before = lambda point: None
        story.disk.kill(story.close)
        story.ledger = None
        yield story
        if over:
            assert number > 50
            return


def cut_everywhere(tmp_path: Path, left: str, seed: int, stride: int = 1) -> None:
    for story in stories(tmp_path, "cut", begin=seed % stride, stride=stride):
        Story(story.disk.left(tmp_path / f"left-{story.disk.root.name}", left, seed)).check(story)


def test_a_power_cut_at_any_point_loses_nothing_that_was_acknowledged(tmp_path):
    cut_everywhere(tmp_path, "nothing", 0, stride=3)


@pytest.mark.parametrize(("left", "seed"), [("all", 0), *(("torn", seed) for seed in (1, 2))])
def test_a_power_cut_that_tears_what_was_not_synced_loses_nothing(left, seed, tmp_path):
    cut_everywhere(tmp_path, left, seed, stride=8)


@pytest.mark.full
@pytest.mark.parametrize(("left", "seed"), [("nothing", 0), ("all", 0), *(("torn", seed) for seed in range(40))])
def test_a_power_cut_at_any_point_that_tears_loses_nothing(left, seed, tmp_path):
    cut_everywhere(tmp_path, left, seed)


def test_what_is_said_after_a_kill_holds_after_a_power_cut(tmp_path):
    """The killed process left things in memory, which the next one takes up and acknowledges."""
    for story in stories(tmp_path, "kill", stride=6):
        story.open()
        story.disk.kill(story.close)
        story.ledger = None
        Story(story.disk.left(tmp_path / f"left{story.disk.root.name}", "nothing")).check(story)
        story.open()
        story.append((10, 10))
        story.disk.kill(story.close)
        story.ledger = None
        Story(story.disk.left(tmp_path / f"then{story.disk.root.name}", "nothing")).check(story)


def test_a_power_cut_while_opening_after_a_power_cut(tmp_path):
    cut_twice(tmp_path, stride=110)


@pytest.mark.full
def test_a_power_cut_while_opening_after_a_power_cut_at_more_points(tmp_path):
    cut_twice(tmp_path, stride=7)


def cut_twice(tmp_path: Path, stride: int) -> None:
    for story in list(stories(tmp_path, "first", begin=stride // 2, stride=stride)):
        for number in count(1):
            second = Story(story.disk.left(tmp_path / f"{story.disk.root.name}-{number}", "torn", number))
            second.disk.before = at(number, second.disk.cut)
            with contextlib.suppress(PowerCut, StoreEndedError, UserError, sqlite3.Error):
                second.open()
            over = second.disk.points < number
            second.disk.kill(second.close)
            Story(second.disk.left(tmp_path / f"{story.disk.root.name}-{number}-left", "torn", number)).check(story)
            if over:
                break


def seqs_in(disk: TornDisk) -> list[int]:
    """What a ledger on ``disk`` holds, whose process is killed then."""
    ledger = Ledger(disk.root / "ledger", disk, reserve=0, segment_bytes=300)
    found = [record.seq for _, record in ledger.read(0, 100)]
    disk.kill(ledger.close)
    return found


def test_what_was_trimmed_stays_away_after_a_kill_and_a_power_cut(tmp_path):
    arm = Sender("arm", EPOCH)
    for number in count(1):
        (root := tmp_path / str(number)).mkdir()
        disk, trimmed = TornDisk(root), False
        ledger = Ledger(root / "ledger", disk, reserve=0, segment_bytes=300)
        for record in CHAINS[arm]:
            ledger.append([record])
        disk.before = at(disk.points + number, disk.cut)
        with contextlib.suppress(PowerCut, StoreEndedError, sqlite3.Error):
            ledger.trim(arm, 7)
            trimmed = True
        disk.before = lambda point: None
        found = [record.seq for _, record in ledger.read(0, 100)] if trimmed else []
        disk.kill(ledger.close)
        found = found or seqs_in(disk)
        assert seqs_in(disk.left(tmp_path / f"left{number}", "nothing")) == found
        assert found[-4:] == [8, 9, 10, 11]
        if trimmed:
            assert number > 5 and found[0] > 0
            return
