"""Faults in how far imagined rollouts are trusted, when simulator episodes are bought, and how both are reported."""

from __future__ import annotations

from tests.mutants.fault import Fault

_BUY, _AGREEMENT, _RUN = (
    "vla_rl/training/coevolve.py",
    "vla_rl/evaluation/agreement.py",
    "vla_rl/recipes/imagine/coevolution.py",
)
_REPLAY, _LOOP, _ROWS = "world_models/replay.py", "vla_rl/training/loop.py", "vla_rl/recipes/metrics.py"
_ON_BUY, _ON_AGREEMENT = "tests/training/test_coevolve.py::", "tests/evaluation/test_trust.py::"
_SIGN = f"{_ON_BUY}test_each_sign_alone_buys_and_says_why"
_WHOLE = "tests/recipes/imagine/test_imagined_env.py::test_a_policy_improves_in_imagination"
_KILLED = "tests/recipes/imagine/test_coevolution.py::test_a_killed_run_learns_from_every_purchase_and_ends_the_same"
_RESUMED = f"{_KILLED}[an iteration after the second growth]"
_PAGE = "tests/recipes/imagine/test_comparison.py::test_the_report_is_made_from_the_files_of_the_runs"

FAULTS = (
    Fault(
        "imagined success may exceed real success",
        _BUY,
        "self._exceeds(signals.imagined, signals, signals.real, signals.real_episodes, config.success_gap)",
        "False",
        (_SIGN,),
    ),
    Fault(
        "more uncertainty than at first is no sign",
        _BUY,
        "signals.uncertain, signals, baseline.uncertain, baseline.rollouts, config.uncertainty_rise",
        "signals.uncertain, signals, 1.0, baseline.rollouts, config.uncertainty_rise",
        (_SIGN,),
    ),
    Fault(
        "a difference that chance explains buys real episodes",
        _BUY,
        "return difference(*counts, self.config.z)[0] > allowed",
        "return share - other > allowed",
        (
            f"{_ON_BUY}test_a_difference_that_chance_explains_buys_nothing",
            f"{_ON_BUY}test_equal_rates_buy_in_at_most_two_of_a_hundred_decisions",
        ),
    ),
    Fault(
        "the first purchase spends the whole budget",
        _BUY,
        "batch: int = 50  # per purchase",
        "batch: int = 100  # per purchase",
        (f"{_ON_BUY}test_one_false_alarm_does_not_spend_the_budget",),
    ),
    Fault(
        "a difference of rates adds the wrong halves of their intervals",
        "vla_rl/contract/intervals.py",
        "return a - b - math.hypot(a - a_low, b_high - b), a - b + math.hypot(a_high - a, b - b_low)",
        "return a - b - math.hypot(a_high - a, b - b_low), a - b + math.hypot(a - a_low, b_high - b)",
        ("tests/contract/test_intervals.py::test_the_interval_of_a_difference_is_newcombes",),
    ),
    Fault(
        "without own episodes the policy is as good as with random actions",
        "vla_rl/recipes/imagine/collect.py",
        "own = float(parts[0].outcomes.mean()) if config.policy_episodes else None",
        "own = float(parts[0].outcomes.mean())",
        (
            "tests/recipes/imagine/test_imagined_env.py::test_without_episodes_of_its_own_the_success_of_the_policy_is_unknown",
        ),
    ),
    Fault(
        "a policy that is lost in imagination learns there",
        "vla_rl/recipes/imagine/coevolution.py",
        "self.plan.trust.require_closed_loop(imagined, real)",
        "self.plan.trust.require_closed_loop(real, real)",
        ("tests/recipes/imagine/test_imagined_env.py::test_a_policy_improves_in_imagination",),
    ),
    Fault(
        "success in imagination is asked of chance",
        "vla_rl/evaluation/agreement.py",
        "high, low = wilson(*imagined)[1], wilson(*true)[0]",
        "high, low = imagined[0] / imagined[1], true[0] / true[1]",
        (
            "tests/evaluation/test_trust.py::test_a_policy_that_hardly_succeeds_in_its_own_imagined_rollouts_learns_nothing_there",
        ),
    ),
    Fault(
        "other policies' episodes are played by the policy itself",
        "vla_rl/recipes/imagine/collect.py",
        "load_policy(name, env.spec))",
        "policy)",
        ("tests/recipes/imagine/test_imagined_env.py::test_episodes_of_other_policies_are_learnt_from_as_well",),
    ),
    Fault(
        "the budget is for every decision",
        _BUY,
        "min(config.batch, config.budget - self.spent)",
        "min(config.batch, config.budget)",
        (f"{_ON_BUY}test_the_budget_is_never_exceeded_and_reasons_stay",),
    ),
    Fault(
        "the baseline is never updated",
        _BUY,
        "replace(self, baseline=signals, spent=self.spent + bought)",
        "replace(self, spent=self.spent + bought)",
        (f"{_ON_BUY}test_bought_episodes_set_the_new_baseline",),
    ),
    Fault(
        "the most accurate threshold, however short its horizon",
        _AGREEMENT,
        "key=lambda choice: (choice.table.horizon, choice.table.accuracy.success)",
        "key=lambda choice: (-choice.table.horizon, choice.table.accuracy.success)",
        (f"{_ON_AGREEMENT}test_a_strict_threshold_allows_the_long_horizon",),
    ),
    Fault(
        "imagined rollouts that never succeed are trusted",
        _AGREEMENT,
        "rewarding = [choice for choice in found if choice.table.missed_high <= self.max_missed]",
        "rewarding = found",
        (
            f"{_ON_AGREEMENT}test_imagined_rollouts_that_never_succeed_are_not_trusted_while_true_successes_exist",
            f"{_ON_AGREEMENT}test_imagined_rollouts_that_hardly_ever_succeed_are_not_trusted",
        ),
    ),
    Fault(
        "a horizon by which nothing succeeds is trusted",
        _AGREEMENT,
        "return 1.0 if self.missed is None else self.missed.high",
        "return 0.0 if self.missed is None else self.missed.high",
        (f"{_ON_AGREEMENT}test_a_horizon_by_which_nothing_succeeds_is_not_trusted",),
    ),
    Fault(
        "an imagined rollout is a success when it ends as one",
        _REPLAY,
        "first = self.step[np.arange(len(won)), won.argmax(1)].astype(float)",
        "first = self.step.max(1).astype(float)",
        ("tests/world_models/test_replay.py::test_a_replay_is_the_imagined_rollout_of_its_actions_alone",),
    ),
    Fault(
        "agreement is measured on training episodes",
        "vla_rl/recipes/imagine/collect.py",
        "cuts = np.split(order, [config.held_out, aside])",
        "cuts = [order[: config.held_out], order[config.held_out : aside], order]",
        (
            "tests/recipes/imagine/test_imagined_env.py::test_every_kind_is_played_on_seeds_of_its_own_and_some_are_held_out",
        ),
    ),
    Fault(
        "uncertain pictures are shown",
        "world_models/env.py",
        "uncertain = complete[self._book.cause[complete] == _UNCERTAIN]",
        "uncertain = complete[:0]",
        ("tests/world_models/test_env.py::test_what_is_uncertain_is_not_shown",),
    ),
    Fault(
        "an uncertain state is shown",
        "world_models/env.py",
        "self._picture[rows], self._state[rows] = self._context_frames[rows, -1], self._context_state[rows]",
        "self._picture[rows] = self._context_frames[rows, -1]",
        ("tests/world_models/test_env.py::test_what_is_uncertain_is_not_shown",),
    ),
    Fault(
        "the page plots a loss that does not exist",
        "vla_rl/recipes/imagine/report.py",
        '"state_dynamics": "State dynamics"',
        '"state": "State dynamics"',
        ("tests/recipes/imagine/test_comparison.py::test_the_page_plots_losses_that_there_are",),
    ),
    Fault(
        "low imagined rates are called high",
        "vla_rl/recipes/imagine/report.py",
        "'high' if agreed['optimism'] > 0 else 'low'",
        "'high' if agreed['optimism'] < 0 else 'low'",
        ("tests/recipes/imagine/test_comparison.py::test_the_report_is_made_from_the_files_of_the_runs",),
    ),
    Fault(
        "no held-out episodes are accepted",
        "vla_rl/recipes/imagine/collect.py",
        "if not (config.calibration and config.held_out and aside < config.episodes):",
        "if not (config.calibration and aside < config.episodes):",
        ("tests/recipes/imagine/test_imagined_env.py::test_numbers_that_leave_no_training_episodes_are_refused",),
    ),
    Fault(
        "imagined environments declare the simulator's longest chunk",
        "world_models/imagined_spec.py",
        "max_chunk=min(model.spec.max_chunk, config.reach),",
        "max_chunk=model.spec.max_chunk,",
        (
            "tests/recipes/imagine/test_imagined_env.py::test_imagined_environments_have_the_spec_that_their_factory_declares",
        ),
    ),
    Fault(
        "every method trains its own world model",
        "vla_rl/recipes/imagine/study.py",
        "for other in config.methods if trained[other] == trained[method])",
        "for other in config.methods if other == method)",
        ("tests/recipes/imagine/test_study.py::test_methods_that_train_the_same_world_model_share_it",),
    ),
    Fault(
        "validation in the simulator is not paid for",
        "vla_rl/recipes/imagine/study.py",
        'found["episodes"] + validated',
        'found["episodes"]',
        ("tests/recipes/imagine/test_study.py::test_every_method_is_tabled_over_its_seeds",),
    ),
    Fault(
        "a world model that is not trusted is lost",
        "vla_rl/recipes/imagine/train_model.py",
        '    save_world_model(model, folder.checkpoint("first"))',
        "    pass",
        (
            "tests/recipes/imagine/test_comparison.py::test_an_untrusted_world_model_is_kept_and_can_be_calibrated_again",
        ),
    ),
    Fault(
        "a missing device is noticed late",
        "vla_rl/recipes/imagine/recipe.py",
        "device, spec = resolve_device(self.device), self.env.spec()",
        "device, spec = self.device, self.env.spec()",
        (
            "tests/recipes/imagine/test_comparison.py::test_a_device_that_is_not_there_is_refused_before_anything_is_played",
        ),
    ),
    Fault(
        "the calibration is another run's",
        "vla_rl/recipes/imagine/train_model.py",
        "        calibrated = calibrate(model, episodes.calibration, plan)",
        '        calibrated = CalibratedModel.load(Path(plan.init_from) / "checkpoints" / "world", plan.imagination)',
        (
            "tests/recipes/imagine/test_comparison.py::test_init_from_reuses_the_episodes_and_the_weights_of_another_run",
        ),
    ),
    Fault(
        "an imagined rollout that was uncertain once counts as certain later",
        "world_models/replay.py",
        "np.logical_or.accumulate(exceeded, 1)",
        "exceeded",
        ("tests/world_models/test_replay.py::test_after_uncertainty_a_replay_counts_no_success",),
    ),
    Fault(
        "no uncertainty limits are tried",
        "vla_rl/evaluation/agreement.py",
        "itertools.product(self.thresholds, self.quantiles)",
        "itertools.product(self.thresholds, self.quantiles[:1])",
        ("tests/evaluation/test_trust.py::test_uncertainty_limits_allow_the_long_horizon",),
    ),
    Fault(
        "the first noise alone decides about success",
        "vla_rl/recipes/imagine/replays.py",
        "success=np.min([one.success for one in found], 0)",
        "success=found[0].success",
        (
            "tests/recipes/imagine/test_imagined_env.py::test_the_success_probability_of_a_replay_is_the_minimum_over_its_samples",
        ),
    ),
    Fault(
        "a simulator that starts as good is reported as never reaching it",
        "vla_rl/recipes/imagine/report.py",
        "if needed is not None",
        "if needed",
        ("tests/recipes/imagine/test_comparison.py::test_the_report_is_made_from_the_files_of_the_runs",),
    ),
    Fault(
        "bought episodes are not counted",
        "vla_rl/recipes/imagine/run_episodes.py",
        "self.purchases, self.bought = purchases, sum(self._sizes[:purchases])",
        "self.purchases, self.bought = purchases, 0",
        (_WHOLE,),
    ),
    Fault(
        "a second purchase plays the first one's scenes",
        "vla_rl/recipes/imagine/run_episodes.py",
        "first = plan.collect.episodes + self.bought",
        "first = plan.collect.episodes",
        (_WHOLE,),
    ),
    Fault(
        "a decision before every iteration",
        _RUN,
        'if iteration < self.decisions[-1]["iteration"] + self.plan.coevolution.every:',
        "if False:",
        (_WHOLE,),
    ),
    Fault(
        "episodes that an interrupted run has bought are bought again",
        "vla_rl/recipes/imagine/run_episodes.py",
        "if self.purchases == len(self._sizes):",
        "if True:",
        (
            "tests/recipes/imagine/test_run_episodes.py::test_a_purchase_that_an_interrupted_run_has_played_is_learnt_from_in_its_turn_and_not_played_again",
        ),
    ),
    Fault(
        "a purchase counts as learnt from as soon as it is played",
        _RUN,
        "episodes.use(0)",
        "pass",
        (f"{_KILLED}[with a state of the grown one]",),
    ),
    Fault(
        "a run goes on from the newest world model, whatever its state was saved with",
        "vla_rl/recipes/imagine/train_model.py",
        'return earlier if (earlier / "config.json").exists() else folder.checkpoint("world")',
        'return folder.checkpoint("world")',
        (_RESUMED,),
    ),
    Fault(
        "decisions after the saved state are not carried out again",
        _RUN,
        "self.decisions, self._again = written[:count], written[count:]",
        "self.decisions, self._again = written, []",
        (_RESUMED,),
    ),
    Fault(
        "environments are restored before the world model that they had",
        _RUN,
        'self.world_model.load_state_dict(cast(dict[str, object], state["world_model"]))',
        "pass",
        (_RESUMED,),
    ),
    Fault(
        "a resumed run trains its world model again",
        "vla_rl/recipes/imagine/train_model.py",
        'if (kept / "config.json").exists():',
        "if False:",
        ("tests/recipes/imagine/test_comparison.py::test_a_finished_run_has_its_summary_and_is_not_continued",),
    ),
    Fault(
        "the best weights keep their score in the earlier environment",
        _LOOP,
        "self.best.score = self.validate().score",
        "self.validate()",
        ("tests/training/test_loop.py::test_the_best_weights_are_validated_again_when_the_environment_was_renewed",),
    ),
    Fault(
        "the current weights are lost when the best ones are validated again",
        _LOOP,
        "self._restore_and_publish(present)",
        "self._restore_and_publish(self.best)",
        ("tests/training/test_loop.py::test_the_best_weights_are_validated_again_when_the_environment_was_renewed",),
    ),
    Fault(
        "episodes of every stage count as simulated",
        _ROWS,
        'for row in rows(run, "rl"):',
        "for row in rows(run):",
        (_PAGE,),
    ),
)
