"""Faults in workers that are actors of a Ray cluster, and in engines."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RAY, _ENGINES, _WORKERS = "vla_rl/experience/ray_cluster.py", "vla_rl/recipes/engines.py", "vla_rl/recipes/workers.py"
_ON_RAY, _ON_ENGINES = "tests/experience/test_ray_cluster.py::", "tests/recipes/test_engines.py::"

FAULTS = (
    Fault(
        "a dead actor counts as alive",
        _RAY,
        "self._lost = True",
        "pass",
        (f"{_ON_RAY}test_the_death_of_an_actor_is_one_sentence",),
    ),
    Fault(
        "reports of an actor are lost",
        _RAY,
        'if not request.get("reports"):',
        "if True:",
        (f"{_ON_RAY}test_objects_reports_and_errors_are_those_of_a_process",),
    ),
    Fault(
        "a cluster that is too small is waited for",
        _RAY,
        "if workers * each > resources.get(name, 0.0):",
        "if workers * each < 0:",
        (f"{_ON_RAY}test_a_cluster_that_is_too_small_is_named",),
    ),
    Fault(
        "an old Ray is taken",
        _RAY,
        "< OLDEST:",
        "< (0, 0):",
        (f"{_ON_RAY}test_a_cluster_that_is_missing_or_too_old_or_not_there_is_one_sentence",),
    ),
    Fault(
        "an actor reads the files of another machine",
        _ENGINES,
        'yield str(worker.call(number, "path"))',
        "yield folder",
        (f"{_ON_RAY}test_files_are_sent_to_workers_that_have_not_this_disk",),
    ),
    Fault(
        "a file that is sent may be written anywhere",
        _ENGINES,
        "if not path.resolve().is_relative_to(home.resolve()):",
        "if False:",
        (f"{_ON_RAY}test_a_file_cannot_leave_the_folder_that_it_is_sent_to",),
    ),
    Fault(
        "processes are started where there is no room",
        _WORKERS,
        "self.engine.require(count)",
        "pass",
        (f"{_ON_ENGINES}test_the_engine_of_a_block_starts_its_processes_and_is_closed_after_them",),
    ),
    Fault(
        "the engine of a block is forgotten",
        _WORKERS,
        "WorkerPool(_run[-1], chosen_engine())",
        "WorkerPool(_run[-1], None)",
        (f"{_ON_ENGINES}test_the_engine_of_a_block_starts_its_processes_and_is_closed_after_them",),
    ),
)
