"""Faults in the drivers of real arms, in cameras and in teleoperators."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FEETECH, _ON_FEETECH = "robot_drivers/feetech.py", "tests/robot_drivers/test_feetech.py::"
_CALIBRATION, _ON_CALIBRATION = "robot_drivers/calibration.py", "tests/robot_drivers/test_calibration.py::"
_SERVOS, _SO101, _ON_SO101 = (
    "robot_drivers/so101_servos.py",
    "robot_drivers/so101.py",
    "tests/robot_drivers/test_so101.py::",
)
_CAMERA, _ON_CAMERAS = "robot_drivers/cameras/camera.py", "tests/robot_drivers/test_cameras.py::"
_ON_VENDORS = "tests/robot_drivers/test_vendors.py::"
_ON_TELEOP = "tests/robot_drivers/test_teleop.py::"
_KEYBOARD, _TERMINAL, _GAMEPAD = (f"robot_drivers/teleop/{name}.py" for name in ("keyboard", "terminal", "gamepad"))
_WRONG = f"{_ON_FEETECH}test_a_wrong_answer_is_refused_after_three_tries"

_BUS = (
    Fault(
        "a wrong checksum is accepted",
        _FEETECH,
        "if part[-1] != checksum(part[2:-1]):",
        "if False:",
        (f"{_WRONG}[corrupted]",),
    ),
    Fault(
        "another servo's answer is accepted",
        _FEETECH,
        "if len(part) > 2 and part[2] != servo:",
        "if False:",
        (f"{_WRONG}[of another servo]",),
    ),
    Fault(
        "an answer of another length is accepted",
        _FEETECH,
        "if len(part) > 3 and part[3] != size + 2:",
        "if False:",
        (f"{_WRONG}[of another length]",),
    ),
    Fault(
        "a servo in trouble counts as well",
        _FEETECH,
        "if answer.status:",
        "if False:",
        (f"{_ON_FEETECH}test_a_servo_in_trouble_says_so_at_once[32-overload]",),
    ),
    Fault(
        "what came too late is read as the next answer",
        _FEETECH,
        "self._serial.reset_input_buffer()  # what came too late for an earlier request",
        "pass",
        (f"{_ON_FEETECH}test_bytes_that_nobody_waited_for_are_not_taken_for_the_next_answer",),
    ),
    Fault(
        "negative numbers are two's complements",
        _FEETECH,
        "return -magnitude if value >> self.sign & 1 else magnitude",
        "return value - (1 << 8 * self.size) if value >> self.sign & 1 else magnitude",
        (f"{_ON_FEETECH}test_golden_frames_are_sent_and_understood",),
    ),
    Fault(
        "a port is shared with other programs",
        _FEETECH,
        "exclusive=True",
        "exclusive=False",
        (f"{_ON_FEETECH}test_a_port_belongs_to_one_program_and_its_loss_is_told",),
    ),
)
_ARM = (
    Fault(
        "a turn has 4096 ticks where LeRobot divides by 4095",
        _CALIBRATION,
        "RADIANS = 2 * math.pi / LAST_TICK",
        "RADIANS = 2 * math.pi / 4096",
        (f"{_ON_CALIBRATION}test_angles_are_lerobots_degrees_in_radians",),
    ),
    Fault(
        "targets leave the calibrated range",
        _CALIBRATION,
        "np.clip(np.rint(position / self._unit + self._zero), self._low, self._high)",
        "np.rint(position / self._unit + self._zero)",
        (f"{_ON_SO101}test_a_target_is_kept_in_the_calibrated_range_and_nonsense_is_not_sent",),
    ),
    Fault(
        "torque comes on at an old target",
        _SO101,
        "self._servos.hold(self._servos.read()[0])",
        "self._servos.hold(ticks)",
        (f"{_ON_SO101}test_the_first_command_switches_torque_on_where_the_arm_is",),
    ),
    Fault(
        "an arm with another calibration moves",
        _SERVOS,
        "self._matches = self.calibration is not None and self._read_calibration() == self.calibration",
        "self._matches = self.calibration is not None",
        (f"{_ON_SO101}test_an_arm_with_another_calibration_is_neither_read_nor_moved",),
    ),
    Fault(
        "speeds in coarse units are taken for fine ones",
        _SERVOS,
        "1.0 if phase & _FINE_SPEED else _COARSE",
        "1.0",
        (f"{_ON_SO101}test_servos_that_count_speeds_in_steps_of_fifty_ticks_are_understood",),
    ),
    Fault(
        "one silent servo keeps the others stiff",
        _SERVOS,
        "errors.append(error)",
        "raise error",
        (f"{_ON_SO101}test_all_other_servos_go_limp_when_one_is_silent",),
    ),
    Fault(
        "every servo may be overloaded",
        _SERVOS,
        'feetech.OVERLOAD if joint == "gripper" else 0',
        "feetech.OVERLOAD",
        (f"{_ON_SO101}test_a_gripper_that_holds_something_is_no_failure_but_other_trouble_is",),
    ),
    Fault(
        "the range of a joint is where it was last",
        _SERVOS,
        "np.minimum(self.lows, ticks), np.maximum(self.highs, ticks)",
        "np.minimum(self.lows, ticks), ticks",
        (f"{_ON_SO101}test_a_person_calibrates_a_new_arm",),
    ),
)
_CAMERAS = (
    Fault(
        "pictures are blue where they should be red",
        "robot_drivers/cameras/opencv.py",
        "image[:, :, ::-1]",
        "image",
        (f"{_ON_CAMERAS}test_opencv_reads_a_sequence_in_rgb_and_begins_again_at_its_end",),
    ),
    Fault(
        "a failure that was mended is still told",
        _CAMERA,
        'self._newest, self.error = Frame(image.copy(), frame.captured), ""',
        "self._newest = Frame(image.copy(), frame.captured)",
        (f"{_ON_CAMERAS}test_failures_are_counted_told_and_mended",),
    ),
    Fault(
        "a frozen picture counts as fresh",
        _CAMERA,
        "not now - self._newest.captured <= self.max_age",
        "False",
        (f"{_ON_CAMERAS}test_pictures_age",),
    ),
    Fault(
        "pictures of another size are passed on",
        _CAMERA,
        "if image.shape != (spec.height, spec.width, 3) or image.dtype != np.uint8:",
        "if image.dtype != np.uint8:",
        (f"{_ON_CAMERAS}test_a_camera_that_delivers_what_it_did_not_declare_is_refused",),
    ),
    Fault(
        "the rate counts one frame too many",
        _CAMERA,
        "(len(stamps) - 1) / taken",
        "len(stamps) / taken",
        (f"{_ON_CAMERAS}test_the_rate_is_that_of_the_last_frames",),
    ),
    Fault(
        "a RealSense picture changes after it was read",
        "robot_drivers/cameras/realsense.py",
        "np.array(frame.get_data(), copy=True)",
        "np.asanyarray(frame.get_data())",
        (f"{_ON_CAMERAS}test_realsense_is_asked_as_its_reference_says",),
    ),
)
_VENDORS = (
    Fault(
        "a UR goes on when we are gone",
        "robot_drivers/ur.py",
        "self._control.setWatchdog(self._watchdog_hz)",
        "pass",
        (f"{_ON_VENDORS}test_a_ur_is_streamed_to_and_watches_us",),
    ),
    Fault(
        "a UR that refuses a target is taken to follow",
        "robot_drivers/ur.py",
        "if not self._control.servoJ(sent.tolist(), 0.0, 0.0, self._period, self._lookahead, self._gain):",
        "if self._control.servoJ(sent.tolist(), 0.0, 0.0, self._period, self._lookahead, self._gain) is None:",
        (f"{_ON_VENDORS}test_a_ur_that_is_stopped_lost_or_refuses_says_so",),
    ),
    Fault(
        "a Franka's spec promises all of its speed",
        "robot_drivers/franka.py",
        "self._factor * speed",
        "speed",
        (f"{_ON_VENDORS}test_the_specs_are_the_vendors_limits",),
    ),
    Fault(
        "a command waits until a Franka has arrived",
        "robot_drivers/franka.py",
        "self._franky.JointMotion(sent.tolist()), asynchronous=True",
        "self._franky.JointMotion(sent.tolist())",
        (f"{_ON_VENDORS}test_a_franka_plans_to_the_newest_target",),
    ),
)
_TELEOPERATORS = (
    Fault(
        "a key moves its joint for ever",
        _KEYBOARD,
        "np.where(now < self._until, self._moving * self._speed, 0.0)",
        "self._moving * self._speed",
        (f"{_ON_TELEOP}test_a_key_counts_for_a_moment_only",),
    ),
    Fault(
        "the rest of a special key moves a joint",
        _KEYBOARD,
        "if key in typed.partition(_ESCAPE)[0]:",
        "if key in typed:",
        (f"{_ON_TELEOP}test_escape_stops_whatever_follows_it",),
    ),
    Fault(
        "Ctrl-C ends the program before it can bring the arm to rest",
        _TERMINAL,
        "os.killpg(self._owner, signal.SIGINT)",
        "os.killpg(self._owner, signal.SIGTERM)",
        (f"{_ON_TELEOP}test_its_process_has_the_terminal_until_it_is_killed",),
    ),
    Fault(
        "a terminal stays without echo",
        _TERMINAL,
        "termios.tcsetattr(end, termios.TCSAFLUSH, settings)",
        "pass",
        (f"{_ON_TELEOP}test_a_terminal_is_given_back_as_it_was",),
    ),
    Fault(
        "a leader that does not answer is taken to stand still",
        "robot_drivers/teleop/leader.py",
        "return HumanInput(asked, engaged, keys=keys)",
        "return HumanInput(asked, engaged, scale.position(scale.ticks(scale.position(0))), keys=keys)",
        (f"{_ON_TELEOP}test_a_leader_arm_is_limp_and_read_in_the_follower_s_units",),
    ),
    Fault(
        "a gamepad moves without its enabling button",
        _GAMEPAD,
        "bool(touched.any()) if self._enable is None else self._enable in self._held",
        "bool(touched.any()) or self._enable in self._held",
        (f"{_ON_TELEOP}test_a_gamepad_moves_while_its_enabling_button_is_held",),
    ),
    Fault(
        "a button that was held when the gamepad was opened counts as pressed",
        _GAMEPAD,
        "if value and not kind & _INITIAL:",
        "if value:",
        (f"{_ON_TELEOP}test_buttons_are_events_once_when_they_are_pressed",),
    ),
)
_COPIES = (
    Fault(
        "missed steps come in a burst",
        "robot_drivers/pace.py",
        "self._deadline += missed * self._dt",
        "pass",
        ("tests/robot_drivers/test_pace.py::test_missed_steps_are_left_out_and_do_not_come_in_a_burst",),
    ),
    Fault(
        "an arm that is pushed away by one joint pushes back",
        "robot_drivers/limiting.py",
        "for joint in joints]).any()):",
        "for joint in joints]).all()):",
        (
            "tests/robot_drivers/test_wrong_sensors.py::test_an_arm_that_is_pushed_by_one_joint_is_held_where_it_was_pushed_to",
        ),
    ),
    Fault(
        "a camera's picture is the driver's memory",
        _CAMERA,
        "Frame(image.copy(), frame.captured)",
        "frame",
        (f"{_ON_CAMERAS}test_a_picture_of_no_time_is_not_used_and_a_driver_may_write_into_its_own_again",),
    ),
    Fault(
        "a picture of no time is never stale",
        _CAMERA,
        "if not math.isfinite(frame.captured):",
        "if False:",
        (f"{_ON_CAMERAS}test_a_picture_of_no_time_is_not_used_and_a_driver_may_write_into_its_own_again",),
    ),
    Fault(
        "a chunk is the policy's memory",
        "robot_drivers/chunks.py",
        "self._start = chunk.copy(), observed, start",
        "self._start = chunk, observed, start",
        ("tests/robot_drivers/test_chunks.py::test_what_a_policy_writes_into_its_chunk_afterwards_changes_nothing",),
    ),
    Fault(
        "a leader that writes into its own array is not seen to move",
        "robot_drivers/human.py",
        "self._leader = read.position.copy()  # a device may write into its own again",
        "self._leader = read.position",
        (
            "tests/robot_drivers/test_executor.py::test_a_person_whose_device_writes_into_its_own_array_takes_over_without_a_jump",
        ),
    ),
    Fault(
        "whatever a driver says it was sent is believed",
        "robot_drivers/executor.py",
        "if sent.shape != command.position.shape or not np.isfinite(sent).all():",
        "if sent.shape != command.position.shape:",
        ("tests/robot_drivers/test_executor.py::test_an_answer_to_a_command_that_is_no_position_is_not_believed",),
    ),
)

FAULTS = (*_COPIES, *_BUS, *_ARM, *_CAMERAS, *_VENDORS, *_TELEOPERATORS)
