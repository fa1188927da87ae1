"""Faults around ManiSkill: its controls, seeds, ends and drivers."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ON = "tests/sims/test_maniskill.py::"
_ENV, _CONTROLS, _SEEDS = "sims/maniskill/env.py", "sims/maniskill/controls.py", "sims/maniskill/seeds.py"
_LIFT, _ON_LIFT = "sims/maniskill/lift_world.py", "tests/sims/test_maniskill_lift.py::"
_FRAME = "test_an_episode_asks_for_the_red_cube_and_tells_places_in_the_tables_frame"
_BUILD, _MEMORY = "sims/maniskill/build.py", "tests/sims/isolation/test_memory.py::"
_RECYCLING = "tests/sims/isolation/test_recycling.py::"
_SUCCESS = f"{_ON}test_success_need_not_end_an_episode_and_is_remembered"
_ENDS = f"{_ON}test_success_failure_the_time_limit_and_what_is_not_finite_end_an_episode"
_ENDED = f"{_ON}test_an_ended_episode_shows_the_moment_of_its_end_while_its_world_goes_on"
_ROWS = f"{_ON}test_a_row_draws_what_it_draws_alone"

FAULTS = (
    Fault(
        "a rotation in ManiSkill turns the other way",
        _CONTROLS,
        "offset[3:], scale[3:] = 0.0, controller.config.rot_lower",
        "offset[3:], scale[3:] = 0.0, -np.float32(controller.config.rot_lower)",
        (f"{_ON}test_a_rotation_turns_the_way_that_its_action_says_although_maniskill_multiplies_by_the_lower_bound",),
    ),
    Fault(
        "the middle of the gripper's range is lost",
        _CONTROLS,
        "offset, scale = (high + low) / 2, (high - low) / 2",
        "scale = (high - low) / 2",
        (f"{_ON}test_changes_of_joints_are_in_radians_and_the_gripper_in_metres",),
    ),
    Fault(
        "a finger that follows another has an action of its own",
        _CONTROLS,
        "return list(range(len(controller.joints))) if chosen is None else [int(i) for i in chosen]",
        "return list(range(len(controller.joints)))",
        (f"{_ON}test_changes_of_joints_are_in_radians_and_the_gripper_in_metres",),
    ),
    Fault(
        "success ends an episode that should go on",
        _ENV,
        "cause = np.where(success > 0, SUCCESS, cause) if self._ends_at_success else cause",
        "cause = np.where(success > 0, SUCCESS, cause)",
        (_SUCCESS,),
    ),
    Fault(
        "success is forgotten when the object moves on",
        _ENV,
        "succeeded = (success > 0) | self._book.success[env_ids]",
        "succeeded = success > 0",
        (_SUCCESS,),
    ),
    Fault(
        "what is not finite is shown",
        _ENV,
        "self._keep(rows, own[found[3, own] > 0], state, hidden)",
        "self._keep(rows, own, state, hidden)",
        (_ENDS,),
    ),
    Fault(
        "an ended episode is photographed when its world has moved on",
        _ENV,
        "if ended.size and self._images:",
        "if not ended.size and self._images:",
        (_ENDED,),
    ),
    Fault(
        "a restored episode is not replayed",
        _ENV,
        "for action in self._actions[env_id, : self._book.time[env_id]]:",
        "for action in self._actions[env_id, :0]:",
        (f"{_ON}test_a_snapshot_of_an_ended_episode_shows_its_end_again",),
    ),
    Fault(
        "all rows of a reset share one generator",
        _SEEDS,
        "self._generators = [torch.Generator().manual_seed(folded(seed)) for seed in seeds]",
        "self._generators = [torch.Generator().manual_seed(folded(seeds[0])) for seed in seeds]",
        (_ROWS,),
    ),
    Fault(
        "a picture driver that is too old counts as usable",
        "sims/maniskill/vulkan.py",
        "return not self.software or self.version[:2] >= NEEDED",
        "return True",
        (f"{_ON}test_a_driver_that_is_too_old_or_missing_is_told_with_its_cure",),
    ),
    Fault(
        "a worker of ManiSkill does not find the unpacked driver",
        "sims/maniskill/mesa.py",
        "if manifest.exists()}",
        "if not manifest.exists()}",
        (f"{_ON}test_a_driver_that_was_unpacked_is_found_by_the_processes",),
    ),
    Fault(
        "a worker that leaks is never replaced",
        "sims/isolation/env.py",
        "if worker.worn >= (_WAIT if running else 1.0):",
        "if worker.worn < 0:",
        (f"{_RECYCLING}test_a_worker_that_has_worked_enough_is_replaced_between_episodes_and_nothing_else_changes",),
    ),
    Fault(
        "a worker is replaced in the middle of an episode",
        "sims/isolation/env.py",
        "_WAIT = 1.25  #",
        "_WAIT = 1.0  #",
        (f"{_RECYCLING}test_it_waits_for_an_episode_that_is_running_but_not_for_ever",),
    ),
    Fault(
        "as many simulations of ManiSkill as one likes",
        _BUILD,
        "if num_envs >= _MANY and len(worlds) == 2 * _FEW:",
        "if num_envs < 0:",
        (f"{_ON}test_too_many_simulations_on_the_processor_are_refused_by_what_the_process_grows_by",),
    ),
    Fault(
        "an environment of ManiSkill on a GPU seems to take what the whole simulation takes",
        _BUILD,
        "max(0, taken[1] - taken[0]) // _FEW",
        "max(0, taken[1]) // _FEW",
        (f"{_ON}test_too_many_environments_on_a_gpu_are_refused_by_the_difference_of_two_small_simulations",),
    ),
    Fault(
        "as many workers as one likes",
        "sims/isolated.py",
        "if count * each > SHARE * free:",
        "if count * each < 0:",
        (f"{_MEMORY}test_too_many_workers_are_refused_when_the_first_one_shows_what_one_takes",),
    ),
    Fault(
        "memory of files that processes share counts for each",
        "sims/host_memory.py",
        'return (_kilobytes(status, "RssAnon") + _kilobytes(status, "RssShmem")) * 1024',
        'return _kilobytes(status, "VmSize") * 1024',
        (f"{_MEMORY}test_a_process_counts_what_is_its_own",),
    ),
    Fault(
        "ManiSkill's frame is turned the other way",
        _LIFT,
        "torch.stack([position[:, 1], -position[:, 0],",
        "torch.stack([-position[:, 1], position[:, 0],",
        (f"{_ON_LIFT}test_the_expert_of_mujocos_lift_lifts_the_cube", f"{_ON_LIFT}{_FRAME}"),
    ),
    Fault(
        "an episode in ManiSkill inherits how long the last cube was up",
        _LIFT,
        "self._ctrl[index, 3], self._held[index] = FINGER_OPEN, 0",
        "self._ctrl[index, 3] = FINGER_OPEN",
        (f"{_ON_LIFT}test_success_is_the_cube_up_for_five_control_steps_in_a_row",),
    ),
    Fault(
        "the arm of ManiSkill is commanded to stay outside the workspace",
        _LIFT,
        "self._pinch()[index].clamp(self._low, self._high)",
        "self._pinch()[index]",
        (f"{_ON_LIFT}test_actions_move_the_commanded_point_and_close_the_fingers",),
    ),
)
