"""Faults in how episodes of an arm are played and recorded."""

from __future__ import annotations

from tests.mutants.fault import Fault

_DECIDE, _DRIVE, _RECORDING, _SESSION = (
    f"vla_rl/recipes/robots/{name}.py" for name in ("decide", "drive", "recording", "session")
)
_ON = "tests/recipes/robots/test_robot_recording.py::"
_GOES_ON = f"{_ON}test_a_policy_goes_on_until_the_runtime_says_that_no_chunk_counts"
_LABELS = f"{_ON}test_every_step_says_what_was_requested_and_by_whom"

_SCRIPTED = "tests/recipes/robots/test_scripted_person.py::"
_SERVER = "tests/recipes/robots/test_robot_server.py::"

_REPLAY, _AGAIN = "vla_rl/recipes/robots/replay.py", "tests/recipes/robots/test_replay.py::"

_HOME, _GOES = "vla_rl/recipes/robots/home.py", "tests/recipes/robots/test_home.py::"
_DRY = ("tests/recipes/robots/test_dry_run.py::test_an_arm_is_measured_and_sent_nothing_and_every_command_is_a_line",)

FAULTS = (
    Fault(
        "a replay takes no slow way to where it began",
        _REPLAY,
        "np.concatenate([way, self._actions[1:], self._settle])",
        "np.concatenate([self._actions, self._settle])",
        (f"{_AGAIN}test_the_way_to_the_first_action_is_a_chunk_of_the_same_decision",),
    ),
    Fault(
        "a replay in another scene than the recorded one",
        _REPLAY,
        "max(0, int(episode.seed[0]))",
        "0",
        (f"{_AGAIN}test_a_recorded_success_succeeds_again_where_it_was_recorded",),
    ),
    Fault(
        "a recording of another arm is replayed",
        _REPLAY,
        "        if tuple(recorded) != tuple(has):",
        "        if len(recorded) != len(has):",
        (f"{_AGAIN}test_another_arm_and_a_missing_episode_are_refused_in_one_sentence",),
    ),
    Fault(
        "joints on a slow way are faster than they may be",
        "robot_drivers/approach.py",
        "np.max(np.abs(goal - start) / velocity)",
        "np.min(np.abs(goal - start) / velocity)",
        ("tests/robot_drivers/test_approach.py::test_the_slowest_joint_sets_the_time_and_all_arrive_together",),
    ),
    Fault(
        "an arm does not take the address of a policy server",
        _DECIDE,
        "remote_policy(name, spec) if names_server(name) else",
        "remote_policy(name, spec) if not name else",
        (f"{_SERVER}test_a_server_drives_the_simulated_arm_as_its_policy_does_here",),
    ),
    Fault(
        "two episodes ask a policy at the same time",
        _DECIDE,
        "        with self._deciding:",
        "        if self._deciding:",
        (f"{_SERVER}test_the_next_episode_waits_for_a_decision_of_the_last",),
    ),
    Fault(
        "a policy that is compiled in its first decision is given up",
        "robot_drivers/runtime.py",
        "if busy and record.heard >= start and",
        "if busy and",
        ("tests/robot_drivers/test_control.py::test_a_policy_that_hangs_for_long_ends_the_episode_in_one_sentence",),
    ),
    Fault(
        "a policy on an arm keeps its state over a hand-back",
        _DECIDE,
        "if query.consumed is None:",
        "if query.consumed is None and query.step < 0:",
        (_GOES_ON,),
    ),
    Fault(
        "real-time chunking on an arm bridges more than is left of a chunk",
        _DECIDE,
        "min(query.delay, steps, self._horizon - steps)",
        "min(query.delay, steps)",
        (_GOES_ON,),
    ),
    Fault(
        "real-time chunking on an arm hears nothing of the last chunk",
        _DECIDE,
        "if not isinstance(self.policy, RealTimePolicy):",
        "if isinstance(self.policy, RealTimePolicy):",
        (f"{_ON}test_the_next_chunk_of_real_time_chunking_continues_the_last",),
    ),
    Fault(
        "what was requested is recorded as the action",
        _RECORDING,
        "action=np.stack([record.executed for record in records])",
        "action=np.stack([record.requested for record in records])",
        (_LABELS,),
    ),
    Fault(
        "the executed position is recorded as the request",
        _RECORDING,
        "np.where(asked[:, None], requested, executed)",
        "np.where(asked[:, None], executed, executed)",
        (_LABELS,),
    ),
    Fault(
        "every end of an episode is recorded as success",
        _RECORDING,
        'records[-1].outcome == "success"',
        'records[-1].outcome != ""',
        (f"{_ON}test_an_episode_that_ran_out_of_time_is_no_success",),
    ),
    Fault(
        "a recorder drops the error of the episode before",
        _RECORDING,
        "            self._writing.result()",
        "            self._writing.exception()",
        (f"{_ON}test_a_recorder_keeps_what_is_whole_when_the_next_fails",),
    ),
    Fault(
        "an observation is recorded one control step late",
        _SESSION,
        "            record = lockstep.step()",
        "            record, _ = lockstep.step(), robot.observe()",
        (f"{_ON}test_what_is_recorded_was_seen_before_it_was_done",),
    ),
    Fault(
        "the speed of a session is ignored",
        _SESSION,
        "limits = config.limits_of(self._robot).scaled(execution.speed)",
        "limits = config.limits_of(self._robot)",
        (f"{_ON}test_a_slower_speed_holds",),
    ),
    Fault(
        "the delay of a session is ignored",
        _SESSION,
        "self._clock, dt, self._delay, self._watched)",
        "self._clock, dt, 0, self._watched)",
        (f"{_ON}test_a_delay_of_the_policy_lasts_whole_control_steps[80-2]",),
    ),
    Fault(
        "a delay is rounded down to control steps",
        _SESSION,
        "math.ceil(execution.delay / self.spec.control_dt - _ROUNDING)",
        "math.floor(execution.delay / self.spec.control_dt + _ROUNDING)",
        (f"{_ON}test_a_delay_of_the_policy_lasts_whole_control_steps[81-3]",),
    ),
    Fault(
        "a delay that a real arm cannot have is ignored",
        _SESSION,
        "    if execution.delay:",
        "    if execution.delay < 0:",
        (f"{_ON}test_a_delay_is_not_set_on_an_arm_in_real_time",),
    ),
    Fault(
        "an episode that a person rejects is kept",
        _DRIVE,
        'if outcome == "redo":',
        'if outcome == "re-do":',
        (f"{_ON}test_an_episode_that_a_person_rejects_is_played_again_and_not_kept",),
    ),
    Fault(
        "a server learns from the scenes of the test",
        "vla_rl/cli/robot.py",
        '"reinforcement" if config.server else "test"',
        '"test"',
        (f"{_SCRIPTED}test_by_command_a_person_watches_and_what_a_server_gets_is_of_no_test",),
    ),
    Fault(
        "a scripted person's hand does not reach the arm",
        "vla_rl/recipes/robots/scripted_person.py",
        "engaged=True, velocity",
        "engaged=False, velocity",
        (f"{_SCRIPTED}test_a_person_who_sees_nothing_happen_does_the_task_and_it_is_said",),
    ),
    Fault(
        "a scripted person keeps the arm once it is well again",
        "vla_rl/recipes/robots/scripted_person.py",
        "            self._rule.hand_back()",
        "            pass",
        (f"{_SCRIPTED}test_control_comes_back_and_the_share_is_kept_over_episodes",),
    ),
    Fault(
        "a scripted person's hand is as steady as a script",
        "vla_rl/recipes/robots/scripted_person.py",
        "1.0 + self.config.noise * ",
        "1.0 + 0.0 * ",
        (f"{_SCRIPTED}test_the_hand_is_unsteady_and_the_same_seed_gives_the_same_episode",),
    ),
    Fault(
        "a policy runs on the scenes of the demonstrations",
        _DRIVE,
        '    if settings.scenes == "test":',
        "    if not settings.episodes:",
        (f"{_ON}test_test_scenes_are_no_demonstrations",),
    ),
    Fault(
        "a dry run sends what it prints",
        "robot_drivers/dry_run.py",
        "        return np.array(position, np.float64)",
        "        return self._driver.command(position)",
        _DRY,
    ),
    Fault(
        "what was asked for is not said where it was clipped",
        "vla_rl/recipes/robots/status.py",
        "np.isfinite(record.requested) & record.clipped",
        "np.isfinite(record.requested) & ~record.clipped",
        _DRY,
    ),
    Fault(
        "an arm goes home at the speed of the run",
        _SESSION,
        "limits.scaled(SPEED / max(execution.speed, SPEED))",
        "limits",
        (f"{_GOES}test_it_goes_there_slowly_once_a_person_has_pressed_enter_and_then_waits",),
    ),
    Fault(
        "an arm goes home before anybody lets it",
        _SESSION,
        'self._wait(f"{title}: the arm goes home slowly.',
        'str(f"{title}: the arm goes home slowly.',
        (f"{_GOES}test_it_goes_there_slowly_once_a_person_has_pressed_enter_and_then_waits",),
    ),
    Fault(
        "an arm that did not arrive home is taken to be there",
        _HOME,
        "far = abs(away[worst]) > _NEAR * self._range[worst]",
        "far = abs(away[worst]) > 0.2 * self._range[worst]",
        (f"{_GOES}test_an_arm_that_does_not_arrive_is_named",),
    ),
)
