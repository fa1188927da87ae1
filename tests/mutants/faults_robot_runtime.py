"""Faults in how a robot is driven: chunks, control steps, the person's part, the control process."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CHUNKS, _ON_CHUNKS = "robot_drivers/chunks.py", "tests/robot_drivers/test_chunks.py::"
_EXECUTOR, _ON_EXECUTOR = "robot_drivers/executor.py", "tests/robot_drivers/test_executor.py::"
_HUMAN, _LOCKSTEP = "robot_drivers/human.py", "robot_drivers/lockstep.py"
_CONTROL, _ON_CONTROL = "robot_drivers/control.py", "tests/robot_drivers/test_control.py::"
_ENV, _ON_ENV = "robot_drivers/env.py", "tests/robot_drivers/test_env.py::"

_EXECUTION = (
    Fault(
        "the actions of the time in which the arm stood still are dropped",
        _CHUNKS,
        "start = observed + _stood_still(observed, now, self._end)",
        "start = observed",
        (
            f"{_ON_CHUNKS}test_open_loop_executes_whole_chunks_and_stands_still_while_it_waits",
            f"{_ON_CHUNKS}test_where_the_arm_stood_still_a_chunk_goes_on_from_there",
        ),
    ),
    Fault(
        "a late chunk begins with its first action",
        _CHUNKS,
        "max(now - max(observed, end), 0)",
        "now - observed",
        (f"{_ON_CHUNKS}test_receding_horizon_goes_on_with_the_old_chunk_and_drops_the_first_actions_of_the_new",),
    ),
    Fault(
        "a chunk that is over replaces one that is not",
        _CHUNKS,
        "if not outdated and start + len(chunk) > now:",
        "if not outdated:",
        (f"{_ON_CHUNKS}test_a_chunk_whose_steps_are_over_changes_nothing[receding horizon]",),
    ),
    Fault(
        "an older chunk replaces a newer one",
        _CHUNKS,
        "outdated = self._chunk is not None and observed <= self._observed",
        "outdated = False",
        (f"{_ON_CHUNKS}test_an_older_chunk_never_replaces_a_newer_one[receding horizon]",),
    ),
    Fault(
        "a receding horizon asks a step late",
        _CHUNKS,
        "step >= self._start + min(self._steps, len(self._chunk))",
        "step > self._start + min(self._steps, len(self._chunk))",
        (f"{_ON_CHUNKS}test_receding_horizon_goes_on_with_the_old_chunk_and_drops_the_first_actions_of_the_new",),
    ),
    Fault(
        "ensembling weighs the newest most",
        _CHUNKS,
        "np.exp(-self._decay * np.arange(len(votes)))",
        "np.exp(-self._decay * np.arange(len(votes))[::-1])",
        (f"{_ON_CHUNKS}test_ensembling_weighs_the_oldest_most",),
    ),
    Fault(
        "an ensemble's first chunk begins in the middle",
        _CHUNKS,
        "start = observed + _stood_still(observed, now, max(ends, default=None))",
        "start = observed",
        (
            f"{_ON_CHUNKS}test_a_first_chunk_begins_with_its_first_action_and_the_next_with_that_of_its_step[ensembling]",
        ),
    ),
    Fault(
        "a receding horizon is counted from the observation",
        _CHUNKS,
        "step >= self._start + min(self._steps, len(self._chunk))",
        "step >= self._observed + min(self._steps, len(self._chunk))",
        (f"{_ON_EXECUTOR}test_the_policy_is_told_what_was_consumed_and_what_is_delayed",),
    ),
    Fault(
        "ensembling keeps the chunks in the order of their arrival",
        _CHUNKS,
        "for key in sorted(chunks) if",
        "for key in chunks if",
        (f"{_ON_CHUNKS}test_ensembling_weighs_by_age_and_not_by_arrival",),
    ),
    Fault(
        "a chunk with a NaN is queued",
        _CHUNKS,
        "or not np.isfinite(chunk).all():",
        "or chunk.dtype == bool:",
        (f"{_ON_CHUNKS}test_what_is_no_chunk_of_numbers_is_refused_and_the_rest_goes_on",),
    ),
)

_STEPS = (
    Fault(
        "a take-over jumps to where the leader is",
        _HUMAN,
        "last - read.position, read.position",
        "np.zeros_like(last), read.position",
        (f"{_ON_EXECUTOR}test_a_person_takes_over_and_hands_back_without_a_jump",),
    ),
    Fault(
        "the leader's offset stays for ever",
        _HUMAN,
        "_SHRINK = 0.5",
        "_SHRINK = 0.0",
        (f"{_ON_EXECUTOR}test_the_leader_s_offset_shrinks_by_half_of_what_it_moves_and_never_while_it_rests",),
    ),
    Fault(
        "after a hand-back the policy's queue goes on",
        _EXECUTOR,
        "if read.engaged != self._human.engaged:",
        "if read.engaged and not self._human.engaged:",
        (f"{_ON_EXECUTOR}test_chunks_decided_before_a_hand_back_are_refused",),
    ),
    Fault(
        "chunks that were decided before a hand-back count",
        _EXECUTOR,
        "if self._human.engaged or observed < self._valid_from:",
        "if self._human.engaged:",
        (f"{_ON_EXECUTOR}test_chunks_decided_before_a_hand_back_are_refused",),
    ),
    Fault(
        "a silent policy's chunk is executed to its end",
        _EXECUTOR,
        "if not self._fresh_at(min(self._alive, self._human.captured) if self._attended else self._alive, now):",
        "if False:",
        (f"{_ON_EXECUTOR}test_a_policy_that_falls_silent_in_the_middle_of_a_chunk_leaves_the_arm_holding",),
    ),
    Fault(
        "the policy goes on when nobody could take over",
        _EXECUTOR,
        "min(self._alive, self._human.captured) if self._attended else self._alive",
        "self._alive",
        (f"{_ON_EXECUTOR}test_an_attended_arm_holds_when_the_teleoperator_falls_silent",),
    ),
    Fault(
        "what a silent policy had decided counts when it is back",
        _EXECUTOR,
        "self._flush()  # and whatever it decided before",
        "pass",
        (f"{_ON_EXECUTOR}test_a_policy_that_was_silent_has_to_look_again",),
    ),
    Fault(
        "a sign of life may come from the future",
        _EXECUTOR,
        "return 0 <= now - stamp <=",
        "return now - stamp <=",
        (f"{_ON_EXECUTOR}test_a_sign_of_life_from_the_future_is_none[inf]",),
    ),
    Fault(
        "a robot that was put elsewhere by its reset has jumped",
        _EXECUTOR,
        "self._supervisor = Supervisor(before.limits, before.kinematics)",
        "self._supervisor = before",
        (f"{_ON_EXECUTOR}test_a_robot_that_resets_itself_is_found_where_that_puts_it_and_a_stop_stays",),
    ),
    Fault(
        "a steering device asks for what is ahead of the arm",
        _HUMAN,
        "last + read.velocity * dt",
        "last + 2 * read.velocity * dt",
        (f"{_ON_EXECUTOR}test_a_device_that_steers_starts_at_the_last_command_and_never_runs_ahead_of_the_arm",),
    ),
    Fault(
        "after re-arming the queue of before is replayed",
        _EXECUTOR,
        "self._flush()  # nothing is replayed",
        "pass",
        (f"{_ON_EXECUTOR}test_a_stop_is_latched_until_a_person_re_arms_and_then_a_fresh_chunk_is_needed",),
    ),
    Fault(
        "a stop is forgotten",
        _EXECUTOR,
        "self._supervisor.stop(reason)",
        "self._flush()",
        (f"{_ON_EXECUTOR}test_a_stop_is_latched_until_a_person_re_arms_and_then_a_fresh_chunk_is_needed",),
    ),
    Fault(
        "between episodes the policy goes on",
        _EXECUTOR,
        "running = self.episode > 0 and",
        "running = self.episode >= 0 and",
        (f"{_ON_EXECUTOR}test_a_key_ends_the_episode_and_nothing_happens_until_the_next[success]",),
    ),
    Fault(
        "a robot that takes no commands is never stopped",
        _EXECUTOR,
        "if now - self._deaf_since >= self._supervisor.limits.watchdog:",
        "if now - self._deaf_since >= 1e9:",
        (f"{_ON_EXECUTOR}test_one_unanswered_call_is_counted_and_more_stop_the_arm",),
    ),
    Fault(
        "what was asked for is recorded as executed",
        _EXECUTOR,
        "executed=executed,",
        "executed=command.position,",
        (f"{_ON_EXECUTOR}test_a_step_is_labelled_with_what_was_asked_for_and_what_was_done",),
    ),
    Fault(
        "latency is that of the last measurement",
        _EXECUTOR,
        "latency=now - captured",
        "latency=now - self._measured.captured",
        (f"{_ON_EXECUTOR}test_a_step_is_labelled_with_what_was_asked_for_and_what_was_done",),
    ),
    Fault(
        "in lock-step a chunk arrives a step late",
        _LOCKSTEP,
        "self.executor.step >= self._waiting[0] + self._delay",
        "self.executor.step > self._waiting[0] + self._delay",
        (f"{_ON_EXECUTOR}test_a_step_is_labelled_with_what_was_asked_for_and_what_was_done",),
    ),
)

_PROCESSES = (
    Fault(
        "control goes on when its owner is gone",
        _CONTROL,
        "if self._inbox.gone:",
        "if self._inbox.gone is None:",
        (f"{_ON_CONTROL}test_control_ends_once_the_arm_is_at_rest_when_its_owner_is_gone_and_not_while_it_is_silent",),
    ),
    Fault(
        "a policy that hangs is taken to be well",
        "robot_drivers/runtime.py",
        "self._inference.started + self._patience",
        "time.monotonic()",
        (f"{_ON_CONTROL}test_a_policy_that_hangs_leaves_the_arm_holding",),
    ),
    Fault(
        "a camera that hangs is taken to be well",
        "robot_drivers/runtime.py",
        "+ self._patience, self._pictured())",
        "+ self._patience)",
        (f"{_ON_CONTROL}test_a_camera_that_hangs_leaves_the_arm_holding",),
    ),
    Fault(
        "what waits for a peer grows without bound",
        "robot_drivers/mailbox.py",
        "while self._bytes > self._room or",
        "while self._bytes < 0 or",
        ("tests/robot_drivers/test_mailbox.py::test_what_waits_for_a_peer_that_hangs_is_bounded_and_whole",),
    ),
    Fault(
        "a robot's environment counts the actions after its time limit",
        _ENV,
        "actions = actions[: self.spec.time_limit - self._time]",
        "actions = actions[:]",
        (f"{_ON_ENV}test_an_episode_ends_at_its_time_limit_and_then_idles",),
    ),
    Fault(
        "a robot's environment shows what it saw before each action",
        _ENV,
        "frames.append(self._seen(record, self._time + len(frames) + 1))",
        "frames.append(self._seen(records[-1], self._time + len(frames) + 1))",
        (f"{_ON_ENV}test_a_chunk_is_executed_and_every_action_has_its_frame",),
    ),
)

_FROZEN = (
    Fault(
        "a frozen process drives on unasked",
        _EXECUTOR,
        'self._after(now - self._beaten, "its policy\'s process")',
        "pass",
        (f"{_ON_EXECUTOR}test_a_process_that_was_frozen_drives_on_only_after_a_person_has_re_armed",),
    ),
    Fault(
        "a frozen teleoperator gives the arm back to the policy",
        _EXECUTOR,
        'self._after(read.captured - self._human.captured, "its teleoperator")',
        "pass",
        (f"{_ON_EXECUTOR}test_a_teleoperator_that_was_frozen_leaves_the_arm_to_nobody_until_a_person_has_re_armed",),
    ),
)

_CLAIMED = (
    Fault(
        "two programs drive one arm",
        "robot_drivers/devices.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        (f"{_ON_CONTROL}test_one_arm_is_driven_by_one_program",),
    ),
    Fault(
        "an arm is claimed by the text of its port",
        "robot_drivers/devices.py",
        "return os.path.realpath(named) if os.path.exists(named) else named",
        "return named",
        (f"{_ON_CONTROL}test_one_arm_is_driven_by_one_program",),
    ),
)

FAULTS = (*_EXECUTION, *_STEPS, *_PROCESSES, *_FROZEN, *_CLAIMED)
