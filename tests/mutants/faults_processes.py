"""Faults in worker processes: what they collect and evaluate, and how they end."""

from __future__ import annotations

from tests.mutants.fault import Fault

_WORKER, _ON_WORKER = "vla_rl/experience/worker.py", "tests/experience/test_worker.py::"
_CHILD = "vla_rl/contract/child.py"
_PROCESS, _ON_PROCESS = "vla_rl/experience/process.py", "tests/experience/test_process.py::"
_EVALUATORS = "vla_rl/recipes/evaluators.py"
_OUTCOMES = "tests/recipes/test_evaluators.py::test_outcomes_do_not_depend_on_the_number_of_processes"
_COLLECTORS = (
    "tests/recipes/test_trainers.py::test_collectors_are_processes_whose_rollouts_are_those_of_sources_here",
)
_RESUMED = (f"{_ON_PROCESS}test_a_saved_source_continues_with_the_same_rollouts",)
_PUBLISHED = (f"{_ON_PROCESS}test_a_policy_is_published_with_its_version_and_the_progress",)

FAULTS = (
    Fault(
        "outcomes of processes come one process after the other",
        _EVALUATORS,
        "merged[i::step] = array",
        "merged[sum(map(len, arrays[:i])) : sum(map(len, arrays[: i + 1]))] = array",
        (_OUTCOMES,),
    ),
    Fault(
        "every process plays all seeds but the first ones",
        _EVALUATORS,
        "seeds[part::count]",
        "seeds[part:]",
        (_OUTCOMES,),
    ),
    Fault(
        "progress is that of the process that reported last",
        _EVALUATORS,
        "report(*(sum(counts) for counts in zip(*ended, strict=True)))",
        "report(episodes, successes)",
        (_OUTCOMES,),
    ),
    Fault(
        "all processes collect the first share",
        "vla_rl/recipes/collectors.py",
        '"part": self._shares[i].part}',
        '"part": 0}',
        _COLLECTORS,
    ),
    Fault(
        "collectors never hear of the progress of the run",
        "vla_rl/recipes/training_setup.py",
        "lambda: store.progress",
        "lambda: 0.0",
        ("tests/recipes/test_resume.py::test_the_noise_of_collecting_processes_falls_as_that_of_one",),
    ),
    Fault(
        "weights are published without their version",
        _PROCESS,
        ', "version": int(policy.version)}',
        "}",
        _PUBLISHED,
    ),
    Fault(
        "weights are published without the progress",
        _PROCESS,
        '"progress": self._progress(),',
        '"progress": 0.0,',
        _PUBLISHED,
    ),
    Fault(
        "a policy is set but never sent",
        _PROCESS,
        '{"weights": changing(policy),',
        '{"weights": {},',
        _PUBLISHED,
    ),
    Fault(
        "frozen weights are sent at every rollout",
        _PROCESS,
        "if name not in frozen}",
        "}",
        (f"{_ON_PROCESS}test_frozen_weights_are_not_sent",),
    ),
    Fault(
        "a resumed process starts from the beginning",
        _PROCESS,
        "self.source.load_state_dict(state)",
        "pass",
        _RESUMED,
    ),
    Fault(
        "a source ends the process that others use",
        _PROCESS,
        "elif self.worker.alive:",
        "if self.worker.close() is None and self.worker.alive:",
        (f"{_ON_PROCESS}test_several_sources_share_a_process_that_outlives_them",),
    ),
    Fault(
        "all objects of a process are the first one",
        _WORKER,
        "called = self.objects[number]",
        "called = self.objects[0]",
        (f"{_ON_WORKER}test_objects_keep_what_they_are_told_apart",),
    ),
    Fault(
        "reports of a process are dropped",
        _WORKER,
        'report(*answer["report"])',
        "pass",
        (f"{_ON_WORKER}test_reports_arrive_in_order_before_the_answer",),
    ),
    Fault(
        "threads talk to a process at the same time",
        _WORKER,
        "with self._lock:  # one request at a time",
        "if True:",
        (f"{_ON_WORKER}test_requests_of_several_threads_wait_for_each_other",),
    ),
    Fault(
        "the answer to an interrupted request is taken for the next one's",
        _WORKER,
        "if self._link.closed or self._answering:",
        "if self._link.closed:",
        (f"{_ON_WORKER}test_a_request_that_was_interrupted_leaves_a_process_that_only_can_be_closed",),
    ),
    Fault(
        "a signal to the whole group ends the processes before their owner has saved",
        _CHILD,
        "signal.signal(number, signal.SIG_IGN)",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        (f"{_ON_WORKER}test_signals_that_reach_the_whole_group_do_not_end_it",),
    ),
    Fault(
        "private methods can be called from another process",
        _WORKER,
        'if not name.startswith("_")]',
        "]",
        (f"{_ON_WORKER}test_an_unknown_method_is_named_with_the_nearest_one",),
    ),
    Fault(
        "arrays inside lists stay numpy's",
        _WORKER,
        "return [as_tensors(item) for item in value]",
        "return value",
        (f"{_ON_WORKER}test_tensors_and_arrays_arrive_as_tensors_also_inside_lists",),
    ),
    Fault(
        "the processes of a run outlive it",
        "vla_rl/recipes/workers.py",
        "_pools.pop().close()",
        "_pools.pop()",
        ("tests/recipes/test_evaluators.py::test_processes_end_with_the_run",),
    ),
    Fault(
        "worker processes compute with every core",
        "vla_rl/recipes/launchers.py",
        '"OMP_NUM_THREADS": "1", ',
        "",
        ("tests/recipes/test_threads.py::test_worker_processes_compute_with_one_thread",),
    ),
    Fault(
        "two processes compute with every core each",
        "vla_rl/training/threads.py",
        'os.environ[ALONE] = "1"',
        "pass",
        ("tests/recipes/test_threads.py::test_a_stage_that_other_processes_run_beside_has_one_thread",),
    ),
    Fault(
        "what computes in the background takes time from the run",
        "vla_rl/recipes/workers.py",
        "_LOW_PRIORITY = 10",
        "_LOW_PRIORITY = 0",
        ("tests/recipes/test_imitation_study.py::test_the_background_finds_what_this_process_finds",),
    ),
    Fault(
        "the plateau has one number of steps only",
        "vla_rl/recipes/imitation_study.py",
        "steps=2 * self.imitation.fit.steps",
        "steps=self.imitation.fit.steps",
        ("tests/recipes/test_imitation_study.py::test_the_background_finds_what_this_process_finds",),
    ),
    Fault(
        "a background job waits for an idle core even when it is needed",
        "vla_rl/recipes/workers.py",
        "if self._future.cancel():",
        "if False:",
        (
            "tests/recipes/test_imitation_study.py::test_a_background_job_that_has_not_begun_is_done_at_once_when_needed",
        ),
    ),
    Fault(
        "a stream is closed while another thread reads it",
        _WORKER,
        "with self._lock:  # another thread that is reading sees the end of its stream first",
        "if True:",
        (f"{_ON_WORKER}test_closing_while_another_thread_waits_for_an_answer_ends_both",),
    ),
    Fault(
        "Ctrl-C ends a process that is still starting with a traceback",
        _CHILD,
        "process_group=0, ",
        "",
        (f"{_ON_WORKER}test_signals_that_reach_the_whole_group_do_not_end_it",),
    ),
    Fault(
        "the process group outlives its end",
        "vla_rl/training/distributed.py",
        'importlib.import_module("torch.distributed.nn.functional")',
        "importlib.import_module",
        ("tests/training/test_distributed.py::test_two_processes_end_with_the_weights_of_one",),
    ),
    Fault(
        "what a worker has started outlives its owner",
        _CHILD,
        "if os.getpgrp() == os.getpid():",
        "if False:",
        ("tests/contract/test_child.py::test_a_process_at_work_ends_with_its_owner",),
    ),
)
