"""Faults in the Genesis environment."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _LIFT, _ENGINE = (f"sims/genesis/{name}.py" for name in ("env", "lift", "engine"))
_ARM = "sims/franka.py"
_ON = "tests/sims/test_genesis.py::"
_ALONE = f"{_ON}test_one_environment_that_diverges_ends_alone_at_its_last_good_state"
_IDLE = f"{_ON}test_an_environment_that_has_ended_stays_as_it_is_while_others_move"
_SAME = f"{_ON}test_a_seed_means_the_same_scene_as_in_mujoco"
_CONTRACT, _EXPERT = f"{_ON}test_it_keeps_the_contract", f"{_ON}test_the_expert_of_mujocos_lift_lifts_the_named_cube"
_PLACES = f"{_ON}test_the_joints_put_the_fingers_where_they_are_wanted"
_PICTURES = f"{_ON}test_pictures_are_made_once_for_what_moved"

FAULTS = (
    Fault(
        "a diverged environment keeps its broken state",
        _ENV,
        "good = running & ~diverged",
        "good = running",
        (_ALONE,),
    ),
    Fault(
        "a diverged environment goes on",
        _ENV,
        "torch.where(diverged, DIVERGED, torch.where(success, SUCCESS, cause))",
        "torch.where(success, SUCCESS, cause)",
        (_ALONE,),
    ),
    Fault(
        "an idle environment moves with the others",
        _ENV,
        "after.where(good, self._rows)",
        "after.where(~diverged, self._rows)",
        (_IDLE,),
    ),
    Fault(
        "an environment of Genesis that idles ends again",
        _ENV,
        "torch.where(running, cause, 0)",
        "cause",
        (_IDLE,),
    ),
    Fault(
        "the Genesis environment waits until what it sends has arrived",
        _ENV,
        "torch.from_numpy(np.array(item)).to(self._device, non_blocking=True)",
        "torch.from_numpy(np.array(item)).to(self._device)",
        (f"{_ON}test_a_decision_on_a_gpu_waits_for_it_once_and_is_that_of_the_processor",),
    ),
    Fault(
        "the state of the task goes on where an environment of Genesis idles",
        _ENV,
        "torch.where(running.reshape(-1, *(1,) * (old.ndim - 1)), new, old)",
        "new",
        (_IDLE,),
    ),
    Fault(
        "a cube has the colour of its number",
        _ENV,
        'cubes[every, task_state["colour"]] =',
        "cubes[every, np.arange(poses.shape[1])] =",
        (_SAME,),
    ),
    Fault(
        "an episode begins with the velocities of the last one",
        _ENV,
        "self._rows.qpos[index], self._rows.vel[index] = qpos, 0.0",
        "self._rows.qpos[index] = qpos",
        (f"{_ON}test_an_episode_begins_at_rest",),
    ),
    Fault(
        "pictures show what was before a snapshot",
        _ENV,
        "self._stale, index = True, self",
        "self._stale, index = self._stale, self",
        (_PICTURES,),
    ),
    Fault(
        "an observation makes its pictures anew",
        _ENV,
        "if self._images and self._stale:",
        "if self._images:",
        (_PICTURES,),
    ),
    Fault(
        "the hand is not turned with the arm",
        _ARM,
        "wrist, turn + _HAND_TURN]",
        "wrist, _HAND_TURN + 0 * turn]",
        (_PLACES,),
    ),
    Fault(
        "the elbow has no offset",
        _ARM,
        "elbow = at_elbow - pi - sum(bends)",
        "elbow = at_elbow - pi",
        (_PLACES,),
    ),
    Fault(
        "a GPU in another process is accepted",
        _LIFT,
        'if workers and found.device != "cpu":',
        'if workers > 99 and found.device != "cpu":',
        (f"{_ON}test_a_wrong_option_is_refused[options4-device='cuda' with workers=2 would send every observation]",),
    ),
    Fault(
        "as many environments in Genesis as one likes",
        _LIFT,
        "if num_envs >= _MANY:",
        "if num_envs < 0:",
        (f"{_ON}test_too_many_environments_for_the_memory_are_refused_before_the_scene_is_made",),
    ),
    Fault(
        "what an environment in Genesis takes is that of a whole scene",
        _LIFT,
        "require_memory(sizes[1] - sizes[0], num_envs",
        "require_memory(sizes[1], num_envs",
        (f"{_ON}test_too_many_environments_for_the_memory_are_refused_before_the_scene_is_made",),
    ),
    Fault(
        "the picture of one environment has no axis for it",
        "sims/genesis/cameras.py",
        "picture[..., :3].reshape(-1, self._size, self._size, 3)",
        "picture[..., :3]",
        (f"{_ON}test_pictures_have_an_axis_for_the_environments[1]",),
    ),
    Fault(
        "the picture of one environment is a view that torch refuses",
        "sims/genesis/cameras.py",
        "torch.from_numpy(np.ascontiguousarray(picture))",
        "torch.from_numpy(picture)",
        (f"{_ON}test_pictures_have_an_axis_for_the_environments[1]",),
    ),
    Fault(
        "a missing driver is found out by Genesis",
        _ENGINE,
        'if device == "cuda":',
        'if device == "gpu":',
        (f"{_ON}test_a_gpu_without_a_driver_is_refused_with_the_cure",),
    ),
    Fault(
        "Genesis reports errors in its own way ever after",
        _ENGINE,
        "sys.excepthook = hook  # Genesis' own prints every error twice",
        "pass",
        (f"{_ON}test_errors_are_reported_as_before",),
    ),
)
