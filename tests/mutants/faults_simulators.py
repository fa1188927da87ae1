"""Faults in simulators that have installations of their own."""

from __future__ import annotations

from tests.mutants.fault import Fault

_INSTALL, _ON_INSTALL = "sims/installations.py", "tests/sims/test_installations.py::"
_HOLDS = f"{_ON_INSTALL}test_an_installation_holds_its_pins_and_our_packages_and_nothing_else_of_ours"
_FAILED = f"{_ON_INSTALL}test_a_failed_one_is_never_used_and_two_attempts_at_once_make_one"
_OWN = f"{_ON_INSTALL}test_one_of_the_users_own_is_made_anew_when_its_requirements_change"
_SIDE, _ON_SIDE = "sims/side_by_side.py", "tests/sims/test_side_by_side.py::"
_CONTRACT = f"{_ON_SIDE}test_it_keeps_the_contract"
_ON_METAWORLD = "tests/sims/test_metaworld.py::"
_RIG = "sims/camera_rig.py"
_RENDERERS = (
    "tests/sims/test_camera_rig.py::"
    "test_every_task_has_its_own_picture_and_the_renderer_that_was_used_longest_ago_is_closed"
)
_ON_PINS = "tests/sims/test_pins.py::test_a_worker_imports_what_its_simulators_pins_bring_and_nothing_else"
_MULTI, _ON_MULTI = "sims/multi_task.py", "tests/sims/test_multi_task.py::"
_ALONE = f"{_ON_MULTI}test_an_episode_is_that_of_the_member_that_its_seed_chooses"
_KEPT = f"{_ON_MULTI}test_a_snapshot_keeps_who_plays_what_and_how_episodes_ended"

FAULTS = (
    Fault(
        "a half-made installation counts as complete",
        _INSTALL,
        "if not (self.lock.exists() and self.python.exists() and self.requirements.exists()):",
        "if not (self.python.exists() and self.requirements.exists()):",
        (_FAILED,),
    ),
    Fault(
        "other pins go unnoticed",
        _INSTALL,
        'return "ready" if first == _fingerprint(self.requirements) else "outdated"',
        'return "ready" if first else "outdated"',
        (_HOLDS, _OWN),
    ),
    Fault(
        "an installation is locked before it is tried",
        _INSTALL,
        '_run([str(made.python), "-c", f"import vla_rl.contract.wire; {probe}"], made, report)',
        "report(probe)",
        (_FAILED,),
    ),
    Fault(
        "packages of the old requirements stay",
        _INSTALL,
        '_run([python, "-m", "venv", "--clear", str(made.folder / "venv")], made, report)',
        '_run([python, "-m", "venv", str(made.folder / "venv")], made, report)',
        (_OWN,),
    ),
    Fault(
        "an installation sees the whole checkout",
        _INSTALL,
        '"PYTHONPATH": str(_links(made)),',
        '"PYTHONPATH": str(_ROOT),',
        (_HOLDS,),
    ),
    Fault(
        "two processes install the same at once",
        _INSTALL,
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        (_FAILED,),
    ),
    Fault(
        "a complete installation is made again",
        _INSTALL,
        'if made.state() != "ready":',
        "if True:",
        (_HOLDS,),
    ),
    Fault(
        "a mistyped simulator leaves a folder and a lock behind",
        _INSTALL,
        "if own is None and not made.requirements.exists():",
        "if made.folder.exists() and own is None and not made.requirements.exists():",
        (f"{_ON_INSTALL}test_what_cannot_be_installed_is_refused_and_leaves_nothing",),
    ),
    Fault(
        "an installation that Ctrl-C stopped is not mentioned",
        "vla_rl/cli/sims.py",
        "except KeyboardInterrupt as stop:",
        "except ZeroDivisionError as stop:",
        ("tests/cli/test_sims.py::test_ctrl_c_says_that_a_half_made_installation_is_not_used",),
    ),
    Fault(
        "a task of two arms is given to one robot",
        "sims/robosuite.py",
        'needed = 2 if task.startswith("TwoArm") else 1',
        "needed = len(robots)",
        ("tests/sims/test_robosuite.py::test_tasks_and_robots_that_do_not_fit_are_refused",),
    ),
    Fault(
        "initial states of another scene are put into a simulator",
        "sims/libero.py",
        "if states.shape[1] != size:",
        "if states.shape[1] > size:",
        ("tests/sims/test_libero.py::test_initial_states_of_another_scene_are_refused",),
    ),
    Fault(
        "a simulator's NaN is handed on",
        _SIDE,
        "if not (np.isfinite(state).all() and math.isfinite(reward)):",
        "if not math.isfinite(reward):",
        (f"{_ON_SIDE}test_success_terminates_the_limit_truncates_and_what_is_not_finite_diverges",),
    ),
    Fault(
        "simulators take pictures that nobody sees",
        _SIDE,
        "self._stale[:] = False",
        "pass",
        (f"{_ON_SIDE}test_pictures_are_taken_of_what_is_handed_out_only",),
    ),
    Fault(
        "a replayed snapshot forgets its last action",
        _SIDE,
        "for action in self._actions[env_id, : self._book.time[env_id]]:",
        "for action in self._actions[env_id, : self._book.time[env_id] - 1]:",
        (_CONTRACT, f"{_ON_SIDE}test_a_snapshot_of_one_goes_on_in_another_place"),
    ),
    Fault(
        "a simulator's actions are recorded a step late",
        _SIDE,
        "self._actions[env_ids, self._book.time[env_ids] - 1] = action",
        "self._actions[env_ids, self._book.time[env_ids] % self._actions.shape[1]] = action",
        (f"{_ON_SIDE}test_a_snapshot_of_one_goes_on_in_another_place",),
    ),
    Fault(
        "Meta-World's expert is asked for more actions than it plans",
        "sims/metaworld.py",
        "if horizon != 1:",
        "if horizon < 1:",
        (f"{_ON_METAWORLD}test_the_expert_hands_on_the_action_that_comes_with_the_observation",),
    ),
    Fault(
        "a success of Meta-World is paid by its shaped reward",
        "sims/metaworld.py",
        "return (total if self._shaped else float(success)), success",
        "return total, success",
        (f"{_ON_METAWORLD}test_rewards_are_metaworlds_or_success",),
    ),
    Fault(
        "a repeated action goes on after success",
        "sims/metaworld.py",
        "            if success:",
        "            if False:",
        (f"{_ON_METAWORLD}test_a_repeated_action_adds_up_rewards_and_ends_with_success",),
    ),
    Fault(
        "a repeated action takes no time",
        "sims/metaworld.py",
        "control_dt=_DT * action_repeat,",
        "control_dt=_DT,",
        (f"{_ON_METAWORLD}test_a_repeated_action_adds_up_rewards_and_ends_with_success",),
    ),
    Fault(
        "repeated actions outlast Meta-World's episodes",
        "sims/metaworld.py",
        "time_limit * action_repeat > _LIMIT",
        "time_limit > _LIMIT",
        (f"{_ON_METAWORLD}test_a_wrong_option_is_refused",),
    ),
    Fault(
        "the member's episode has the joint seed",
        _MULTI,
        "member.reset(index[chosen], seed[chosen] // len(self._members))",
        "member.reset(index[chosen], seed[chosen])",
        (_ALONE,),
    ),
    Fault(
        "the row and not the seed chooses the member",
        _MULTI,
        "self._played[index] = seed % len(self._members)",
        "self._played[index] = index % len(self._members)",
        (_ALONE, f"{_ON_MULTI}test_it_keeps_the_contract"),
    ),
    Fault(
        "joint actions are taken for physical ones",
        _MULTI,
        "self._begun = self._centre + own * self._half, observe",
        "self._begun = own, observe",
        (_ALONE,),
    ),
    Fault(
        "instructions of all members start at 0",
        _MULTI,
        "task[rows] = on_host(obs.task)[rows] + self._first_task[number]",
        "task[rows] = on_host(obs.task)[rows]",
        (_ALONE,),
    ),
    Fault(
        "actions after a member's end count as executed",
        _MULTI,
        "executed[rows] *= valid[rows][..., None]",
        "pass",
        (_ALONE,),
    ),
    Fault(
        "every member is stepped for nobody",
        _MULTI,
        "played = [number for number in rows if rows[number].size]",
        "played = list(rows)",
        (f"{_ON_MULTI}test_members_that_are_not_played_are_not_stepped",),
    ),
    Fault(
        "members in other processes are stepped one after the other",
        _MULTI,
        "self.env.step_async(*self._begun)",
        'self.env.step_async(*self._begun), __import__("select").select([self.env.workers[0].link], [], [])',
        (f"{_ON_MULTI}test_members_in_other_processes_compute_at_the_same_time",),
    ),
    Fault(
        "a joint snapshot forgets who plays what",
        _MULTI,
        'return self._book.arrays() | {"played": self._played, "cause": cause}',
        'return self._book.arrays() | {"played": self._played.copy(), "cause": cause}',
        (_KEPT,),
    ),
    Fault(
        "cameras of two sizes are joined",
        _MULTI,
        "if known.shape != image.shape:",
        "if False:",
        (f"{_ON_MULTI}test_what_cannot_be_joined_is_refused",),
    ),
    Fault(
        "an isolated environment runs here whatever installation is named",
        "sims/isolated.py",
        "python = python or str(installations.find(installation).python)",
        "pass",
        (_HOLDS,),
    ),
    Fault(
        "an installed simulator is made in this process's Python",
        "sims/metaworld.py",
        'return isolated.make(num_envs, "sims.metaworld:make_in_process", options, workers, installation="metaworld")',
        'return isolated.make(num_envs, "sims.metaworld:make_in_process", options, workers)',
        ("tests/test_catalog.py::test_one_that_is_not_installed_says_how_to_install_it[metaworld]",),
    ),
    Fault(
        "a file of initial states is read whatever it holds",
        "sims/libero.py",
        'if not {"f8", "<"} <= set(texts) or len(shapes) != 1 or len(data) != 8 * math.prod(shapes[0]):',
        "if len(shapes) != 1:",
        ("tests/sims/test_libero.py::test_a_file_that_holds_something_else_is_refused_and_not_run",),
    ),
    Fault(
        "idle environments of all tasks are kept",
        _SIDE,
        "if len(self._idle) > self._most_idle:",
        "if False:",
        (f"{_ON_SIDE}test_a_pool_makes_what_is_missing_and_closes_what_was_idle_longest",),
    ),
    Fault(
        "the renderers of all tasks stay open",
        _RIG,
        "if len(self._renderers) >= self._most:",
        "if False:",
        (_RENDERERS,),
    ),
    Fault(
        "the renderer that was made first is closed, however often it is used",
        _RIG,
        "self._renderers.move_to_end(task)",
        "pass",
        (_RENDERERS,),
    ),
    Fault(
        "renderers stay open when their environment is closed",
        _RIG,
        "self._renderers.popitem()[1].close()",
        "self._renderers.popitem()",
        (_RENDERERS,),
    ),
    Fault(
        "idle environments stay open when the others are closed",
        _SIDE,
        "self._idle.popitem()[1][1].close()",
        "self._idle.popitem()",
        (f"{_ON_SIDE}test_a_pool_makes_what_is_missing_and_closes_what_was_idle_longest",),
    ),
    Fault(
        "no episode may be shorter than nothing",
        _SIDE,
        "if value < 1:",
        "if value < 0:",
        (f"{_ON_SIDE}test_sizes_and_limits_below_one_are_refused",),
    ),
    Fault(
        "simulators of others draw through our tabletop, whose packages their pins do not bring",
        "sims/mujoco/shared_renderer.py",
        "from sims.mujoco.canvas import Canvas",
        "from sims.mujoco.render import Canvas",
        (f"{_ON_PINS}[libero]", f"{_ON_PINS}[metaworld]", f"{_ON_PINS}[robosuite]"),
    ),
    Fault(
        "a worker needs what only the learner has",
        "sims/isolation/worker.py",
        "from sims.isolation.expert import with_expert",
        "from rich.console import Console as _\nfrom sims.isolation.expert import with_expert",
        (f"{_ON_PINS}[robosuite]",),
    ),
)
