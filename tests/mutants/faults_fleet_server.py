"""Faults in the fleet's server and in what it counts."""

from __future__ import annotations

from tests.mutants.fault import Fault

_WATCHER, _ON = "vla_rl/fleet/watcher.py", "tests/fleet/test_server.py::"
_LEARNING = "tests/recipes/fleet/test_learning.py::"
_ROBOT = "tests/recipes/robots/test_fleet_policy.py::"
_DEMO = "tests/recipes/fleet/test_demo.py::"
_PAGE = (f"{_ON}test_what_robots_send_is_on_the_page_also_after_a_restart",)

FAULTS = (
    Fault(
        "an episode that was played again is counted",
        _WATCHER,
        'if end.outcome != "redo":',
        'if end.outcome != "re-do":',
        _PAGE,
    ),
    Fault(
        "a robot that has sent everything seems to hold more",
        "vla_rl/fleet/session.py",
        "return max(0, self.offered - self.durable)",
        "return max(1, self.offered - self.durable)",
        _PAGE,
    ),
    Fault(
        "a robot sends a second run's episodes under the names of the first",
        "vla_rl/recipes/robots/streaming.py",
        "uuid.uuid4().hex[:12]",
        '"run"',
        ("tests/recipes/robots/test_streaming.py::test_without_a_server_a_robot_goes_on_and_sends_it_next_time",),
    ),
    Fault(
        "the end of an episode is not sent",
        "vla_rl/recipes/robots/streaming.py",
        "        self._do(self._end, records, name, self._task(step))",
        "        self._task(step)",
        ("tests/recipes/robots/test_streaming.py::test_without_a_server_a_robot_goes_on_and_sends_it_next_time",),
    ),
    Fault(
        "a server that is started again publishes its first policy again",
        "vla_rl/recipes/fleet/publishing.py",
        "if registry.releases.active is None:",
        "if registry.releases.canary is None:",
        ("tests/cli/test_fleet_policies.py::test_a_server_begins_with_a_policy_and_keeps_it",),
    ),
    Fault(
        "a golden answer is of other noise than its seed's",
        "vla_rl/recipes/fleet/golden.py",
        "[torch.Generator().manual_seed(seed)]",
        "[torch.Generator().manual_seed(SEED)]",
        ("tests/cli/test_fleet_policies.py::test_a_published_checkpoint_answers_on_a_robot_what_it_answered_here",),
    ),
    Fault(
        "a version is promoted before anybody has tried it",
        "vla_rl/recipes/fleet/releasing.py",
        "or not verdict.compared or",
        "or",
        (f"{_LEARNING}test_a_trial_ends_by_the_rule_and_one_at_a_time_is_tried",),
    ),
    Fault(
        "what the policy did counts as a person's",
        "vla_rl/recipes/fleet/recorded.py",
        "person = torch.as_tensor(labels.intervened[ahead])[:, None] & valid",
        "person = valid",
        (f"{_LEARNING}test_it_imitates_what_the_person_did_and_the_robots_try_it",),
    ),
    Fault(
        "a robot runs a policy that answers otherwise than it should",
        "vla_rl/recipes/robots/fleet_policy.py",
        "        check_golden(policy, cached)",
        "        _ = policy",
        (f"{_ROBOT}test_a_policy_that_answers_otherwise_or_is_not_signed_is_refused_and_the_old_one_stays",),
    ),
    Fault(
        "one end that cannot be read ends the page about a fleet",
        "vla_rl/recipes/fleet/demo_report.py",
        "except ContractError:  # the server's page named it",
        "except ():",
        (f"{_DEMO}test_an_end_that_cannot_be_read_is_left_out_of_the_page",),
    ),
    Fault(
        "a step that nobody can learn from is nobody's concern",
        _WATCHER,
        "check_step(record.payload, self._specs.get(record.robot))",
        "pass",
        (f"{_ON}test_a_step_that_nobody_can_learn_from_is_stored_and_an_alarm_by_name",),
    ),
    Fault(
        "robots that never had a canary vote on it",
        "vla_rl/fleet/registry.py",
        "if releases.version_for(robot) in running)",
        "if running)",
        (
            "tests/fleet/test_registry.py::test_a_canary_that_does_worse_is_rolled_back_by_itself",
            f"{_ON}test_only_what_its_robots_did_and_sent_counts_for_a_canary",
        ),
    ),
    Fault(
        "an end without its steps is a vote",
        _WATCHER,
        "if known and played != _Running(record.sender, record.episode, end.steps, version):",
        "if False:",
        (f"{_ON}test_only_what_its_robots_did_and_sent_counts_for_a_canary",),
    ),
    Fault(
        "episodes of a ledger that was set back do not count",
        "vla_rl/fleet/registry.py",
        "if position < self._position:",
        "if False:",
        (f"{_ON}test_episodes_of_a_ledger_that_was_set_back_to_a_copy_count",),
    ),
    Fault(
        "a version that had no room once is never fetched again",
        "vla_rl/recipes/robots/fleet_policy.py",
        "again = math.inf if isinstance(error, for_ever) else time.monotonic() + backoff.next()",
        "again = math.inf",
        (f"{_ROBOT}test_what_failed_for_a_passing_reason_is_tried_again",),
    ),
    Fault(
        "a version that cannot be read is never fetched again",
        "vla_rl/recipes/robots/fleet_policy.py",
        "        except Exception as error:",
        "        except UserError as error:",
        (f"{_ROBOT}test_what_failed_for_a_passing_reason_is_tried_again",),
    ),
    Fault(
        "a robot does not go back to an older version",
        "vla_rl/recipes/robots/fleet_policy.py",
        "if version and version != self.version and",
        "if version > self.version and",
        (f"{_ROBOT}test_it_runs_what_the_server_wants_from_one_episode_to_the_next",),
    ),
    Fault(
        "many instructions of one family count as many",
        "vla_rl/algorithms/chunks.py",
        "self._family.to(chunks.task.device)[chunks.task]",
        "chunks.task",
        ("tests/algorithms/test_hg_dagger.py::test_a_family_of_many_instructions_counts_once",),
    ),
    Fault(
        "what a person rescued counts for the policy",
        _WATCHER,
        "end.success and not end.intervened",
        "end.success",
        (f"{_ON}test_what_a_person_rescued_is_no_success_of_the_policy",),
    ),
    Fault(
        "an episode that a person ends belongs to no version",
        "vla_rl/recipes/robots/streaming.py",
        "version = max(record.policy_version for record in records)",
        "version = records[-1].policy_version",
        (
            "tests/recipes/robots/test_streaming.py::"
            "test_the_end_of_an_episode_belongs_to_the_version_that_it_was_played_with_whoever_acted_last",
        ),
    ),
    Fault(
        "the demo of a fleet does not see that a robot has failed",
        "vla_rl/recipes/fleet/robot_processes.py",
        "            if code:",
        "            if code is None and not self._logs:",
        (f"{_DEMO}test_a_robot_that_ends_with_an_error_is_named_with_the_end_of_its_log",),
    ),
    Fault(
        "simulated robots do not wait for the learner",
        "vla_rl/recipes/fleet/robot_processes.py",
        "signal.SIGSTOP if paused else signal.SIGCONT",
        "signal.SIGCONT",
        (f"{_DEMO}test_robots_stand_still_while_the_learner_is_behind_and_go_on",),
    ),
    Fault(
        "the demo's curve has what a person rescued",
        "vla_rl/recipes/fleet/demo_report.py",
        "Rate.of([one.alone for one in some]), sum",
        "Rate.of([one.end.success for one in some]), sum",
        (f"{_DEMO}test_a_curve_is_of_windows_of_episodes_without_a_person",),
    ),
    Fault(
        "a demo that was stopped begins anew",
        "vla_rl/recipes/fleet/demo.py",
        "left = {name: self.episodes - before[name] for name in names if before[name] < self.episodes}",
        "left = dict.fromkeys(names, self.episodes)",
        (f"{_DEMO}test_one_command_has_robots_practise_with_a_person_and_a_learner_and_makes_a_page",),
    ),
)
