"""Faults in the driver and in everything built on its decisions: recordings, columns, windows, saved buffers."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PACKAGE, _TESTS = "vla_rl/experience/", "tests/experience/"
_DRIVER, _COLLECT, _COLUMNS = f"{_PACKAGE}driver.py", f"{_PACKAGE}collect.py", f"{_PACKAGE}columns.py"
_WINDOWS, _REPLAY, _STORAGE = f"{_PACKAGE}windows.py", f"{_PACKAGE}replay.py", f"{_PACKAGE}storage.py"
_RELABEL, _GROUPS, _ROLLOUT = f"{_PACKAGE}relabel.py", f"{_PACKAGE}groups.py", f"{_PACKAGE}rollout.py"
_ON_DRIVER, _ON_TRAJECTORIES = f"{_TESTS}test_driver.py::test_", f"{_TESTS}test_trajectories.py::test_"
_ON_REPLAY, _ON_STORAGE = f"{_TESTS}test_replay.py::test_", f"{_TESTS}test_storage.py::test_"
_ON_RELABEL, _ON_ROLLOUT = f"{_TESTS}test_relabel.py::test_", f"{_TESTS}test_rollout.py::test_"
_HOLDS = f"{_ON_TRAJECTORIES}a_window_holds_context_actions_and_outcomes"

FAULTS = (
    Fault(
        "the mode of the driver is ignored",
        _DRIVER,
        "self.policy.act(features, self.state, self.mode, ",
        'self.policy.act(features, self.state, "sample", ',
        (f"{_ON_DRIVER}every_observation_is_encoded_once_and_ended_environments_are_reset_first",),
    ),
    Fault(
        "features of the episode before survive a reset",
        _DRIVER,
        "                self._features = None",
        "                pass",
        (f"{_ON_DRIVER}a_reset_after_encoding_encodes_again",),
    ),
    Fault(
        "an infinite action is executed",
        _DRIVER,
        "np.isfinite(action)",
        "~np.isnan(action)",
        (f"{_ON_DRIVER}an_action_that_is_not_finite_moves_nothing_wherever_it_is",),
    ),
    Fault(
        "the driver stops at the first end",
        _DRIVER,
        "if decision.host.done.all():",
        "if decision.host.done.any():",
        (f"{_ON_DRIVER}it_steps_until_the_last_environment_has_ended",),
    ),
    Fault(
        "final features are of the whole batch's first rows",
        _DRIVER,
        "self._encode(self.obs.select(env_ids), state)[0]",
        "self._encode(self.obs.select(np.arange(len(env_ids))), state)[0]",
        (f"{_ON_DRIVER}final_features_are_of_the_asked_environments_and_change_nothing",),
    ),
    Fault(
        "surplus environments are counted as other seeds",
        _DRIVER,
        "[seeds[-1]] * spare",
        "[seeds[0]] * spare",
        (f"{_ON_DRIVER}surplus_environments_repeat_the_last_seed",),
    ),
    Fault(
        "a decision shows the observation after it",
        _DRIVER,
        "return Decision(obs, recorded(self.policy, features), out, step,",
        "return Decision(step.obs, recorded(self.policy, features), out, step,",
        (f"{_ON_DRIVER}a_decision_holds_its_observation_its_action_and_its_step",),
    ),
    Fault(
        "frames after the end are recorded",
        _COLLECT,
        "if step.valid[env_id, i]]",
        "if i < len(step.frames)]",
        (f"{_ON_TRAJECTORIES}frames_and_outcomes_end_where_the_episode_ends",),
    ),
    Fault(
        "an episode has succeeded from its start",
        _COLLECT,
        "success=last & success,",
        "success=np.full(count, success),",
        (f"{_ON_TRAJECTORIES}frames_and_outcomes_end_where_the_episode_ends",),
    ),
    Fault(
        "progress counts the successes of the last batch only",
        _COLLECT,
        "sum(bool(part.success[-1]) for part in parts)",
        "sum(bool(part.success[-1]) for part in parts[-len(whole) :])",
        (f"{_ON_TRAJECTORIES}progress_counts_all_successes",),
    ),
    Fault(
        "the first step of an episode has the outcome of the episode before",
        _WINDOWS,
        'np.searchsorted(trajectories.ends, future, side="right")',
        'np.searchsorted(trajectories.ends, future - 1, side="left")',
        (f"{_ON_TRAJECTORIES}the_outcome_of_a_window_is_that_of_its_own_episode",),
    ),
    Fault(
        "a window counts frames behind its episode's end",
        _WINDOWS,
        "count.append(np.minimum(end - 1 - present, 2 * frames))",
        "count.append(np.minimum(end - present, 2 * frames))",
        (f"{_ON_TRAJECTORIES}windows_stay_inside_their_episode",),
    ),
    Fault(
        "a call counts frames of the next one",
        _WINDOWS,
        'np.minimum(table["count"][index], frames)',
        'table["count"][index]',
        (f"{_ON_TRAJECTORIES}a_call_is_the_first_half_of_its_window",),
    ),
    Fault(
        "a saved buffer forgets which robot is which",
        _REPLAY,
        'self.robots, self._decisions = list(state["robots"]), None',
        "self._decisions = None",
        (f"{_ON_REPLAY}a_saved_buffer_knows_its_robots",),
    ),
    Fault(
        "a buffer on the disk forgets which robot is which",
        _STORAGE,
        '"robots": list(robots)}',
        '"robots": []}',
        (f"{_ON_STORAGE}the_next_process_knows_the_robots",),
    ),
    Fault(
        "running episodes are not in the saved state",
        _STORAGE,
        "self._used = min(self._capacity, filled[1] + filled[2])",
        "self._used = min(self._capacity, filled[1])",
        (f"{_ON_REPLAY}a_saved_replay_resumes_bit_for_bit",),
    ),
    Fault(
        "relabelled decisions have the task of the first step",
        _RELABEL,
        "torch.from_numpy(episodes.task[starts])",
        "torch.from_numpy(episodes.task[: len(starts)])",
        (f"{_ON_RELABEL}corrections_stay_marked",),
    ),
    Fault(
        "a rollout has the task of the observation after the decision",
        _ROLLOUT,
        "to_tensor(decision.obs.task)",
        "to_tensor(decision.step.obs.task) * 0",
        (f"{_ON_REPLAY}every_decision_keeps_its_version_its_task_and_who_acted",),
    ),
    Fault(
        "a seed is drawn for one environment only",
        f"{_PACKAGE}seeds.py",
        "self.drawn += 1",
        "self.drawn += 2",
        (f"{_ON_ROLLOUT}seeds_come_once_each_before_they_repeat",),
    ),
)
