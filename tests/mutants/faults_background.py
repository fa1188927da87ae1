"""Faults in collecting with threads, beside the learner."""

from __future__ import annotations

from tests.mutants.fault import Fault

_BACKGROUND, _ON = "vla_rl/experience/background.py", "tests/experience/test_background.py::"
_LOCKSTEP = f"{_ON}test_a_rollout_ahead_is_played_with_the_weights_of_one_update_before"
_PATH = "tests/recipes/test_resume.py::"
_AUDIT = f"{_ON}test_nothing_is_lost_doubled_or_reordered"
_RESUMED = f"{_ON}test_a_saved_run_continues_with_the_same_rollouts"
_ERROR = f"{_ON}test_an_error_of_a_source_is_raised_in_the_learner_and_nothing_is_lost"
_THREADS = f"{_ON}test_each_source_works_in_one_thread_of_its_own"

FAULTS = (
    Fault(
        "after a resume the bound of staleness is exceeded",
        "vla_rl/experience/asynchronous.py",
        "self._begun = len(self._open)",
        "self._begun = 0",
        ("tests/experience/test_asynchronous.py::test_a_resumed_source_is_no_further_ahead_than_before",),
    ),
    Fault(
        "a rollout ahead is played with weights that the learner is changing",
        _BACKGROUND,
        "acting = acting_copy(self.policy) if self.rollouts_ahead and idle else self.policy",
        "acting = self.policy",
        (_LOCKSTEP,),
    ),
    Fault(
        "rollouts ahead are played with the weights of the first copy",
        _BACKGROUND,
        "self.sources[i].policy = acting",
        "self.sources[i].policy = acting if self.sources[i].policy.version == 0 else self.sources[i].policy",
        (_LOCKSTEP,),
    ),
    Fault(
        "nothing is collected ahead",
        _BACKGROUND,
        "if self.rollouts_ahead:",
        "if False:",
        (_LOCKSTEP, f"{_ON}test_a_rollout_ahead_is_collected_while_the_learner_learns"),
    ),
    Fault(
        "a rollout is delivered twice",
        _BACKGROUND,
        "rollouts = [pending.result() for pending in self._pending if pending is not None]",
        "rollouts = [pending.result() for pending in self._pending[:1] * len(self._pending) if pending is not None]",
        (_AUDIT,),
    ),
    Fault(
        "the rollout that was being collected is not saved",
        _BACKGROUND,
        "None if pending is None else saved_rollout(pending.result()) for pending in self._pending",
        "None for _ in self._pending",
        (_RESUMED,),
    ),
    Fault(
        "a saved rollout is collected again when the run is resumed",
        _BACKGROUND,
        'self._pending[i] = _finished(state["pending"][i])',
        "self._pending[i] = None",
        (_RESUMED,),
    ),
    Fault(
        "the state is saved while rollouts are being collected",
        _BACKGROUND,
        '"sources": [self._ask(i, source.state_dict) for i, source in enumerate(self.sources)],',
        '"sources": [source.state_dict() for source in self.sources],',
        (_THREADS,),
    ),
    Fault(
        "one failing source costs the other its rollout",
        _BACKGROUND,
        "self._pending = [None if pending in failed else pending for pending in self._pending]",
        "self._pending = [None if failed else pending for pending in self._pending]",
        (_ERROR,),
    ),
    Fault(
        "the error of a source is raised for ever",
        _BACKGROUND,
        "self._pending = [None if pending in failed else pending for pending in self._pending]",
        "failed = list(failed)",
        (_ERROR,),
    ),
    Fault(
        "a source is resumed in the caller's thread",
        _BACKGROUND,
        'self._ask(i, partial(source.load_state_dict, state["sources"][i]))',
        'source.load_state_dict(state["sources"][i])',
        (_THREADS,),
    ),
    Fault(
        "environments are closed in the caller's thread",
        _BACKGROUND,
        "thread.submit(source.close).result()",
        "source.close()",
        (_THREADS,),
    ),
    Fault(
        "threads outlive their source",
        _BACKGROUND,
        "thread.shutdown()",
        "pass",
        (_THREADS,),
    ),
    Fault(
        "counters of one source stand for all",
        _BACKGROUND,
        'value / len(rollouts) if name.endswith("_s") else value',
        "value / len(rollouts)",
        (_AUDIT,),
    ),
    Fault(
        "the copy that acts owns a copy of the frozen backbone as well",
        _BACKGROUND,
        "return copy.deepcopy(policy, shared)",
        "return copy.deepcopy(policy)",
        (f"{_ON}test_parameters_that_never_change_are_shared_with_the_copies",),
    ),
    Fault(
        "the copy that acts shares what the learner changes",
        _BACKGROUND,
        "for item in policy.parameters() if id(item) not in moving}",
        "for item in policy.parameters()}",
        (f"{_ON}test_parameters_that_never_change_are_shared_with_the_copies",),
    ),
    Fault(
        "the state of a run holds what clocks say",
        _BACKGROUND,
        'for name, value in rollout.info.items() if not name.endswith("_s")}',
        "for name, value in rollout.info.items()}",
        (f"{_PATH}test_a_killed_run_goes_on_and_ends_the_same",),
    ),
    Fault(
        "all collecting threads play the same seeds with the same noise",
        "vla_rl/recipes/context.py",
        "return [replace(self, collector=i, collectors=collectors) for i in range(collectors)]",
        "return [replace(self, collectors=collectors) for i in range(collectors)]",
        (
            "tests/recipes/test_trainers.py::test_the_collectors_of_all_processes_play_different_seeds_with_different_noise",
        ),
    ),
    Fault(
        "two processes play the seeds of each other's threads",
        "vla_rl/recipes/context.py",
        "return self.group.rank * self.collectors + self.collector",
        "return self.group.rank + self.collector",
        (
            "tests/recipes/test_trainers.py::test_the_collectors_of_all_processes_play_different_seeds_with_different_noise",
        ),
    ),
    Fault(
        "rollouts_ahead is ignored",
        "vla_rl/recipes/training_setup.py",
        "closing(BackgroundSource(sources, policy, loop.rollouts_ahead))",
        "closing(BackgroundSource(sources, policy))",
        (f"{_PATH}test_a_rollout_ahead_is_one_version_old_in_a_whole_run",),
    ),
)
