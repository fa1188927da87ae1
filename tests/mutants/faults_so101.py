"""Faults in the simulated SO-101: its kinematics, servos and expert, and as a robot."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ARM, _SCENE, _ROBOT, _EXPERT = (f"sims/mujoco/so101/{name}.py" for name in ("arm", "scene", "robot", "expert"))
_HARDWARE = "robot_drivers/simulated_hardware.py"
_PROCESS, _ALONE = "robot_drivers/simulated_process.py", "tests/robot_drivers/test_simulated_process.py::"
_JOINTS = "tests/recipes/test_joint_policy.py::"
_ON, _SIMULATED = "tests/sims/test_so101.py::", "tests/robot_drivers/test_simulated.py::"

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
    Fault(
        "the jerk limit bounds a simulated arm before its acceleration does",
        _HARDWARE,
        "jerk: float = 8000.0",
        "jerk: float = 2000.0",
        (
            "tests/robot_drivers/test_simulated.py::test_a_change_of_speed_well_within_the_acceleration_is_followed_exactly",
        ),
    ),
    Fault(
        "commands reach the motors at once",
        _HARDWARE,
        "due = now + self._imperfections.command_latency",
        "due = now",
        (f"{_SIMULATED}test_a_command_moves_the_arm_after_its_latency",),
    ),
    Fault(
        "a command overtakes the one before it",
        _HARDWARE,
        "(max([due, *(when for when, _ in self._commands)]), sent - self._offsets)",
        "(due, sent - self._offsets)); self._commands.sort(key=lambda one: one[0]",
        (f"{_SIMULATED}test_jitter_never_puts_commands_or_measurements_out_of_order",),
    ),
    Fault(
        "late measurements are stamped with the time of their arrival",
        _HARDWARE,
        "return newest.position.copy(), min(newest.captured, now)",
        "return newest.position.copy(), now",
        (f"{_SIMULATED}test_a_measurement_is_as_old_as_it_says",),
    ),
    Fault(
        "a wrong calibration is on one side only",
        _HARDWARE,
        "sent - self._offsets)",
        "sent)",
        (f"{_SIMULATED}test_noise_has_the_stated_deviation_and_offsets_are_on_both_sides",),
    ),
    Fault(
        "lost measurements are repeated measurements",
        _HARDWARE,
        "if lost and answers < flaws.lost_measurements",
        "if answers < -1",
        (f"{_SIMULATED}test_a_lost_measurement_is_no_answer_and_the_arm_goes_on",),
    ),
    Fault(
        "lost pictures arrive",
        _HARDWARE,
        "if not lost or frames >= flaws.lost_frames:",
        "if not lost or frames >= 0.0:",
        (f"{_SIMULATED}test_pictures_are_late_and_lost_as_stated",),
    ),
    Fault(
        "the noise of every episode is the same, whatever its seed",
        _HARDWARE,
        "np.random.PCG64([self._imperfections.seed, seed, part])",
        "np.random.PCG64([seed, part])",
        (f"{_SIMULATED}test_equal_seeds_are_equal_episodes_and_others_are_not",),
    ),
    Fault(
        "displacements are taken for joint positions",
        _HARDWARE,
        "if not names or names != spec.state.names or spec.discrete:",
        "if not names or spec.discrete:",
        (f"{_SIMULATED}test_an_environment_that_is_not_commanded_by_positions_is_refused",),
    ),
    Fault(
        "a simulated robot starts its clock again with every episode",
        "robot_drivers/simulated.py",
        "self._connected.reset(seed, self._clock())",
        "self._steps = 0; self._connected.reset(seed, self._clock())",
        (f"{_SIMULATED}test_time_is_counted_in_commands_and_does_not_start_again",),
    ),
    Fault(
        "an episode begins in the thread of its client",
        _PROCESS,
        "self._resets.put(reset)",
        "self._begin(reset, now)",
        (f"{_ALONE}test_it_is_a_driver_whose_measurements_are_fresh",),
    ),
    Fault(
        "a client's nonsense ends the robot",
        _PROCESS,
        "            reset.refused = str(error)",
        "            raise SystemExit(str(error)) from error",
        (f"{_ALONE}test_nonsense_is_refused_and_harms_nobody_else",),
    ),
    Fault(
        "the robot outlives its owner",
        _PROCESS,
        'if "--owned" in arguments:',
        'if "--owner" in arguments:',
        (f"{_ALONE}test_it_ends_with_its_owner_and_not_before",),
    ),
    Fault(
        "a camera shows the same picture again",
        "robot_drivers/simulated_client.py",
        'if answer["captured"] > self._last:',
        'if answer["captured"] > -1.0:',
        (f"{_ALONE}test_a_camera_waits_for_the_next_picture_and_says_when_there_is_none",),
    ),
    Fault(
        "a command is not recorded",
        _PROCESS,
        "self._note(time=now, command=np.asarray(position), sent=sent)",
        "pass",
        (f"{_ALONE}test_the_record_has_every_command_and_every_step_with_its_time",),
    ),
    Fault(
        "a checkpoint forgets in which units it acts",
        "vla_rl/policies/tiny.py",
        'if "action_scale" in saved else None',
        'if "action" in saved else None',
        (f"{_JOINTS}test_a_checkpoint_keeps_the_scale_and_an_older_one_has_that_of_the_bounds",),
    ),
    Fault(
        "a joint that stays still is magnified a thousand times",
        "vla_rl/recipes/tiny.py",
        "Affine.from_data(item, self.smallest_scale)",
        "Affine.from_data(item)",
        (f"{_JOINTS}test_actions_and_states_are_in_units_of_what_was_demonstrated",),
    ),
)
