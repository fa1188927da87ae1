"""Faults in resuming and in sharing a batch between processes."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STATE, _TRACKING, _SOURCE = (
    "vla_rl/training/checkpoint.py",
    "vla_rl/training/tracking.py",
    "vla_rl/experience/rollout.py",
)
_SHARED, _LOOP = "vla_rl/algorithms/policy_gradient.py", "vla_rl/training/loop.py"
_ON_STATE, _ON_RESUME = "tests/training/test_checkpoint.py::", "tests/recipes/test_resume.py::"
_LONGER = f"{_ON_RESUME}test_a_finished_run_goes_on_to_a_larger_number_of_iterations"
_SAME = f"{_ON_RESUME}test_a_killed_run_goes_on_and_ends_the_same"
_TWO = "tests/algorithms/test_ppo_updates.py::test_two_processes_that_share_the_data_end_with_the_weights_of_one"

_ON_PRETRAINING = "tests/recipes/test_pretraining.py::"

_SHARED_STATE, _ON_SHARED = "vla_rl/training/shared_state.py", "tests/training/test_shared_state.py::"

_IN_STEP = "tests/algorithms/test_ppo_updates.py::test_processes_that_share_weights_run_the_policy_equally_often"

FAULTS = (
    Fault(
        "a process with fewer decisions runs the policy less often than the others",
        _SHARED,
        "* (self.reducer.passes(len(own)) - len(own))",
        "* 0",
        (_IN_STEP,),
    ),
    Fault(
        "what processes have in common is saved by each",
        _SHARED_STATE,
        "if _key(name, item) not in known}",
        "if name}",
        (f"{_ON_SHARED}test_each_process_gets_its_own_state_and_what_is_common_is_there_once",),
    ),
    Fault(
        "tensors of one content are taken for one another whatever their name",
        _SHARED_STATE,
        'f"{name} {tensor.dtype} {list(tensor.shape)}"',
        'f"{tensor.dtype} {list(tensor.shape)}"',
        (f"{_ON_SHARED}test_each_process_gets_its_own_state_and_what_is_common_is_there_once",),
    ),
    Fault(
        "each process goes on from its own newest state",
        _SHARED_STATE,
        "return step, read_state(own, path) if group.rank else",
        "return step, read_state(newest(own.parent), path) if group.rank else",
        (f"{_ON_SHARED}test_killed_before_the_last_file_both_go_on_from_the_step_before",),
    ),
    Fault(
        "a run goes on in another number of processes",
        _SHARED_STATE,
        "if begun == size:",
        "if begun:",
        (f"{_ON_SHARED}test_another_number_of_processes_is_refused",),
    ),
    Fault(
        "a process that was ready before the others cannot go on",
        _TRACKING,
        'if (folder.run / "summary.json").exists():',
        'if (folder.path / "summary.json").exists():',
        (f"{_ON_SHARED}test_a_process_that_was_ready_before_the_others_goes_on",),
    ),
    Fault(
        "what was learnt before the first iteration is not saved",
        "vla_rl/recipes/stages.py",
        "elif pretrained and can_resume:",
        "elif False:",
        (f"{_ON_PRETRAINING}test_a_run_that_is_killed_after_pre_training_goes_on_without_it",),
    ),
    Fault(
        "a state before the first iteration is not found",
        "vla_rl/training/checkpoint.py",
        'step.removeprefix("-").isdigit()',
        "step.isdigit()",
        (f"{_ON_PRETRAINING}test_a_run_that_is_killed_after_pre_training_goes_on_without_it",),
    ),
    Fault(
        "a state is removed before the next one of its step has its name",
        _STATE,
        "os.replace(final, old)",
        "shutil.rmtree(final, ignore_errors=True)",
        (f"{_ON_STATE}test_killed_while_a_state_of_the_same_step_is_replaced_one_of_both_is_whole",),
    ),
    Fault(
        "a state that was being replaced is not found",
        _STATE,
        "(step == path.name or not path.with_name(step).exists())",
        "step == path.name",
        (f"{_ON_STATE}test_killed_while_a_state_of_the_same_step_is_replaced_one_of_both_is_whole",),
    ),
    Fault(
        "a run reports its first validation twice",
        "vla_rl/recipes/stages.py",
        "folder.save_state(-1, loop.state_dict())",
        "folder.save_state(0, loop.state_dict())",
        (f"{_ON_PRETRAINING}test_a_run_that_is_killed_after_pre_training_goes_on_without_it[the first state]",),
    ),
    Fault(
        "on-policy runs save a state before they begin",
        "vla_rl/recipes/trainers.py",
        "        return False",
        "        return True",
        (f"{_ON_PRETRAINING}test_on_policy_runs_save_nothing_before_their_first_iteration",),
    ),
    Fault(
        "a state has its name before it is complete",
        _STATE,
        "writing = final.with_name(final.name + _WRITING)",
        "writing = final",
        (f"{_ON_STATE}test_killed_while_writing_there_is_always_a_whole_state",),
    ),
    Fault(
        "the oldest state is the newest",
        _STATE,
        "return max(_complete(folder), default=None)",
        "return min(_complete(folder), default=None)",
        (f"{_ON_STATE}test_the_newest_two_are_kept",),
    ),
    Fault(
        "a resumed optimizer starts without its moments",
        _SHARED,
        'self.optimizer.load_state_dict(state["optimizer"])',
        "pass",
        (_SAME,),
    ),
    Fault(
        "minibatches are drawn from the start again",
        _SHARED,
        'self.generator.set_state(state["generator"])',
        "pass",
        (_SAME,),
    ),
    Fault(
        "the warm-up of the critic is repeated",
        _SHARED,
        'self.iteration = state["iteration"]',
        "self.iteration = 0",
        (_SAME,),
    ),
    Fault(
        "exploration is drawn from the start again",
        _SOURCE,
        'self.generator.set_state(state["generator"])',
        "pass",
        (_SAME,),
    ),
    Fault(
        "a resumed run plays its first seeds again",
        _SOURCE,
        'self.seeds.load_state_dict(state["seeds"])',
        "pass",
        (_SAME,),
    ),
    Fault(
        "a resumed run starts new episodes everywhere",
        _SOURCE,
        'self.env.restore(np.arange(self.env.num_envs), state["env"])',
        "self._reset(np.arange(self.env.num_envs))",
        (_SAME,),
    ),
    Fault(
        "the best weights so far are forgotten",
        _LOOP,
        'self.best = BestWeights(**state["best"])',
        'self.best = BestWeights(-1.0, 0, state["best"]["weights"])',
        ("tests/training/test_loop.py::test_a_loop_goes_on_with_its_best_weights_and_its_counters",),
    ),
    Fault(
        "a repeated iteration is reported twice",
        _TRACKING,
        'line["stage"] != stage or line["step"] <= step',
        'line["stage"] != stage or line["step"] <= step + 1',
        (f"{_ON_RESUME}test_a_line_that_was_cut_off_is_forgotten_with_those_after_the_state",),
    ),
    Fault(
        "each process draws minibatches of its own decisions",
        _SHARED,
        "sizes = self.reducer.sum(sizes)",
        "pass",
        (_TWO,),
    ),
    Fault(
        "a small part of a minibatch counts as much as a large one",
        _SHARED,
        "yield local, len(local) / len(part)",
        "yield local, float(len(local) > 0) / self.reducer.size",
        (_TWO,),
    ),
    Fault(
        "the KL stop looks at one process",
        _SHARED,
        "self.reducer.sum(sum(stats))",
        "sum(stats)",
        (_TWO,),
    ),
    Fault(
        "the critic is calibrated on one process's data",
        "vla_rl/policies/heads.py",
        "mean = reducer.sum(inputs.sum(0)) / count",
        "mean = inputs.mean(0)",
        (_TWO,),
    ),
    Fault(
        "a longer run forgets its first summary",
        _TRACKING,
        'os.replace(run / "summary.json", kept)',
        '(run / "summary.json").unlink()',
        (_LONGER,),
    ),
    Fault(
        "a longer run may be a shorter one",
        "vla_rl/recipes/recipe.py",
        "longer = isinstance(before, int) and isinstance(after, int) and after > before > 0",
        "longer = True",
        (_LONGER,),
    ),
    Fault(
        "a resumed run takes any change",
        "vla_rl/recipes/recipe.py",
        "if not name.endswith(_LENGTHS):",
        "if False:",
        (f"{_ON_RESUME}test_a_run_that_cannot_be_resumed_is_refused",),
    ),
)
