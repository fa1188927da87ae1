"""Faults in the specs of environments and in the checks of foreign ones."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RUN, _CHECK, _GYM = "vla_rl/evaluation/run.py", "vla_rl/contract/check.py", "sims/gym.py"

_SUCCESS = (
    Fault(
        "without success the score is a success rate of 0 %",
        _RUN,
        "has_success=env.spec.success is not None",
        "has_success=True",
        ("tests/evaluation/test_run.py::test_without_success_the_score_is_the_mean_return",),
    ),
    Fault(
        "Gymnasium's tasks claim to know success",
        _GYM,
        'success="at_end" if self.success_from else None,',
        'success="once",',
        ("tests/sims/test_gym.py::test_an_environment_without_success_never_reports_one",),
    ),
    Fault(
        "an environment without success may report one",
        _CHECK,
        "if spec.success is None:",
        'if spec.success == "none":',
        ("tests/sims/test_gym.py::test_an_environment_without_success_never_reports_one",),
    ),
    Fault(
        "a reward model's success does not exist where the environment has none",
        "vla_rl/rewards/env.py",
        'env.spec.success or "once"',
        "env.spec.success",
        ("tests/rewards/test_env.py::test_a_reward_model_brings_success_to_an_environment_that_has_none",),
    ),
)

_CATALOG, _LOAD, _ON_CATALOG = "sims/catalog.py", "vla_rl/contract/load.py", "tests/test_catalog.py::"
_OWN = f"{_ON_CATALOG}test_an_environment_of_the_working_folder_is_made_by_its_string"
_SAME_SPEC = f"{_ON_CATALOG}test_the_spec_of_a_name_is_that_of_its_environment"

_NAMES = (
    Fault("the working folder is not searched", _LOAD, "    search_working_folder()", "    pass", (_OWN,)),
    Fault(
        "a file of the working folder hides an installed package",
        _LOAD,
        "sys.path.append(folder)",
        "sys.path.insert(0, folder)",
        (f"{_ON_CATALOG}test_the_working_folder_hides_no_installed_package",),
    ),
    Fault(
        "classes that older checkpoints name are not found where they are now",
        _LOAD,
        "module_name = MOVED.get(module_name, module_name)",
        "module_name = MOVED.get(target, module_name)",
        ("tests/contract/test_load.py::test_what_checkpoints_name_is_found_where_it_is_now",),
    ),
    Fault(
        "a declared spec ignores the options",
        _CATALOG,
        "spec: EnvSpec | None = None if declared is None else resolve(declared)(**options)",
        "spec: EnvSpec | None = None if declared is None else resolve(declared)()",
        (_SAME_SPEC,),
    ),
    Fault(
        "a declared spec is not used",
        _CATALOG,
        "declared = extras_of(builder).spec",
        "declared = TaskExtras().spec",
        (f"{_ON_CATALOG}test_the_spec_is_read_without_building_the_environment",),
    ),
    Fault(
        "the spec has cameras although nothing is rendered",
        "sims/mujoco/env.py",
        "names = tuple(cameras) if render else ()",
        "names = tuple(cameras)",
        ("tests/sims/test_lift.py::test_state_only_environments_need_no_opengl",),
    ),
    Fault(
        "an expert plans one action whatever was asked",
        _CATALOG,
        "resolve(declared)(horizon=horizon)",
        "resolve(declared)(horizon=1)",
        (f"{_ON_CATALOG}test_an_expert_plans_as_far_as_it_is_asked",),
    ),
    Fault(
        "place is demonstrated by the expert of lift",
        "sims/mujoco/tasks/place.py",
        'expert="sims.mujoco.tasks.place_expert:PlaceExpert"',
        'expert="sims.mujoco.tasks.lift_expert:LiftExpert"',
        (f"{_ON_CATALOG}test_every_task_declares_its_own_expert_and_scenes",),
    ),
    Fault(
        "unknown options of a user's environment end in a traceback",
        _CATALOG,
        "        if option not in known:",
        "        if option in ():",
        (f"{_ON_CATALOG}test_a_wrong_name_or_option_of_ones_own_gets_help",),
    ),
    Fault(
        "a task without a swapped instruction runs unswapped",
        _CATALOG,
        'raise _undeclared(name, "swapped instruction",',
        'return _undeclared(name, "swapped instruction",',
        (f"{_ON_CATALOG}test_what_a_task_does_not_declare_is_refused_in_one_sentence",),
    ),
)

_FOREIGN, _DRIVER, _ON_FOREIGN = (
    "vla_rl/contract/foreign.py",
    "vla_rl/experience/driver.py",
    "tests/contract/test_foreign.py::",
)
_MISTAKE = f"{_ON_FOREIGN}test_a_mistake_in_an_environment_is_one_sentence"
_BLAMED = f"{_ON_FOREIGN}test_a_nan_of_an_environment_is_blamed_on_the_environment"

_CHECKED = (
    Fault(
        "a NaN of the environment reaches the learner",
        _DRIVER,
        "require_finite_step(self.env, step, self.seeds)",
        "pass",
        (_BLAMED,),
    ),
    Fault(
        "a NaN of a reset reaches the policy",
        _DRIVER,
        "require_finite_observation(self.env, obs, self.seeds)",
        "pass",
        (f"{_ON_FOREIGN}test_a_nan_of_a_reset_is_blamed_on_the_environment",),
    ),
    Fault(
        "a NaN is blamed on another environment",
        _FOREIGN,
        "np.argwhere(~on_host(finite))[0][0]",
        "np.argwhere(on_host(finite))[0][0]",
        (_BLAMED,),
    ),
    Fault(
        "only rewards may not be NaN",
        _FOREIGN,
        "    require_finite_observation(env, step.obs, seeds)",
        "    pass",
        (_BLAMED,),
    ),
    Fault(
        "a foreign observation is not compared with its spec",
        _FOREIGN,
        "check_observation(obs, env.spec, env.num_envs)",
        "pass",
        (_MISTAKE,),
    ),
    Fault(
        "a foreign step is not compared with its spec",
        _FOREIGN,
        "check_step(step, env.spec, env.num_envs, horizon)",
        "pass",
        (_MISTAKE,),
    ),
    Fault(
        "arguments of foreign methods are not checked",
        _FOREIGN,
        "inspect.signature(found).bind(",
        "dict(",
        (_MISTAKE,),
    ),
    Fault(
        "a float64 state passes",
        _FOREIGN,
        '_require(spec.state.dtype == "float32" and len(spec.state.shape) == 1, "state"',
        '_require(len(spec.state.shape) == 1, "state"',
        (f"{_ON_FOREIGN}test_a_spec_that_does_not_fit_together_is_refused",),
    ),
    Fault(
        "the check leaves episodes in the middle",
        _FOREIGN,
        "    env.reset(env_ids, seed + env_ids)",
        "    pass",
        (f"{_ON_FOREIGN}test_the_check_takes_few_actions_and_leaves_every_episode_at_its_start",),
    ),
    Fault(
        "a policy that cannot be saved is trained",
        _FOREIGN,
        "for needed in needs:",
        "for needed in ():",
        (f"{_ON_FOREIGN}test_a_policy_without_a_method_is_named",),
    ),
)

_CHECK, _ON_POLICY = "vla_rl/contract/check.py", "tests/recipes/test_foreign_policy.py::"
_NO_FOLDER = f"{_ON_POLICY}test_a_policy_that_breaks_the_contract_leaves_no_run_folder"
_BEFORE_LEARNER = "tests/recipes/test_trainers.py::test_a_new_policy_is_checked_before_its_learner_is_built"

_POLICY = (
    Fault(
        "features that critics read may be missing",
        _CHECK,
        "    _check_features(policy, features, env.num_envs)",
        "    pass",
        (_NO_FOLDER, _BEFORE_LEARNER),
    ),
    Fault(
        "critics need no time",
        _CHECK,
        '{} if sizes is None else {**sizes, "time": 1}.items()',
        "{} if sizes is None else sizes.items()",
        (_NO_FOLDER, _BEFORE_LEARNER),
    ),
    Fault(
        "features that critics read may have any size",
        _CHECK,
        "math.prod(shape[1:]) != size:",
        "False:",
        (_NO_FOLDER,),
    ),
    Fault(
        "a policy without feature_sizes is trained",
        _FOREIGN,
        '("save_pretrained", "trainable", "feature_sizes")',
        '("save_pretrained", "trainable")',
        (_BEFORE_LEARNER,),
    ),
    Fault(
        "a learner is built before its policy is checked",
        "vla_rl/recipes/training_setup.py",
        "    check(policy)",
        "    pass",
        (_BEFORE_LEARNER, "tests/recipes/test_trainers.py::test_a_policy_of_ones_own_is_checked_before_it_is_trained"),
    ),
    Fault(
        "a foreign starting policy is not checked",
        "vla_rl/recipes/policies.py",
        '    check_if_foreign(policy, env_config, seed, ("save_pretrained",))',
        "    pass",
        (_NO_FOLDER, f"{_ON_POLICY}test_imagination_checks_a_policy_of_ones_own_before_it_collects"),
    ),
    Fault(
        "a foreign policy imitates unchecked",
        "vla_rl/recipes/imitate_dataset.py",
        "            self._check(policy)",
        "            pass",
        (f"{_ON_POLICY}test_imitation_checks_a_policy_of_ones_own",),
    ),
    Fault(
        "without an environment a foreign policy imitates unchecked",
        "vla_rl/recipes/imitate_dataset.py",
        "elif is_foreign(policy):",
        "elif False:",
        (f"{_ON_POLICY}test_imitation_checks_a_policy_of_ones_own",),
    ),
    Fault(
        "the copy of a refused policy keeps its run folder",
        "vla_rl/training/tracking.py",
        "if self.resumed or any(path.name != START for path in recorded):",
        "if self.resumed or recorded:",
        (_NO_FOLDER, f"{_ON_POLICY}test_an_earlier_run_gets_its_name_back"),
    ),
)

_TRAINED = (
    Fault(
        "a run in a foreign environment starts unchecked",
        "vla_rl/recipes/recipe.py",
        "        env.check()",
        "        pass",
        ("tests/recipes/test_foreign_env.py::test_a_foreign_environment_is_checked_before_the_run_folder_exists",),
    ),
)

_DIVERGED = "tests/sims/test_lift.py::test_a_diverged_row_earns_nothing_although_its_last_state_would_succeed"

_MEASURED = (
    Fault(
        "the bootstrap interval covers 90 %",
        "vla_rl/evaluation/stats.py",
        "[0.025, 0.975]",
        "[0.05, 0.95]",
        ("tests/evaluation/test_stats.py::test_the_bootstrap_interval_covers_95_percent",),
    ),
    Fault(
        "a diverged row is rewarded for its last state",
        "sims/mujoco/env.py",
        "return np.where(diverged, np.float32(0), result.reward)",
        "return result.reward",
        (_DIVERGED,),
    ),
    Fault(
        "a diverged row succeeds by its last state",
        "sims/mujoco/env.py",
        "success = result.success & ~diverged",
        "success = result.success",
        (_DIVERGED,),
    ),
)

_OWN = "tests/recipes/test_own_envs.py::"
_EVERY_COMMAND = f"{_OWN}test_rewards_of_whole_chunks_are_refused_by_every_command"

_PLAYED = (
    Fault(
        "rewards and ends of other environments are taken",
        "sims/numpy_env.py",
        "reward, success, late = one_each(self._advance(env_ids, action), len(env_ids))",
        "reward, success, late = self._advance(env_ids, action)",
        (f"{_OWN}test_an_advance_of_another_shape_says_so",),
    ),
    Fault(
        "an environment of one's own is evaluated unseen",
        "vla_rl/cli/eval_checkpoint.py",
        'config.env.required("eval").check()',
        'config.env.required("eval")',
        (_EVERY_COMMAND,),
    ),
    Fault(
        "an environment of one's own is recorded unseen",
        "vla_rl/cli/collect.py",
        "    env_config.check()",
        "    pass",
        (_EVERY_COMMAND,),
    ),
    Fault(
        "an environment inside another is trained in unseen",
        "vla_rl/recipes/env_config.py",
        'if ":" in self.name or ":" in str(inside):',
        'if ":" in self.name:',
        (f"{_OWN}test_one_inside_another_is_checked_too",),
    ),
    Fault(
        "a critic's input that is not there is a traceback",
        "vla_rl/recipes/state_ppo.py",
        "if unknown := sorted(set(self.experience.privileged) - set(env.spec.extras)):",
        "if unknown := sorted(set[str]()):",
        (f"{_OWN}test_a_critic_that_reads_what_is_not_there_names_it",),
    ),
    Fault(
        "inspect repeats the range of every entry",
        "vla_rl/recipes/inspect_env.py",
        "    if spec.names:",
        "    if True:",
        (f"{_OWN}test_a_range_that_many_entries_share_is_said_once",),
    ),
    Fault(
        "SAC needs a policy to begin with",
        "vla_rl/recipes/policies.py",
        "return SquashedPolicy(context.base or _reads_state(spec), self.squashed)",
        'return SquashedPolicy(context.start("SAC"), self.squashed)',
        ("tests/recipes/test_sac_alone.py::test_it_is_built_without_a_policy_and_refuses_discrete_actions",),
    ),
    Fault(
        "groups do not count what diverged",
        "vla_rl/experience/groups.py",
        'self._diverged += sum(cause[env_id] == "diverged" for env_id in self._running)',
        "self._diverged += 0",
        ("tests/experience/test_groups.py::test_episodes_that_diverged_are_counted",),
    ),
    Fault(
        "a suite says nothing of what can hardly be meant",
        "vla_rl/recipes/suite_results.py",
        'results["remarks"] = said',
        "pass",
        ("tests/recipes/test_suite_run.py::test_the_results_of_a_suite_remark_what_can_hardly_be_meant",),
    ),
)

FAULTS = (*_SUCCESS, *_NAMES, *_CHECKED, *_POLICY, *_TRAINED, *_MEASURED, *_PLAYED)
