"""Faults in the SO-101: its kinematics, servos and expert."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ARM, _SCENE, _ROBOT, _EXPERT = (f"sims/mujoco/so101/{name}.py" for name in ("arm", "scene", "robot", "expert"))
_ON = "tests/sims/test_so101.py::"

FAULTS = (
    Fault(
        "the solver's forearm is a centimetre short",
        _ARM,
        "(-0.1349, 0.0052, 0.0)",
        "(-0.1249, 0.0052, 0.0)",
        (f"{_ON}test_at_zero_the_arm_reaches_ahead",),
    ),
    Fault(
        "the solver turns joints the other way",
        _ARM,
        "cos, -sin, sin, cos, 1.0",
        "cos, sin, -sin, cos, 1.0",
        (f"{_ON}test_the_solver_knows_where_mujoco_puts_the_gripper",),
    ),
    Fault(
        "the solver bends the wrist beyond its limit",
        _ARM,
        "joints[:, :4] = np.clip(joints[:, :4], LOW[:4], HIGH[:4])",
        "joints[:, :4] += 0.0",
        (f"{_ON}test_solved_joints_reach_their_places_and_point_down_where_they_can",),
    ),
    Fault(
        "the solver insists on pointing down",
        _ARM,
        "free = (joints[:, 3] < HIGH[3]) | (pitch < 0)",
        "free = (joints[:, 3] < 9.0) | (pitch < 0)",
        (f"{_ON}test_solved_joints_reach_their_places_and_point_down_where_they_can",),
    ),
    Fault(
        "servos as weak as a spring",
        _SCENE,
        'kp="250" kv="5"',
        'kp="15" kv="5"',
        (f"{_ON}test_actions_are_targets_for_what_the_state_measures",),
    ),
    Fault(
        "servos that hardly damp",
        _SCENE,
        'kp="250" kv="5"',
        'kp="250" kv="0.1"',
        (f"{_ON}test_a_servo_follows_a_step_in_a_tenth_of_a_second_but_not_at_once",),
    ),
    Fault(
        "the wrist camera looks away",
        _SCENE,
        'xyaxes="1 0 0 0 0.777 0.630"',
        'xyaxes="1 0 0 0 -0.777 0.630"',
        (f"{_ON}test_the_wrist_camera_sees_the_cube_between_the_jaws_and_turns_with_the_arm",),
    ),
    Fault(
        "the gripper is commanded by an angle",
        _ROBOT,
        "arm.closing_angle(action[:, 5:6])], axis=1)",
        "action[:, 5:6]], axis=1)",
        (f"{_ON}test_actions_are_targets_for_what_the_state_measures",),
    ),
    Fault(
        "every control rate has the physics steps of 25 Hz",
        _ROBOT,
        "round(1 / (control_hz * PHYSICS_DT))",
        "round(1 / (25 * PHYSICS_DT))",
        (f"{_ON}test_the_control_rate_is_an_option",),
    ),
    Fault(
        "the start is not shifted",
        _ROBOT,
        'np.array([values[f"gripper_{axis}"] for axis in "xyz"])',
        "np.zeros(3)",
        (f"{_ON}test_the_arm_starts_elsewhere_within_reach",),
    ),
    Fault(
        "the expert lowers the fixed jaw onto the cube",
        _EXPERT,
        "CLEARANCE = 0.010",
        "CLEARANCE = -0.012",
        (f"{_ON}test_the_expert_succeeds_in_95_of_100_scenes",),
    ),
    Fault(
        "within a chunk the expert's jaws close through the cube",
        _EXPERT,
        "np.maximum(opening, np.mean(_HELD))",
        "opening",
        (f"{_ON}test_the_expert_succeeds_with_chunks_among_several_cubes_and_at_50_hz",),
    ),
)
