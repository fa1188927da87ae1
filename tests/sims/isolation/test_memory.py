"""So many workers that they do not fit the memory are refused with the number that fits."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sims import isolated
from sims.base import free_bytes, process_bytes
from sims.catalog import make
from tests.worker_pids import worker_pids
from vla_rl.contract.errors import UserError


def test_too_many_workers_are_refused_when_the_first_one_shows_what_one_takes(monkeypatch):
    monkeypatch.setattr(isolated, "process_bytes", lambda pid: 10**8 if pid in worker_pids() else 0)
    monkeypatch.setattr(isolated, "free_bytes", lambda: 3 * 10**8)
    sentence = r"^5 worker processes of 100 MB each, for 2 environments each, do not fit the 0\.4 GB .*; 3 fit\.$"
    with pytest.raises(UserError, match=sentence):
        make("isolated", num_envs=10, env="counting", workers=5)
    assert not worker_pids()
    with closing(make("isolated", num_envs=3, env="counting", workers=3)) as env:
        assert env.num_envs == 3 and len(worker_pids()) == 3


def test_nothing_is_measured_where_memory_is_plenty(monkeypatch):
    monkeypatch.setattr(isolated, "process_bytes", lambda pid: pytest.fail("measured"))
    monkeypatch.setattr(isolated, "free_bytes", lambda: 10**12)
    make("isolated", num_envs=2, env="counting", workers=2).close()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_process_counts_what_is_its_own():
    before = process_bytes()
    with mmap.mmap(-1, 10**8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:  # no memory that was used before
        block.write(b"1" * 10**8)
        assert 5 * 10**7 < process_bytes() - before < 4 * 10**8
    assert process_bytes() == pytest.approx(process_bytes(os.getpid()), rel=0.1)
    assert process_bytes() < resident()  # without the files that it has mapped
    assert 0 < free_bytes() < 10**14
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for its status
    assert process_bytes(ended.pid) == 0
    ended.wait()
