"""Faults in the estimate of a run's memory, and in what is said when memory runs out."""

from __future__ import annotations

from tests.mutants.fault import Fault

_LIVE, _SHAPES, _MEMORY = "vla_rl/training/live_bytes.py", "vla_rl/training/shapes_only.py", "vla_rl/recipes/memory.py"
_ERRORS, _KNOBS, _LOOP = "vla_rl/training/out_of_memory.py", "vla_rl/recipes/memory_knobs.py", "vla_rl/training/loop.py"
_ON_LIVE, _ON_SHAPES = "tests/training/test_live_bytes.py::", "tests/training/test_shapes_only.py::"
_ON_ERRORS, _ON_MEMORY = "tests/training/test_out_of_memory.py::", "tests/recipes/test_memory.py::"
_ON_INSPECT = "tests/cli/test_inspect.py::"

FAULTS = (
    Fault(
        "freed tensors count as alive",
        _LIVE,
        "self.now -= self._sizes.pop(key)",
        "self._sizes.pop(key)",
        (f"{_ON_LIVE}test_views_count_once_and_what_is_freed_counts_no_more",),
    ),
    Fault(
        "tensors that are only read do not count",
        _LIVE,
        "tree_leaves((args, kwargs, out))",
        "tree_leaves(out)",
        (f"{_ON_LIVE}test_what_came_before_counts_from_its_first_use",),
    ),
    Fault(
        "masks select everything when only shapes are there",
        _SHAPES,
        "self._value(index).nonzero(as_tuple=True)",
        "torch.ones_like(self._value(index)).nonzero(as_tuple=True)",
        (f"{_ON_SHAPES}test_masks_and_indices_select_what_they_select",),
    ),
    Fault(
        "rewards are forgotten when only shapes are there",
        _SHAPES,
        "few and all(map(self._is_known, given))",
        "False",
        (f"{_ON_SHAPES}test_small_floats_of_known_numbers_are_known_and_others_are_zero",),
    ),
    Fault(
        "a replay buffer on the disk counts as memory",
        _MEMORY,
        "found.replay -= found.on_disk",
        "pass",
        (f"{_ON_MEMORY}test_a_replay_buffer_on_the_disk_takes_no_memory",),
    ),
    Fault(
        "the estimate makes the files of a replay buffer",
        _MEMORY,
        'return (replace(trainer, replay=replace(trainer.replay, folder="")) if on_disk else trainer), on_disk',
        "return trainer, on_disk",
        (f"{_ON_MEMORY}test_a_replay_buffer_on_the_disk_takes_no_memory",),
    ),
    Fault(
        "the weights of a checkpoint are read for an estimate",
        "vla_rl/pretrained.py",
        'if torch.get_default_device().type != "meta":',
        "if True:",
        (f"{_ON_MEMORY}test_the_weights_of_a_checkpoint_are_not_read",),
    ),
    Fault(
        "inspect marks what a VLA does not keep",
        "vla_rl/recipes/memory_tables.py",
        '("prefix", "pictures")[not isinstance',
        '("pictures", "prefix")[not isinstance',
        (f"{_ON_INSPECT}test_a_vla_shows_both_that_it_could_keep_and_what_was_chosen",),
    ),
    Fault(
        "out of memory while learning is said of collecting",
        _LOOP,
        "with phase_of_memory(LEARN), self",
        "with phase_of_memory(COLLECT), self",
        (f"{_ON_ERRORS}test_the_loop_says_in_which_phase",),
    ),
    Fault(
        "every error of torch is out of memory",
        _ERRORS,
        "if not any(text in str(error) for text in _ON_HOST):",
        "if False:",
        (f"{_ON_ERRORS}test_what_another_process_says_is_recognized_and_other_errors_are_left_alone",),
    ),
    Fault(
        "what the host's allocator says is not recognized",
        _ERRORS,
        '"DefaultCPUAllocator: can\'t allocate memory", ',
        "",
        (f"{_ON_ERRORS}test_what_the_host_refuses_is_recognized",),
    ),
    Fault(
        "knobs of other phases are named",
        _KNOBS,
        "if error.phase in phases",
        "if phases",
        (f"{_ON_ERRORS}test_the_knobs_are_those_of_the_run_and_of_the_phase",),
    ),
    Fault(
        "a replay buffer on the disk is advised to be put there",
        _KNOBS,
        "if replay is not None and not replay.folder:",
        "if replay is not None:",
        (f"{_ON_ERRORS}test_the_knobs_are_those_of_the_run_and_of_the_phase",),
    ),
    Fault(
        "a VLA that keeps pictures is advised to keep them",
        _KNOBS,
        'if any(isinstance(getattr(item, "kept", None), KeepPrefix) for item in _modules(policy)):',
        "if vlas:",
        (f"{_ON_ERRORS}test_a_vla_has_knobs_of_its_own",),
    ),
)
