"""Faults in how a dream is compared with the truth, and in the figure of it."""

from __future__ import annotations

from tests.mutants.fault import Fault

_AGREEMENT, _LIKENESS, _PLOTS = (f"vla_rl/evaluation/{name}.py" for name in ("agreement", "frame_metrics", "plots"))
_ON_AGREEMENT, _ON_LIKENESS = "tests/evaluation/test_agreement.py::", "tests/evaluation/test_frame_metrics.py::"
_ON_REPORT = "tests/evaluation/test_report.py::"

_REPLAYS = (
    Fault(
        "hallucinations as a share of what is called done",
        _AGREEMENT,
        "_share(fp, fp + tn)",
        "_share(fp, fp + tp)",
        (f"{_ON_AGREEMENT}test_golden_table",),
    ),
    Fault(
        "precision is recall",
        _AGREEMENT,
        "_share(tp, tp + fp), ",
        "_share(tp, tp + fn), ",
        (f"{_ON_AGREEMENT}test_golden_table",),
    ),
    Fault(
        "nothing that failed means nothing hallucinated",
        _AGREEMENT,
        "return 1.0 if self.hallucinated is None",
        "return 0.0 if self.hallucinated is None",
        (f"{_ON_AGREEMENT}test_shares_of_nothing_are_none_and_not_zero",),
    ),
    Fault(
        "McNemar's test of the cells that agree",
        _AGREEMENT,
        "mcnemar_exact(fp, fn)",
        "mcnemar_exact(tp, tn)",
        (f"{_ON_AGREEMENT}test_golden_table",),
    ),
    Fault(
        "kappa's chance pairs the wrong margins",
        _AGREEMENT,
        "(tp + fp) * (fp + tn) + (tp + fn) * (fn + tn)",
        "(tp + fp) * (tp + fn) + (fn + tn) * (fp + tn)",
        (f"{_ON_AGREEMENT}test_kappa_is_its_definition",),
    ),
    Fault(
        "one answer throughout is perfect agreement",
        _AGREEMENT,
        "/ chance if chance else 0.0",
        "/ chance if chance else 1.0",
        (f"{_ON_AGREEMENT}test_kappa_where_one_answer_is_all_there_is",),
    ),
    Fault(
        "a success at the horizon comes too late",
        _AGREEMENT,
        "said, was = dream[known] <= horizon, truth[known] <= horizon",
        "said, was = dream[known] < horizon, truth[known] < horizon",
        (f"{_ON_AGREEMENT}test_replays_by_hand",),
    ),
    Fault(
        "replays that were cut off count as failures",
        _AGREEMENT,
        "known = (truth <= horizon) | (steps >= horizon)",
        "known = steps >= 1",
        (f"{_ON_AGREEMENT}test_replays_by_hand",),
    ),
    Fault(
        "successes whose actions ended are not asked",
        _AGREEMENT,
        "known = (truth <= horizon) | (steps >= horizon)",
        "known = steps >= horizon",
        (f"{_ON_AGREEMENT}test_replays_by_hand",),
    ),
    Fault(
        "the dream decides which replays are asked",
        _AGREEMENT,
        "known = (truth <= horizon) | (steps >= horizon)",
        "known = (truth <= horizon) | (dream <= horizon) | (steps >= horizon)",
        (f"{_ON_AGREEMENT}test_the_dream_does_not_decide_which_replays_are_asked",),
    ),
    Fault(
        "a horizon is trusted by the share and not by its bound",
        _AGREEMENT,
        "if table.hallucinated_high <= most]",
        "if table.hallucinated is not None and table.hallucinated.success <= most]",
        (f"{_ON_AGREEMENT}test_the_longest_horizon_that_can_be_trusted",),
    ),
    Fault(
        "the surest horizon instead of the longest",
        _AGREEMENT,
        "key=lambda table: table.horizon)",
        "key=lambda table: -table.hallucinated_high)",
        (f"{_ON_AGREEMENT}test_the_longest_horizon_that_can_be_trusted",),
    ),
    Fault(
        "horizons beyond every replay",
        _AGREEMENT,
        "if not 1 <= horizon <= steps.max():",
        "if not 1 <= horizon:",
        (f"{_ON_AGREEMENT}test_replays_that_cannot_be_are_refused",),
    ),
)

_POLICIES = (
    Fault(
        "gaps of imagined rates in MMRV",
        _AGREEMENT,
        "mmrv=mmrv(dream, truth)",
        "mmrv=mmrv(truth, dream)",
        (f"{_ON_AGREEMENT}test_policies_by_hand",),
    ),
    Fault(
        "the true rate regressed on the imagined one",
        _AGREEMENT,
        "slope = r * float(dream.std() / truth.std())",
        "slope = r * float(truth.std() / dream.std())",
        (f"{_ON_AGREEMENT}test_policies_by_hand",),
    ),
    Fault(
        "the gap without its sign",
        _AGREEMENT,
        "optimism=float((dream - truth).mean())",
        "optimism=float(abs(dream - truth).mean())",
        (f"{_ON_AGREEMENT}test_policies_equal_numpy_and_brute_force",),
    ),
    Fault(
        "leverage without regard to the sign of the change",
        _AGREEMENT,
        "max(abs(r - other) for other in without)",
        "max(r - other for other in without)",
        (f"{_ON_AGREEMENT}test_policies_equal_numpy_and_brute_force",),
    ),
    Fault(
        "leaving out one policy leaves its imagined rate",
        _AGREEMENT,
        "_pearson(np.delete(dream, u), np.delete(truth, u))",
        "_pearson(np.delete(dream, u), np.delete(truth, u - 1))",
        (f"{_ON_AGREEMENT}test_policies_equal_numpy_and_brute_force",),
    ),
    Fault(
        "equal rates known by their variance",
        _AGREEMENT,
        "if np.ptp(x) == 0 or np.ptp(y) == 0:",
        "if np.var(x) == 0 or np.var(y) == 0:",
        (f"{_ON_AGREEMENT}test_a_dream_of_one_rate_ranks_nothing",),
    ),
    Fault(
        "a dream of one rate has a sure correlation",
        _AGREEMENT,
        "if np.ptp(dream) > 0 else (-1.0, 1.0)",
        "if np.ptp(dream) > 0 else fisher_z(r, k)",
        (f"{_ON_AGREEMENT}test_a_dream_of_one_rate_ranks_nothing",),
    ),
    Fault(
        "no interval on the line",
        _AGREEMENT,
        "return (r, r) if abs(r) == 1.0 else fisher_z(r, k)",
        "return (r, r) if r == 1.0 else fisher_z(r, k)",
        (f"{_ON_AGREEMENT}test_a_dream_exactly_on_a_line",),
    ),
    Fault(
        "Kendall's tau-a",
        _AGREEMENT,
        "untied = math.sqrt(float((dx**2).sum() * (dy**2).sum()))",
        "untied = len(x) * (len(x) - 1)",
        (f"{_ON_AGREEMENT}test_kendall_of_a_published_example",),
    ),
    Fault(
        "ties of the first only",
        _AGREEMENT,
        "untied = math.sqrt(float((dx**2).sum() * (dy**2).sum()))",
        "untied = float((dx**2).sum())",
        (f"{_ON_AGREEMENT}test_policies_by_hand",),
    ),
    Fault(
        "percentages pass for rates",
        _AGREEMENT,
        "np.all((values >= 0) & (values <= 1))",
        "np.all(values >= 0)",
        (f"{_ON_AGREEMENT}test_policies_that_cannot_be_compared_are_refused",),
    ),
)

_FRAMES = (
    Fault(
        "differences of pixels wrap round",
        _LIKENESS,
        "np.square(shown.astype(np.int32) - true.astype(np.int32))",
        "np.square((shown - true).astype(np.int32))",
        (f"{_ON_LIKENESS}test_psnr_by_hand",),
    ),
    Fault(
        "255 for its square",
        _LIKENESS,
        "255.0**2 * true.size",
        "255.0 * true.size",
        (f"{_ON_LIKENESS}test_psnr_by_hand",),
    ),
    Fault(
        "the frame after the horizon",
        _LIKENESS,
        "shown = true[rows, horizon - 1]",
        "shown = true[rows, min(horizon, true.shape[1] - 1)]",
        (f"{_ON_LIKENESS}test_frames_by_hand",),
    ),
    Fault(
        "frames after the end of a replay",
        _LIKENESS,
        "rows = np.flatnonzero(steps >= horizon)",
        "rows = np.arange(steps.size)",
        (f"{_ON_LIKENESS}test_frames_by_hand",),
    ),
    Fault(
        "the frame before is copied and not the first",
        _LIKENESS,
        "psnr(first[rows], shown)",
        "psnr(true[rows, max(horizon - 2, 0)], shown)",
        (f"{_ON_LIKENESS}test_frames_by_hand",),
    ),
    Fault(
        "floats in [0, 1] pass for pixels",
        _LIKENESS,
        "or any(item.dtype != np.uint8 for item in frames)",
        "or True in ()",
        (f"{_ON_LIKENESS}test_frames_that_do_not_belong_together_are_refused",),
    ),
)

_FIGURE = (
    Fault(
        "a whisker of the other axis",
        _PLOTS,
        "(point.y.success, point.y.low, point.y.high)",
        "(point.y.success, point.x.low, point.x.high)",
        (f"{_ON_REPORT}test_two_rates_cross_where_their_values_are",),
    ),
)

FAULTS = (*_REPLAYS, *_POLICIES, *_FRAMES, *_FIGURE)
