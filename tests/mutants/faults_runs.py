"""Faults in device placement, in what a run publishes, and in its lock and folder."""

from __future__ import annotations

from tests.mutants.fault import Fault

_DEVICE, _NAMES = "vla_rl/training/device.py", "tests/training/test_device.py::"

_LOCK, _TRACKING = "vla_rl/training/run_lock.py", "vla_rl/training/tracking.py"
_FOLDER = "tests/training/test_tracking.py::"
_LOOP, _LOOP_TESTS = "vla_rl/training/loop.py", "tests/training/test_loop.py::"

FAULTS = (
    Fault(
        "all processes share the first GPU",
        _DEVICE,
        "index, count = local_rank if device.index is None else device.index,",
        "index, count = device.index or 0,",
        (f"{_NAMES}test_every_process_gets_its_own_gpu[cuda]",),
    ),
    Fault(
        "processes share a GPU that is named by its index",
        _DEVICE,
        "device.index is not None and processes > 1",
        "device.index is None and processes < 1",
        (f"{_NAMES}test_a_device_that_cannot_be_used_is_refused",),
    ),
    Fault(
        "a GPU beyond the last one is accepted",
        _DEVICE,
        "if index >= count:",
        "if index > count:",
        (f"{_NAMES}test_a_device_that_cannot_be_used_is_refused",),
    ),
    Fault(
        "the progress of a run stays in its process",
        "vla_rl/experience/process.py",
        "policy.set_progress(progress)",
        "policy.set_progress(0.0)",
        ("tests/experience/test_process.py::test_the_progress_of_the_run_is_published_with_the_weights",),
    ),
    Fault(
        "a resumed run explores as at its start",
        "vla_rl/training/policy_store.py",
        'self.policy.version, self.progress = state["version"], state["progress"]',
        'self.policy.version = state["version"]',
        (f"{_LOOP_TESTS}test_the_share_that_is_done_is_published_with_the_weights",),
    ),
    Fault(
        "the progress of a run counts iterations alone",
        _LOOP,
        "self.store.publish(self.learner.parameters, self.progress())",
        "self.store.publish(self.learner.parameters, self.iteration / max(1, self.config.iterations))",
        (f"{_LOOP_TESTS}test_the_share_of_the_actions_is_published_too",),
    ),
    Fault(
        "a resumed run forgets when it validated last",
        _LOOP,
        'self.validated_at = state["validated_at"]',
        "self.validated_at = self.env_steps",
        (f"{_LOOP_TESTS}test_a_resumed_run_validates_at_the_same_actions",),
    ),
    Fault(
        "without validation the first weights are kept",
        _LOOP,
        "self.best.offer(-math.inf, self.iteration, self.learner.parameters)",
        "pass",
        (f"{_LOOP_TESTS}test_without_validation_the_last_weights_are_kept",),
    ),
    Fault(
        "every iteration validates when none should",
        _LOOP,
        "config.validate_every > 0 and self.iteration % config.validate_every == 0",
        "self.iteration % max(1, config.validate_every) == 0",
        (f"{_LOOP_TESTS}test_validate_every_0_validates_before_and_after",),
    ),
    Fault(
        "a limit of a config is not included",
        "vla_rl/contract/limits.py",
        "if not low <= value <= high:",
        "if value < low or value > high:",
        (f"{_LOOP_TESTS}test_numbers_without_a_meaning_are_refused",),
    ),
    Fault(
        "only the learner must be resumable",
        _LOOP,
        "            if not isinstance(part, Resumable):",
        '            if name == "learner" and not isinstance(part, Resumable):',
        (f"{_LOOP_TESTS}test_a_run_whose_parts_cannot_save_their_state_says_so_and_runs",),
    ),
    Fault(
        "a second process runs in the same folder",
        _LOCK,
        "fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.lockf(descriptor, fcntl.LOCK_UN)",
        (f"{_FOLDER}test_a_folder_in_which_another_process_runs_is_refused_and_left_as_it_is",),
    ),
    Fault(
        "a lock is a file that a dead process leaves",
        _LOCK,
        "        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)",
        "        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)",
        (f"{_FOLDER}test_the_lock_of_a_dead_process_is_taken_over",),
    ),
    Fault(
        "a run that is moved aside takes the lock with it",
        _TRACKING,
        "            self._lock = lock_run(self.path)",
        "            pass",
        (f"{_FOLDER}test_after_a_run_was_moved_aside_the_new_folder_is_locked",),
    ),
    Fault(
        "what a run has recorded is discarded",
        _TRACKING,
        "if self.resumed or any(path.name != START for path in recorded):",
        "if self.resumed:",
        (f"{_FOLDER}test_a_run_that_failed_before_it_recorded_anything_leaves_no_folder",),
    ),
    Fault(
        "returns of several seeds are not tabled",
        "vla_rl/recipes/seeds.py",
        "for name in (_RETURN, *reversed(_RESULTS))",
        "for name in reversed(_RESULTS)",
        ("tests/recipes/test_seeds.py::test_returns_of_several_seeds_are_tabled",),
    ),
    Fault(
        "a run may be written into the working folder",
        "vla_rl/training/run_lock.py",
        "if folder.resolve() == Path.cwd():",
        "if False:",
        ("tests/cli/test_wrong_use.py::test_the_working_folder_is_no_run_folder",),
    ),
    Fault(
        "a run that was moved back is still said to be elsewhere",
        "vla_rl/recipes/recipe.py",
        "if folder.discard_if_empty():",
        "if folder.discard_if_empty() and False:",
        ("tests/cli/test_wrong_use.py::test_an_earlier_run_that_has_its_name_again_is_said_to",),
    ),
    Fault(
        "the earlier run keeps the name it was moved to",
        _TRACKING,
        "        os.replace(self.moved_to, self.path)",
        "        pass",
        (f"{_FOLDER}test_a_run_that_failed_before_it_recorded_anything_leaves_no_folder",),
    ),
    Fault(
        "damaged metrics are lines without a stage",
        _TRACKING,
        'lines.append({**entry, "stage": entry["stage"], "step": entry["step"]})',
        "lines.append(entry)",
        (f"{_FOLDER}test_a_damaged_line_of_the_metrics_is_named",),
    ),
    Fault(
        "only their owner can read the weights",
        "vla_rl/pretrained.py",
        "(fresh / WEIGHTS).chmod((fresh / CONFIG).stat().st_mode)",
        "(fresh / WEIGHTS).chmod(0o600)",
        ("tests/policies/test_tiny.py::test_who_may_read_the_config_may_read_the_weights",),
    ),
    Fault(
        "only their owner can read the tensors of a state",
        "vla_rl/training/checkpoint.py",
        "(writing / _TENSORS).chmod((writing / _TREE).stat().st_mode)",
        "(writing / _TENSORS).chmod(0o600)",
        ("tests/training/test_checkpoint.py::test_who_may_read_the_numbers_of_a_state_may_read_its_tensors",),
    ),
    Fault(
        "a fit may take no step",
        "vla_rl/training/fit.py",
        "check_limits(self, steps=count, batch=count, lr=(0, math.inf)",
        "check_limits(self, batch=count, lr=(0, math.inf)",
        (f"{_FOLDER}test_fits_without_a_meaning_are_refused",),
    ),
    Fault(
        "a metric passes for an entry of the line",
        "vla_rl/training/tracking.py",
        "if taken := sorted(line.keys() & metrics):",
        "if taken := []:",
        ("tests/training/test_trackers.py::test_a_metric_cannot_pass_for_an_entry_of_the_line",),
    ),
)
