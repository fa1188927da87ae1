"""Faults in isolated environments and in the child processes under them."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CHILD, _ON_CHILD = "vla_rl/contract/child.py", "tests/contract/test_child.py::"
_STREAMS = "vla_rl/contract/streams.py"
_CHANNEL, _ON_CHANNEL = "sims/isolation/channel.py", "tests/sims/isolation/test_channel.py::"
_ENV, _SUPERVISED = "sims/isolation/env.py", "sims/isolation/supervised.py"
_SNAPSHOTS, _WORKER = "sims/isolation/snapshots.py", "sims/isolation/worker.py"
_ON_ENV, _ON_FAILURES = "tests/sims/isolation/test_isolated.py::", "tests/sims/isolation/test_failures.py::"
_RUNNING, _ON_BREAKDOWNS = "vla_rl/experience/running.py", "tests/experience/test_breakdowns.py::"
_ON_EXPERT, _ON_REMOTE = "tests/sims/isolation/test_expert.py::", "tests/sims/isolation/test_remote.py::"
_NESTED = (f"{_ON_ENV}test_it_keeps_the_contract_and_equals_the_environment_here_bit_for_bit[isolated-1]",)
_EQUAL = (f"{_ON_ENV}test_it_keeps_the_contract_and_equals_the_environment_here_bit_for_bit[counting-3]",)
_STEP = (f"{_ON_FAILURES}test_a_step_that_fails_truncates_the_worker_s_episodes_and_no_others[killed]",)
_RESET = (f"{_ON_FAILURES}test_a_reset_that_fails_is_tried_again_and_the_neighbours_are_truncated[killed]",)
_INTERRUPTED = f"{_ON_FAILURES}test_an_environment_that_was_interrupted_goes_on_with_a_new_worker"
_SAVED = (f"{_ON_FAILURES}test_a_snapshot_that_fails_is_taken_of_the_new_worker[killed]",)

_PROCESS = (
    Fault(
        "a silent child is waited for for ever",
        _STREAMS,
        "None if self.deadline is None else 1000 * max(0.0, self.deadline - time.monotonic())",
        "None if self.deadline is None else 1e6",
        (f"{_ON_CHILD}test_silence_and_a_full_pipe_end_at_the_deadline",),
    ),
    Fault(
        "a child at work outlives its owner",
        _CHILD,
        'threading.Thread(target=_end_with, args=(reader.fileno(),), name="owner", daemon=True).start()',
        "pass",
        (f"{_ON_CHILD}test_a_process_at_work_ends_with_its_owner",),
    ),
    Fault(
        "a child that cannot be killed is waited for",
        _CHILD,
        "self._process.wait(_GRACE)",
        "self._process.wait()",
        (f"{_ON_CHILD}test_one_that_cannot_be_killed_is_left_behind",),
    ),
    Fault(
        "what a child has started outlives it",
        _CHILD,
        "self.kill()  # also what it has started",
        "pass",
        (f"{_ON_CHILD}test_what_it_started_ends_with_it",),
    ),
    Fault(
        "the first words of a child are kept instead of the last",
        _CHILD,
        "lines[-_LINES:]",
        "lines[:_LINES]",
        (f"{_ON_CHILD}test_its_last_words_are_kept_and_shown",),
    ),
    Fault(
        "what a child prints is swallowed",
        _CHILD,
        "os.write(2, piece)",
        "pass",
        (f"{_ON_CHILD}test_its_last_words_are_kept_and_shown",),
    ),
)

_MEMORY = (
    Fault(
        "an answer is overwritten while the next one is made",
        _CHANNEL,
        "(self._next + 1) % len(self._outbox)",
        "0",
        (f"{_ON_CHANNEL}test_the_last_answer_stays_while_the_next_one_is_written",),
    ),
    Fault(
        "arrays of a message lie on each other",
        _CHANNEL,
        "end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT",
        "end += array.nbytes // _ALIGNMENT * _ALIGNMENT",
        (f"{_ON_CHANNEL}test_arrays_arrive_as_they_were_sent",),
    ),
    Fault(
        "an array before the memory is read",
        _CHANNEL,
        "not 0 <= start <= end <= self._size",
        "not start <= end <= self._size",
        (f"{_ON_CHANNEL}test_what_lies_outside_or_is_no_number_is_refused",),
    ),
)

_OWNER = (
    Fault(
        "observations of several workers are all those of the first",
        _ENV,
        "latest, frozen = worker.latest.get(prefix + name)",
        "latest, frozen = self.workers[0].latest.get(prefix + name)",
        _EQUAL,
    ),
    Fault(
        "frames are the last observation",
        _ENV,
        "self._observation(frame(number))",
        "self._observation()",
        _EQUAL,
    ),
    Fault(
        "an episode of a worker that failed runs on",
        _ENV,
        "self._book.truncated[env_id], self._cause[env_id] = True, WORKER",
        "self._cause[env_id] = WORKER",
        _STEP,
    ),
    Fault(
        "an episode that a worker lost shows nothing at its end",
        _ENV,
        "kept[env_id] = worker.latest[OBS + name][env_id - worker.rows.start]",
        "pass",
        _STEP,
    ),
    Fault(
        "an episode that had ended is truncated when its worker fails",
        _ENV,
        "if not self._book.done[env_id] and env_id not in given_up:",
        "if env_id not in given_up:",
        (f"{_ON_FAILURES}test_an_end_before_the_failure_stays_what_it_was",),
    ),
    Fault(
        "what replaces a lost episode until its reset earns rewards",
        _ENV,
        "found[name][self._frozen] = 0",
        "pass",
        _STEP,
    ),
    Fault(
        "a reset that failed counts its own episodes as lost",
        _ENV,
        "partial(self._reset_request, index, seed), index.tolist())",
        "partial(self._reset_request, index, seed))",
        _RESET,
    ),
    Fault(
        "a new worker is reset where the caller asks for it only",
        _ENV,
        "if worker.fresh:  # it steps nothing",
        "if False:  # it steps nothing",
        _STEP,
    ),
    Fault(
        "an interrupted request leaves its answer behind",
        _ENV,
        "worker.abandon()",
        "pass",
        (_INTERRUPTED, f"{_ON_FAILURES}test_a_step_that_nobody_waits_for_is_given_up_by_the_next_call"),
    ),
    Fault(
        "an interrupted step has happened where it was answered",
        _ENV,
        "answers[worker] = answer",
        "answers[worker] = answer; self._asked = {key: item for key, item in self._asked.items() if key != worker}",
        (f"{_INTERRUPTED}[1]",),
    ),
    Fault(
        "a worker that was killed answers once more",
        _SUPERVISED,
        'self._failure = "was interrupted"',
        'self._failure = ""',
        (_INTERRUPTED,),
    ),
    Fault(
        "a step that was given up is waited for",
        _ENV,
        "self._asked, self._begun = dict(requests), None",
        "self._asked = dict(requests)",
        (f"{_ON_FAILURES}test_a_step_that_nobody_waits_for_is_given_up_by_the_next_call",),
    ),
    Fault(
        "workers compute one after the other",
        _ENV,
        "worker.send(request)",
        'worker.send(request), __import__("select").select([worker.link], [], [])',
        (f"{_ON_ENV}test_workers_compute_at_the_same_time",),
    ),
    Fault(
        "failures add up over the whole run",
        _SUPERVISED,
        'if request.do == "step":',
        "if False:",
        (f"{_ON_FAILURES}test_failures_with_completed_steps_in_between_do_not_add_up",),
    ),
    Fault(
        "a worker that always fails is replaced for ever",
        _SUPERVISED,
        "self.failures += 1",
        "self.failures += 0",
        (f"{_ON_FAILURES}test_a_worker_that_fails_again_and_again_ends_the_run_with_its_last_words",),
    ),
    Fault(
        "the last words of a child that is closed are not waited for",
        _CHILD,
        "self._tail.close()",
        "pass",
        (f"{_ON_FAILURES}test_last_words_are_reported_however_late_they_are_read",),
    ),
    Fault(
        "nobody hears a worker's last words",
        _SUPERVISED,
        "words = self.link.last_words()",
        'words = ""',
        _STEP,
    ),
    Fault(
        "a snapshot overwrites the last observation",
        _SUPERVISED,
        "self.latest = {name: array.copy() for name, array in self.latest.items() if name.startswith(OBS)}",
        "pass",
        (f"{_ON_FAILURES}test_the_last_observation_survives_snapshots",),
    ),
    Fault(
        "files of replaced workers stay open",
        "sims/isolation/links.py",
        "self._memory.close()",
        "pass",
        (f"{_ON_ENV}test_memory_and_open_files_stay_flat",),
    ),
    Fault(
        "what breaks its own spec is taken for a step",
        _ENV,
        "require_layout(answer.arrays, layout, size)",
        "pass",
        (f"{_ON_FAILURES}test_a_step_that_breaks_its_own_spec_is_no_step[dtype]",),
    ),
    Fault(
        "a worker does not look at how its episodes end",
        _WORKER,
        "check_ends(step, self.env.spec, self.env.num_envs)",
        "pass",
        (f"{_ON_FAILURES}test_a_step_that_breaks_its_own_spec_is_no_step[ends]",),
    ),
    Fault(
        "a NaN comes through isolation",
        _WORKER,
        "require_finite_step(self.env, step, self.seeds)",
        "pass",
        (f"{_ON_FAILURES}test_a_step_that_fails_truncates_the_worker_s_episodes_and_no_others[nan]",),
    ),
    Fault(
        "a lost episode that was saved runs again when it is restored",
        _SNAPSHOTS,
        'self._frozen[index] = arrays[f"{_OWN}frozen"]',
        "self._frozen[index] = False",
        _SAVED,
    ),
    Fault(
        "an isolated environment cannot save one that is isolated itself",
        _SNAPSHOTS,
        '_INNER = "worker/"',
        '_INNER = ""',
        _NESTED,
    ),
    Fault(
        "a restored episode keeps the flags of the one before",
        _SNAPSHOTS,
        'for name in ("seed", "time", *FLAGS):',
        'for name in ("seed", "time"):',
        _SAVED,
    ),
)

_BREAKDOWNS = (
    Fault(
        "an episode that broke down counts as one of the policy's",
        "vla_rl/experience/rollout.py",
        "float(sum(host.done.sum() for host in hosts)) - lost",
        "float(sum(host.done.sum() for host in hosts))",
        (f"{_ON_BREAKDOWNS}test_a_window_ends_the_episode_with_a_decision_that_was_not_executed",),
    ),
    Fault(
        "replay joins an episode that broke down to the next one",
        _RUNNING,
        "over[before[-1], env_id], final[before[-1], env_id] = True, final[time, env_id]",
        "pass",
        (f"{_ON_BREAKDOWNS}test_replay_keeps_every_executed_decision_and_bootstraps_after_the_last_one",),
    ),
    Fault(
        "replay joins an episode of the window before that broke down to the next one",
        _RUNNING,
        "found.running[carried[-1]] = True",
        "pass",
        (f"{_ON_BREAKDOWNS}test_replay_ends_an_episode_that_broke_down_before_the_first_decision_of_a_window",),
    ),
    Fault(
        "a member that is played again keeps what it had earned",
        "vla_rl/experience/members.py",
        "self.start, self.reward, self.attempts = start, 0.0, self.attempts + 1",
        "self.reward, self.attempts = 0.0, self.attempts + 1",
        (f"{_ON_BREAKDOWNS}test_a_member_whose_simulator_broke_down_is_played_again",),
    ),
    Fault(
        "a member whose simulator broke down is a failure of the policy",
        "vla_rl/experience/groups.py",
        "if self._running[env_id].attempts < ATTEMPTS]",
        "if False]",
        (f"{_ON_BREAKDOWNS}test_a_member_whose_simulator_broke_down_is_played_again",),
    ),
    Fault(
        "an episode that broke down is recorded as it is",
        "vla_rl/experience/collect.py",
        "if decisions[-1].step.cause[env_id] == WORKER]",
        "if False]",
        (f"{_ON_BREAKDOWNS}test_recorded_episodes_are_played_again",),
    ),
)

_EXPERT = (
    Fault(
        "the expert's actions go to other environments",
        "sims/isolation/expert.py",
        "action = on_host(self.expert.act(obs))[:, 0]",
        "action = on_host(self.expert.act(obs))[::-1, 0]",
        (f"{_ON_EXPERT}test_demonstrations_are_those_of_the_expert_here",),
    ),
)

_SOCKET = (
    Fault(
        "anybody may steer the simulator",
        "sims/isolation/server.py",
        "if not self.security.accepts(digest):",
        "if False:",
        (f"{_ON_REMOTE}test_without_the_key_nothing_is_served",),
    ),
    Fault(
        "a simulator is served in the clear beyond this machine",
        "sims/isolation/security.py",
        "not (self.key and self.certificate)",
        "not (self.key or self.certificate)",
        (f"{_ON_REMOTE}test_what_is_not_safe_or_makes_no_sense_is_refused[<lambda>-is another machine]",),
    ),
    Fault(
        "a client says which program runs on the simulator's machine",
        "sims/isolation/server.py",
        'return {**fields, "env": name} if',
        "return fields if",
        (f"{_ON_REMOTE}test_a_client_cannot_choose_the_program",),
    ),
    Fault(
        "requests of any size are read",
        "sims/isolation/server.py",
        "read_message(stream, MAX_REQUEST)",
        "read_message(stream)",
        (f"{_ON_REMOTE}test_a_request_that_is_too_large_ends_the_session",),
    ),
    Fault(
        "a worker waits for a client that has gone",
        "sims/isolation/server.py",
        "poll.register(stream.socket, select.POLLIN)",
        "pass",
        (f"{_ON_REMOTE}test_a_worker_there_that_fails_is_replaced_with_its_last_words[hung-did not answer in time]",),
    ),
    Fault(
        "a client whose machine is gone is waited for for ever",
        "sims/isolation/server.py",
        "_notice_silence(connected)",
        "pass",
        (f"{_ON_REMOTE}test_a_client_whose_machine_is_gone_is_noticed_between_requests",),
    ),
    Fault(
        "a server without free files ends",
        "sims/isolation/server.py",
        "if self._closed:",
        "if True:",
        (f"{_ON_REMOTE}test_a_server_without_free_files_goes_on_later",),
    ),
    Fault(
        "a server is not told apart from somebody else's",
        "sims/isolation/security.py",
        "return context.wrap_socket(connected, server_hostname=host)",
        "context.check_hostname, context.verify_mode = False, ssl.CERT_NONE; return context.wrap_socket(connected)",
        (f"{_ON_REMOTE}test_a_certificate_of_somebody_else_is_not_trusted",),
    ),
)

FAULTS = (*_PROCESS, *_MEMORY, *_OWNER, *_BREAKDOWNS, *_EXPERT, *_SOCKET)
