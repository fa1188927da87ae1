"""Faults in sweeps whose cells may lose what runs them, and in what launches their commands."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SWEEP, _LAUNCHERS, _ENGINES = (f"vla_rl/recipes/{name}.py" for name in ("sweep", "launchers", "engines"))
_ON_SWEEPS = "tests/recipes/test_sweep.py::test_"
_LOST = f"{_ON_SWEEPS}a_cell_that_is_lost_goes_on_from_its_state"

FAULTS = (
    Fault(
        "a lost cell begins anew",
        _SWEEP,
        'started = (self.out / "config.json").exists()',
        "started = False",
        (_LOST,),
    ),
    Fault(
        "a cell that was finished when it was lost is run again",
        _SWEEP,
        "if self.finished():",
        "if False:",
        (f"{_ON_SWEEPS}a_cell_that_was_finished_when_its_machine_died_is_not_run_again",),
    ),
    Fault(
        "a cell that was lost too often counts as run",
        _SWEEP,
        "if attempt == ATTEMPTS:",
        "if False:",
        (f"{_ON_SWEEPS}a_cell_is_not_started_for_ever_and_a_failure_not_again",),
    ),
    Fault(
        "a cell goes on beside what still writes its folder",
        _SWEEP,
        "await_unlocked(self.out, _LEASE)",
        "pass",
        (f"{_ON_SWEEPS}before_it_goes_on_what_has_locked_its_folder_has_ended",),
    ),
    Fault(
        "the lock of another process is not seen",
        "vla_rl/training/run_lock.py",
        "while _locked(folder / LOCK) and time.monotonic() < end:",
        "while False:",
        (f"{_ON_SWEEPS}before_it_goes_on_what_has_locked_its_folder_has_ended",),
    ),
    Fault(
        "Ctrl-C waits for the runs of a cluster",
        _SWEEP,
        "launcher.close()  # the pool waits for what runs",
        "pass",
        (f"{_ON_SWEEPS}ctrl_c_ends_what_runs_and_says_how_to_go_on",),
    ),
    Fault(
        "finished cells take room in the cluster",
        _SWEEP,
        "count = min(processes, len(left))",
        "count = processes",
        (f"{_ON_SWEEPS}the_engine_of_the_block_launches_what_is_left",),
    ),
    Fault(
        "the address of a cluster is not heard of",
        "vla_rl/recipes/workers.py",
        "new_engine(self.engine, self.address, self.gpus)",
        'new_engine(self.engine, "", self.gpus)',
        (f"{_ON_SWEEPS}options_of_a_sweep_choose_its_engine",),
    ),
    Fault(
        "a command outlives what it belongs to",
        "vla_rl/cli/owned.py",
        "end_with_owner()  # before the seconds that imports take",
        "pass",
        (f"{_ON_SWEEPS}a_command_ends_with_the_process_that_it_belongs_to",),
    ),
    Fault(
        "a cell that was stopped is tried again",
        _LAUNCHERS,
        "if self._closed:  # that is why it was lost: nobody should try again",
        "if False:",
        (f"{_ON_SWEEPS}a_command_ends_with_its_worker_and_with_its_launcher",),
    ),
    Fault(
        "a machine without the folder is used",
        "vla_rl/recipes/shared_disk.py",
        'if not out.is_file() or out.read_text(encoding="utf-8") != token:',
        "if False:",
        (f"{_ON_SWEEPS}a_machine_that_does_not_share_the_folder_is_refused_before_anything_runs",),
    ),
    Fault(
        "GPUs that nobody gives are asked for in silence",
        _ENGINES,
        '("--gpus", f"{gpus:g}" if gpus else "")',
        '("--gpus", "")',
        ("tests/recipes/test_engines.py::test_a_mistake_is_one_sentence",),
    ),
)
