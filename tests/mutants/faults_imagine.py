"""Faults in how a run trusts its dreams, buys reality and tells of both."""

from __future__ import annotations

from tests.mutants.fault import Fault

_BUY, _TRUST, _RUN = (
    "vla_rl/training/coevolve.py",
    "vla_rl/evaluation/agreement.py",
    "vla_rl/recipes/imagine/coevolution.py",
)
_REPLAY, _LOOP, _ROWS = "world_models/replay.py", "vla_rl/training/loop.py", "vla_rl/recipes/metrics.py"
_ON_BUY, _ON_TRUST = "tests/training/test_coevolve.py::", "tests/evaluation/test_trust.py::"
_SIGN = f"{_ON_BUY}test_each_sign_alone_buys_and_says_why"
_WHOLE = "tests/recipes/imagine/test_imagined_env.py::test_a_policy_is_improved_in_dreams_and_judged_in_the_truth"
_STORY = "tests/recipes/imagine/test_comparison.py::test_the_story_is_told_from_what_the_runs_left"

FAULTS = (
    Fault(
        "dreams may outrun reality",
        _BUY,
        "signals.imagined > signals.real + config.gap",
        "signals.real > signals.imagined + config.gap",
        (_SIGN,),
    ),
    Fault(
        "more doubt than at first is no sign",
        _BUY,
        "signals.doubt > usual.doubt + config.doubt",
        "signals.doubt > 1.0 + config.doubt",
        (_SIGN,),
    ),
    Fault(
        "the budget is for every decision",
        _BUY,
        "min(config.batch, config.budget - self.spent)",
        "min(config.batch, config.budget)",
        (f"{_ON_BUY}test_the_budget_is_never_exceeded_and_reasons_stay",),
    ),
    Fault(
        "what was usual stays what it was at first",
        _BUY,
        "replace(self, usual=signals, spent=self.spent + bought)",
        "replace(self, spent=self.spent + bought)",
        (f"{_ON_BUY}test_what_was_bought_sets_what_is_usual",),
    ),
    Fault(
        "the most accurate threshold, however short its horizon",
        _TRUST,
        "key=lambda choice: (choice.table.horizon, choice.table.accuracy.success)",
        "key=lambda choice: (-choice.table.horizon, choice.table.accuracy.success)",
        (f"{_ON_TRUST}test_a_strict_threshold_allows_the_long_horizon",),
    ),
    Fault(
        "a dream is a success when it ends as one",
        _REPLAY,
        "first = self.step[np.arange(len(won)), won.argmax(1)].astype(float)",
        "first = self.step.max(1).astype(float)",
        ("tests/world_models/test_replay.py::test_a_replay_is_the_dream_of_its_actions_alone",),
    ),
    Fault(
        "agreement is told by episodes that were learnt from",
        "vla_rl/recipes/imagine/collect.py",
        "cuts = np.split(order, [plan.held_out, aside])",
        "cuts = [order[: plan.held_out], order[plan.held_out : aside], order]",
        (
            "tests/recipes/imagine/test_imagined_env.py::test_every_kind_is_played_on_seeds_of_its_own_and_some_are_held_out",
        ),
    ),
    Fault(
        "the doubtful is shown",
        "world_models/env.py",
        "doubted = ripe[self._book.cause[ripe] == _DOUBT]",
        "doubted = ripe[:0]",
        ("tests/world_models/test_env.py::test_what_is_doubted_is_not_shown",),
    ),
    Fault(
        "the state that is doubted is told",
        "world_models/env.py",
        "self._seen[doubted, -1], self._origin[doubted]",
        "self._seen[doubted, -1], self._state[doubted]",
        ("tests/world_models/test_env.py::test_what_is_doubted_is_not_shown",),
    ),
    Fault(
        "the page plots a loss that nobody tells",
        "vla_rl/recipes/imagine/report.py",
        '"motion": "Where the robot may be"',
        '"state": "Where the robot may be"',
        ("tests/recipes/imagine/test_comparison.py::test_the_page_plots_losses_that_there_are",),
    ),
    Fault(
        "strict dreams are called kind",
        "vla_rl/recipes/imagine/report.py",
        "'kind' if agreed['optimism'] > 0 else 'strict'",
        "'kind' if agreed['optimism'] < 0 else 'strict'",
        ("tests/recipes/imagine/test_comparison.py::test_the_story_is_told_from_what_the_runs_left",),
    ),
    Fault(
        "nothing to judge by is fine",
        "vla_rl/recipes/imagine/collect.py",
        "if not (plan.calibration and plan.held_out and aside < plan.episodes):",
        "if not (plan.calibration and aside < plan.episodes):",
        ("tests/recipes/imagine/test_imagined_env.py::test_nothing_left_to_learn_from_is_refused",),
    ),
    Fault(
        "every way learns its own world",
        "vla_rl/recipes/imagine/study.py",
        "if learnt[other] == learnt[way]) for way in config.ways}",
        "if other == way) for way in config.ways}",
        ("tests/recipes/imagine/test_study.py::test_ways_that_learn_the_same_world_begin_with_it",),
    ),
    Fault(
        "validation in the simulator is not paid for",
        "vla_rl/recipes/imagine/study.py",
        'found["episodes"] + validated',
        'found["episodes"]',
        ("tests/recipes/imagine/test_study.py::test_every_way_is_tabled_over_its_seeds",),
    ),
    Fault(
        "a world that is not trusted is lost",
        _RUN,
        '        save_world(model, self.folder.checkpoint("first"))',
        "        pass",
        ("tests/recipes/imagine/test_comparison.py::test_a_world_that_is_not_trusted_is_kept_and_may_be_asked_again",),
    ),
    Fault(
        "a device is looked for when it is needed",
        _RUN,
        "        _require(plan.device)",
        "        pass",
        (
            "tests/recipes/imagine/test_comparison.py::test_a_device_that_is_not_there_is_refused_before_anything_is_played",
        ),
    ),
    Fault(
        "a world that was begun with is trusted as far as it was",
        "vla_rl/recipes/imagine/coevolution.py",
        "            trained = self._calibrated(model)",
        '            trained = Trained.load(Path(self.plan.begin_with) / "checkpoints" / "world", self.plan.dream)',
        ("tests/recipes/imagine/test_comparison.py::test_a_run_may_begin_with_what_another_gathered_and_learnt",),
    ),
    Fault(
        "a dream that ended in doubt seems not to have moved",
        "vla_rl/recipes/imagine/imagined_env.py",
        "on_host(step.valid).all(1) & ~doubted)",
        "on_host(step.valid).all(1))",
        (
            "tests/recipes/imagine/test_imagined_env.py::test_a_dream_that_ends_in_doubt_tells_nothing_of_inverse_dynamics",
        ),
    ),
    Fault(
        "a dream that doubted once is sure again later",
        "world_models/replay.py",
        "np.logical_or.accumulate(beyond, 1)",
        "beyond",
        ("tests/world_models/test_replay.py::test_what_was_doubted_is_no_success_from_then_on",),
    ),
    Fault(
        "no uncertainty limits are tried",
        "vla_rl/evaluation/agreement.py",
        "itertools.product(self.thresholds, self.quantiles)",
        "itertools.product(self.thresholds, self.quantiles[:1])",
        ("tests/evaluation/test_trust.py::test_uncertainty_limits_allow_the_long_horizon",),
    ),
    Fault(
        "a success in the first of the dreams is enough to agree",
        "vla_rl/recipes/imagine/imagined_env.py",
        "sure=np.min([one.sure for one in found], 0)",
        "sure=found[0].sure",
        (
            "tests/recipes/imagine/test_imagined_env.py::test_a_replay_is_as_sure_as_the_least_sure_of_the_dreams_that_a_success_is_dreamt",
        ),
    ),
    Fault(
        "a simulator that begins as good is said never to be",
        "vla_rl/recipes/imagine/report.py",
        "if needed is not None",
        "if needed",
        ("tests/recipes/imagine/test_comparison.py::test_the_story_is_told_from_what_the_runs_left",),
    ),
    Fault(
        "bought episodes are not counted",
        _RUN,
        "self.bought += count",
        "self.bought += 0",
        (_WHOLE,),
    ),
    Fault(
        "a decision before every iteration",
        _RUN,
        'if iteration < last["iteration"] + config.every:',
        "if False:",
        (_WHOLE,),
    ),
    Fault(
        "a run that goes on learns its world again",
        _RUN,
        'if (kept / "config.json").exists():',
        "if False:",
        ("tests/recipes/imagine/test_comparison.py::test_what_was_trained_is_gone_on_with",),
    ),
    Fault(
        "the best weights keep the score that they had in another world",
        _LOOP,
        "self.best.score = self.validate().score",
        "self.validate()",
        ("tests/training/test_loop.py::test_the_best_weights_are_validated_again_when_the_environment_was_renewed",),
    ),
    Fault(
        "the present weights are lost when the best are judged again",
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
        (_STORY,),
    ),
)
