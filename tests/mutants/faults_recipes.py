"""Faults in recipes: what a config builds and how it runs."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CONTEXT, _OFF = "vla_rl/recipes/context.py", "vla_rl/recipes/off_policy.py"
_ON_TRAINERS = "tests/recipes/test_trainers.py::"

_FILES = "vla_rl/recipes/config_files.py"
_ON_FILES, _ON_SAVED = "tests/recipes/test_config_files.py::", "tests/recipes/test_saved.py::"
_BANDED = (
    "tests/recipes/test_run_report.py::test_a_score_is_one_band_beside_its_beginning_and_what_is_constant_is_one_line"
)
_SPEC, _ON_DATASETS = "vla_rl/recipes/dataset_spec.py", "tests/recipes/test_imitate_dataset.py::"
_EXPERT = "vla_rl/recipes/imitate_expert.py"
_WATCHED = "tests/recipes/test_imitate_expert.py::test_the_expert_is_recorded_imitated_and_the_policy_validated"
_STAGES, _ON_NUMBERS = "vla_rl/recipes/stages.py", "tests/recipes/test_numbers.py::"
_OUTSIDE = "tests/recipes/test_outside.py::test_a_policy_an_environment_and_a_config_of_ones_own"

_ENV_CONFIG, _ON_ENVS = "vla_rl/recipes/env_config.py", "tests/recipes/test_env_config.py::"

FAULTS = (
    Fault(
        "options of a config follow it into another environment",
        _ENV_CONFIG,
        "return self if name == self.name else EnvConfig(name)",
        "return replace(self, name=name)",
        (f"{_ON_ENVS}test_options_of_a_config_belong_to_the_environment_that_they_were_written_for",),
    ),
    Fault(
        "an evaluation is silent about success at the reset",
        "vla_rl/evaluation/run.py",
        "at_once = int((self.success & (self.length <= 1)).sum())",
        "at_once = 0",
        ("tests/evaluation/test_run.py::test_what_can_hardly_be_meant_is_remarked",),
    ),
    Fault(
        "a new policy builds an environment to read its spec",
        "vla_rl/recipes/policies.py",
        "new_policy(self.target, context.env.spec(),",
        "new_policy(self.target, context.env.make(1).spec,",
        (f"{_ON_TRAINERS}test_a_new_policy_is_built_without_an_environment",),
    ),
    Fault(
        "a replay buffer builds an environment to read its spec",
        _OFF,
        "policy, spec, horizon, noise, horizon), 1):",
        "policy, context.env.make(1).spec, horizon, noise, horizon), 1):",
        (f"{_ON_TRAINERS}test_demonstrations_are_replayed_without_an_environment_of_their_own",),
    ),
    Fault(
        "an environment is lift unless it is named",
        _ENV_CONFIG,
        "    name: str",
        '    name: str = "lift"',
        (f"{_ON_ENVS}test_a_config_names_its_environment",),
    ),
    Fault(
        "a command without an environment goes on",
        _ENV_CONFIG,
        "if not self.name:",
        "if False:",
        (
            f"{_ON_ENVS}test_where_the_command_line_may_name_it_there_is_none_before",
            "tests/cli/test_main.py::test_mistakes_are_answered_with_one_sentence",
        ),
    ),
    Fault(
        "the band of the validation curve is upside down",
        "vla_rl/recipes/metrics.py",
        "x, success, low, high = (",
        "x, success, high, low = (",
        ("tests/recipes/test_metrics.py::test_the_validation_curve_has_a_point_and_an_interval_for_every_validation",),
    ),
    Fault(
        "the mean over seeds has the range of the best seed alone",
        "vla_rl/evaluation/report.py",
        "({min(values):.1%} to",
        "({max(values):.1%} to",
        ("tests/recipes/imagine/test_study.py::test_every_method_is_tabled_over_its_seeds",),
    ),
    Fault(
        "methods that share a world model take the place of those that train it",
        "vla_rl/recipes/imagine/study.py",
        '"train and improve": second',
        '"improve": second',
        ("tests/recipes/imagine/test_study.py::test_methods_that_train_the_same_world_model_share_it",),
    ),
    Fault(
        "all processes play the same seeds",
        _CONTEXT,
        "SeedStream(seeds.start + self.part, seeds.stop, self.parts)",
        "SeedStream(seeds.start, seeds.stop)",
        (f"{_ON_TRAINERS}test_processes_play_different_seeds",),
    ),
    Fault(
        "the seeds of a process overlap with the next one's",
        _CONTEXT,
        "SeedStream(seeds.start + self.part, seeds.stop, self.parts)",
        "SeedStream(seeds.start + self.group.rank, seeds.stop)",
        (f"{_ON_TRAINERS}test_processes_play_different_seeds",),
    ),
    Fault(
        "all processes explore with the same noise",
        _CONTEXT,
        "generator(self.seed, 5 + 100 * self.part)",
        "generator(self.seed, 5)",
        (f"{_ON_TRAINERS}test_processes_explore_with_different_noise",),
    ),
    Fault(
        "off-policy training starts with shards of weights",
        _OFF,
        "if isinstance(context.group, ShardedGroup):",
        "if isinstance(context.group, ShardedGroup) and not self.replay:",
        (f"{_ON_TRAINERS}test_off_policy_training_refuses_shards_of_weights",),
    ),
    Fault(
        "a run keeps no copy of its config file",
        "vla_rl/recipes/recipe.py",
        "keep_file(source, folder.path)",
        "pass",
        (_OUTSIDE,),
    ),
    Fault(
        "a resumed run does not look into its own config file",
        "vla_rl/recipes/recipe.py",
        "load_kept_files(Path(out))",
        "pass",
        (_OUTSIDE,),
    ),
    Fault(
        "a config in any folder may be a shipped one",
        _FILES,
        'if path.parent in (Path("."), places[0]) else []',
        "if path.parent else []",
        (f"{_ON_FILES}test_a_file_in_another_folder_is_never_taken_for_a_shipped_one",),
    ),
    Fault(
        "an environment is inspected without the options that were given",
        "vla_rl/recipes/inspect_env.py",
        "sims.make_env(name, NUM_ENVS, **options)",
        "sims.make_env(name, NUM_ENVS)",
        ("tests/cli/test_inspect.py::test_an_environment_is_made_with_the_options_that_are_given",),
    ),
    Fault(
        "a run whose config has a field policy is read as a checkpoint",
        "vla_rl/recipes/inspect_folder.py",
        'if "policy" in config and not run:',
        'if "policy" in config:',
        (f"{_ON_SAVED}test_a_run_with_a_policy_field_is_a_run",),
    ),
    Fault(
        "a run is evaluated by its imitation policy",
        "vla_rl/pretrained.py",
        '_OF_RUN = {"policy": ("best", "imitation"),',
        '_OF_RUN = {"policy": ("imitation", "best"),',
        (f"{_ON_SAVED}test_a_run_is_evaluated_by_its_best_checkpoint",),
    ),
    Fault(
        "a run folder is a policy for some commands only",
        "vla_rl/pretrained.py",
        "path = checkpoint_of(folder, kind)",
        "path = Path(folder)",
        (f"{_ON_SAVED}test_a_run_is_a_policy_wherever_one_is_loaded",),
    ),
    Fault(
        "a short flag loses its value after an equals sign",
        "vla_rl/cli/override.py",
        'return f"--{field}.name{equals}{value}"',
        'return f"--{field}.name"',
        (f"{_ON_FILES}test_env_is_short_for_its_name",),
    ),
    Fault(
        "a mistake inside of what was called is taken for wrong options",
        "vla_rl/recipes/named.py",
        "inspect.signature(function).bind(*args, **options)",
        "return function(*args, **options)",
        (f"{_ON_FILES}test_a_type_error_inside_what_was_called_keeps_its_traceback",),
    ),
    Fault(
        "the last of few steps is not logged",
        "vla_rl/recipes/imitation.py",
        "if (step + 1) % steps == 0 or step + 1 == last else None",
        "if (step + 1) % steps == 0 else None",
        (f"{_ON_DATASETS}test_few_steps_are_logged_too",),
    ),
    Fault(
        "a policy that imitates a dataset ignores the environment that is named",
        "vla_rl/recipes/imitate_dataset.py",
        "spec = self.env.spec() if self.env.name else None",
        "spec = None",
        (f"{_ON_DATASETS}test_a_policy_for_an_environment_takes_its_bounds_and_tasks",),
    ),
    Fault(
        "an expert's demonstrations are those of another run",
        _EXPERT,
        "self.imitation.demonstrations, self.seed, self.evaluation.num_envs)",
        "self.imitation.demonstrations, 1, self.evaluation.num_envs)",
        (_WATCHED,),
    ),
    Fault(
        "a policy that imitates an expert begins with the weights of another run",
        _EXPERT,
        "new=self.new, seed=self.seed, imitation=found",
        "new=self.new, imitation=found",
        (_WATCHED,),
    ),
    Fault(
        "a policy that imitates an expert is chosen by test seeds",
        _EXPERT,
        "seed_ranges.held_out(seed_ranges.VALIDATION, self.evaluation.validation)",
        "seed_ranges.held_out(seed_ranges.TEST, self.evaluation.validation)",
        (_WATCHED,),
    ),
    Fault(
        "as many demonstrations are read as were wanted and not as were recorded",
        _EXPERT,
        "found = replace(self.imitation, demonstrations=0)",
        "found = self.imitation",
        ("tests/recipes/test_imitate_expert.py::test_demonstrations_of_an_expert_that_fails_are_left_out",),
    ),
    Fault(
        "accepting one difference accepts all",
        _SPEC,
        "if kind not in accept:",
        "if not accept:",
        (f"{_ON_DATASETS}test_what_differs_from_the_environment_is_named_and_may_be_accepted",),
    ),
    Fault(
        "recorded values below the bounds fit",
        _SPEC,
        "if (found[0] < low - slack).any() or (found[1] > high + slack).any():",
        "if (found[0] < low - slack).any() and (found[1] > high + slack).any():",
        (f"{_ON_DATASETS}test_what_differs_from_the_environment_is_named_and_may_be_accepted",),
    ),
    Fault(
        "tasks are counted as in the dataset",
        _SPEC,
        "return episodes.with_tasks(spec.tasks)",
        "return episodes",
        (f"{_ON_DATASETS}test_tasks_are_counted_as_in_the_environment",),
    ),
    Fault(
        "no test episodes are allowed",
        _STAGES,
        "validation=episodes, test=episodes, ablation=episodes)",
        "validation=episodes, ablation=episodes)",
        (f"{_ON_NUMBERS}test_a_number_without_a_meaning_is_refused",),
    ),
    Fault(
        "the replay's discount may exceed one",
        _OFF,
        "gamma=(0, 1), n_step",
        "gamma=(0, 2), n_step",
        (f"{_ON_NUMBERS}test_a_number_without_a_meaning_is_refused",),
    ),
    Fault(
        "a policy of somebody else is not checked before it is trained",
        _STAGES,
        "if is_foreign(policy):",
        "if False:",
        (f"{_ON_TRAINERS}test_a_policy_of_ones_own_is_checked_before_it_is_trained",),
    ),
    Fault(
        "the page of a recipe is overwritten",
        "vla_rl/recipes/run_report.py",
        "if path.exists():",
        "if not path.parent.exists():",
        ("tests/recipes/test_run_report.py::test_a_page_of_the_recipe_is_kept",),
    ),
    Fault(
        "a page draws what never changes",
        "vla_rl/recipes/run_report.py",
        "if len(values[name]) > 1):",
        "if values[name]):",
        (_BANDED,),
    ),
    Fault(
        "a page draws a score without its band",
        "vla_rl/recipes/run_report.py",
        "banded = name == _SCORE and all(",
        "banded = not name and all(",
        (_BANDED,),
    ),
    Fault(
        "the name of a known model stands for one that is not supported",
        _FILES,
        "if path.stem in _NOT_SUPPORTED:",
        "if False:",
        (f"{_ON_FILES}test_a_model_that_is_not_supported_is_not_taken_for_another",),
    ),
    Fault(
        "a page thins iterations and not curves",
        "vla_rl/recipes/run_report.py",
        "for line in lines if line.get(name) is not None and clock in line",
        "for line in thinned(lines) if line.get(name) is not None and clock in line",
        ("tests/recipes/test_run_report.py::test_rare_metrics_keep_all_their_points",),
    ),
    Fault(
        "long curves are not thinned",
        "vla_rl/recipes/run_report.py",
        "min(len(lines), _POINTS)",
        "len(lines)",
        ("tests/recipes/test_run_report.py::test_a_long_curve_is_thinned_from_its_first_to_its_last_point",),
    ),
    Fault(
        "a thinned curve lacks its last point",
        "vla_rl/recipes/run_report.py",
        "np.linspace(0, len(lines) - 1,",
        "np.linspace(0, max(0, len(lines) - 2),",
        ("tests/recipes/test_run_report.py::test_a_long_curve_is_thinned_from_its_first_to_its_last_point",),
    ),
    Fault(
        "pages read the metrics of a killed run in another way than the run",
        "vla_rl/recipes/metrics.py",
        "for row in read_metrics(run) if",
        'for row in map(json.loads, (run / "metrics.jsonl").open()) if',
        ("tests/recipes/test_metrics.py::test_there_is_one_reader_of_metrics",),
    ),
    Fault(
        "metrics that a line lacks break the page",
        "vla_rl/recipes/run_report.py",
        "if line.get(name) is not None and clock in line]",
        "]",
        ("tests/recipes/test_run_report.py::test_results_metrics_and_settings_are_on_the_page",),
    ),
    Fault(
        "imitation stays on the host",
        "vla_rl/recipes/grounding.py",
        "policy = policy.to(device)",
        "policy = policy",
        ("tests/recipes/test_device.py::test_imitation_on_the_device_of_the_config",),
    ),
    Fault(
        "train has no help of its own",
        "vla_rl/cli/train.py",
        'if list(arguments) in (["-h"], ["--help"]):',
        'if list(arguments) in (["-h"],):',
        (f"{_ON_FILES}test_the_help_of_train_names_its_own_options",),
    ),
    Fault(
        "what is worse than imitation is not shown",
        "vla_rl/recipes/compare_report.py",
        "if min(item.gains(before)) < 0]",
        "if max(item.gains(before)) < 0]",
        ("tests/recipes/test_compare.py::test_what_is_worse_than_imitation_is_shown_as_such_with_the_reason",),
    ),
)
