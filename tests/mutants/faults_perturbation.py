"""Faults in perturbation suites: their points, curves and the worst case."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STATISTICS, _SUITE = "vla_rl/evaluation/perturbation.py", "vla_rl/recipes/perturbation.py"
_ON_STATISTICS, _ON_SUITE = "tests/evaluation/test_perturbation.py::", "tests/recipes/test_perturbation.py::"
_CURVE = f"{_ON_STATISTICS}test_a_curve_holds_the_points_that_differ_in_one_parameter"
_HALVES = f"{_ON_STATISTICS}test_the_worst_point_is_chosen_by_one_half_and_scored_by_the_other"
_SWEEP = f"{_ON_SUITE}test_a_sweep_varies_one_parameter_at_a_time_and_has_the_nominal_point_once"
_RESULTS = f"{_ON_SUITE}test_results_hold_the_curves_and_the_worst_case"
_WRITTEN = f"{_ON_SUITE}test_an_evaluation_writes_them"

FAULTS = (
    Fault(
        "a curve holds points at which other parameters differ",
        _STATISTICS,
        "others = [other for other in varied if other.name != parameter.name]",
        "others: list[Parameter] = []",
        (_CURVE, _RESULTS),
    ),
    Fault(
        "a nominal value that is named leaves the curve",
        _STATISTICS,
        "if all(point.values.get(other.name, other.nominal) == other.nominal for other in others)",
        "if not any(other.name in point.values for other in others)",
        (_CURVE,),
    ),
    Fault(
        "a curve is drawn in the order of the points",
        _STATISTICS,
        "found[parameter.name] = sorted(on_axis, key=lambda item: item.value)",
        "found[parameter.name] = on_axis",
        (_CURVE,),
    ),
    Fault(
        "the worst point is scored by the episodes that chose it",
        _STATISTICS,
        "_score(worst.outcome[half:])",
        "_score(worst.outcome[:half])",
        (_HALVES, f"{_ON_STATISTICS}test_the_worst_of_many_equal_points_is_not_underestimated"),
    ),
    Fault(
        "the worst point is chosen by all episodes",
        _STATISTICS,
        "first = [float(point.outcome[:half].mean()) for point in points]",
        "first = [float(point.outcome.mean()) for point in points]",
        (_HALVES, f"{_ON_STATISTICS}test_the_worst_of_many_equal_points_is_not_underestimated"),
    ),
    Fault(
        "the worst point is said to be alone",
        _STATISTICS,
        "first.count(min(first)) - 1)",
        "0)",
        (f"{_ON_STATISTICS}test_points_that_are_as_bad_are_counted",),
    ),
    Fault(
        "the nominal point is played once per parameter",
        _SUITE,
        "for value in some if value != nominal.get(key)",
        "for value in some",
        (_SWEEP,),
    ),
    Fault(
        "points lose the options of the environment",
        _SUITE,
        'options: JsonObject = {"env": env.name, "options": env.options, "parameters": dict(point)}',
        'options: JsonObject = {"env": env.name, "options": {}, "parameters": dict(point)}',
        (_SWEEP,),
    ),
    Fault(
        "values that cannot be are refused only when they are played",
        _SUITE,
        "Randomization({key: Choice((value,)) for key, value in point}).check(declared, env.name)",
        "Randomization({}).check(declared, env.name)",
        (f"{_ON_SUITE}test_what_cannot_be_varied_is_refused_when_the_suite_is_made",),
    ),
    Fault(
        "a point gets the episodes of all",
        _SUITE,
        "own = [episode for episode in episodes if episode.task == task.name]",
        "own = list(episodes)",
        (_RESULTS,),
    ),
    Fault(
        "the page has the videos of every point",
        "vla_rl/recipes/perturbation.py",
        'return [NOMINAL, _label(worst["values"].items())]',
        "return [task.name for task in self.tasks]",
        ("tests/recipes/test_perturbation.py::test_the_page_has_the_videos_of_the_worst_point_and_not_those_of_all",),
    ),
    Fault(
        "the page shows no curves",
        "vla_rl/recipes/suite_report.py",
        "suite.draw(report, results)",
        "pass",
        (_WRITTEN,),
    ),
    Fault(
        "results hold nothing but the tasks",
        "vla_rl/recipes/suite_run.py",
        "results_of(self.suite, self._identity(), episodes) | self.suite.analyze(episodes)",
        "results_of(self.suite, self._identity(), episodes)",
        (_WRITTEN,),
    ),
)
