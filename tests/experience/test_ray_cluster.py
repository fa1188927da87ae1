"""Workers in a Ray cluster of two nodes here: the same answers as processes, and one sentence for mistakes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.auditing import AuditingPolicy
from tests.experience.makers import equal_rollouts as same
from tests.experience.makers import gaussian
from tests.experience.test_process import COUNTING, MAKE
from tests.experience.test_sources import require_whole, train
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.process import ProcessSource
from vla_rl.experience.ray_cluster import RayCluster
from vla_rl.experience.sources import Collectors
from vla_rl.experience.worker import LostWorkerError, Worker
from vla_rl.recipes.workers import Folder, RayEngine, read_folder

ROOT = str(Path(__file__).resolve().parents[2])
ENVIRONMENT = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def nodes():
    """Two nodes with a processor each."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def cluster(nodes):
    connected = RayCluster(nodes.address)
    yield connected
    connected.close()


@pytest.fixture
def worker(cluster):
    with Worker(cluster.link(ENVIRONMENT)) as made:
        yield made


@pytest.mark.full
def test_objects_reports_and_errors_are_those_of_a_process(worker):
    number, reports = worker.make(MAKE.format("Counter"), start=3), []
    assert worker.call(number, "add", amount=2) == 5
    assert worker.call(number, "count_to", report=lambda *values: reports.append(values), last=3) == 3
    assert reports == [(1, 1), (2, 4), (3, 9)] and worker.call(number, "threads") == "1"
    with pytest.raises(ContractError, match="Counter has no 'sub', so nothing was done"):
        worker.call(number, "sub")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        source = ProcessSource(MAKE.format("failing"), {}, worker)
        [source.next() for _ in range(2)]


@pytest.mark.full
def test_rollouts_are_those_of_a_source_here(worker):
    source, here = ProcessSource(MAKE.format("gaussian"), COUNTING, worker), gaussian(**COUNTING)
    assert all(same(source.next(), here.next()) for _ in range(2))


def counting(cluster, staleness):
    """Sources on both nodes, and their workers; a dead one is replaced."""
    workers = [Worker(cluster.link(ENVIRONMENT)) for _ in range(2)]

    def made(i):
        if workers[i].lost:
            workers[i] = Worker(cluster.link(ENVIRONMENT))
        return ProcessSource(MAKE.format("counting"), {"part": i, "parts": 2}, workers[i])

    sources, policy = [made(i) for i in range(2)], AuditingPolicy(4)
    if not staleness:
        return Collectors(sources, policy), workers
    return Collectors(sources, policy, staleness, remake=made), workers


def close(source, workers):
    source.close()
    for worker in workers:
        worker.close()


@pytest.mark.full
@pytest.mark.parametrize("staleness", [0, 2])
def test_nothing_is_lost_doubled_or_reordered_over_two_nodes(cluster, staleness):
    source, workers = counting(cluster, staleness)
    nodes = {actor["NodeID"] for actor in _actors() if actor["State"] == "ALIVE"}
    source.staleness = staleness
    rollouts = train(source, 6)
    close(source, workers)
    require_whole(rollouts, 2)
    assert len(nodes) == 2


@pytest.mark.full
def test_a_killed_actor_starts_and_plays_its_window_again(cluster):
    source, workers = counting(cluster, 1)
    rollouts = train(source, 2)
    os.kill(workers[1].pid, signal.SIGKILL)
    while rollouts[-1].info["source/restarts"] == 0:  # the other one plays on meanwhile
        rollouts += train(source, 1)
    rollouts += train(source, 5)
    close(source, workers)
    require_whole(rollouts, 2)
    assert rollouts[-1].info["source/restarts"] == 1


@pytest.mark.full
def test_the_death_of_an_actor_is_one_sentence(cluster):
    with Worker(cluster.link(ENVIRONMENT)) as worker:
        number = worker.make(MAKE.format("Counter"), start=0)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(LostWorkerError, match=r"the acting Ray actor \w{8} of .* died"):
            worker.call(number, "add", amount=1)
        assert worker.lost


def test_a_cluster_that_is_too_small_is_named():
    small = RayCluster.__new__(RayCluster)
    small._ray, small.cpus, small.gpus = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0}), 1.0, 0.0
    small.require(2)
    with pytest.raises(UserError, match="has 2 CPU and 3 workers of 1 need 3, so some would wait for ever"):
        small.require(3)


@pytest.mark.full
def test_files_are_sent_to_workers_that_have_not_this_disk(cluster, worker, tmp_path):
    (tmp_path / "sent" / "deep").mkdir(parents=True)
    (tmp_path / "sent" / "deep" / "weights").write_bytes(bytes(range(256)))
    engine = RayEngine("")
    engine._connected = cluster
    with engine.placed(worker, str(tmp_path / "sent")) as there:
        assert there != str(tmp_path / "sent") and (Path(there) / "deep" / "weights").read_bytes() == bytes(range(256))
    assert not Path(there).exists()
    with engine.placed(worker, "") as nothing:
        assert nothing == ""


def test_a_file_cannot_leave_the_folder_that_it_is_sent_to(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    files = {f"../{name}": content for name, content in read_folder(tmp_path).items()}
    with pytest.raises(UserError, match="outside of the folder"):
        Folder(files)


def test_of_a_run_only_what_workers_read_is_sent(tmp_path):
    for name in ("config.json", "config_files/mine.py", "state/big", "checkpoints/best/model"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert set(read_folder(tmp_path)) == {"config.json", "config_files/mine.py"}


def test_a_cluster_that_cannot_be_used_is_one_sentence(monkeypatch):
    with pytest.raises(UserError, match=r"no Ray cluster can be used at '127.0.0.1:1' \(.*refused"):
        RayCluster("127.0.0.1:1")
    monkeypatch.setattr(ray, "__version__", "2.9.3")
    with pytest.raises(UserError, match=r"Ray 2\.9\.3 is older than 2\.40"):
        RayCluster()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="needs the package ray, which is not installed"):
        RayCluster()


def _actors():
    from ray._private.state import actors

    return [{"NodeID": item["Address"]["NodeID"], "State": item["State"]} for item in actors().values()]
