"""Faults in the comparison of a world model with the simulator, and in its figure."""

from __future__ import annotations

from tests.mutants.fault import Fault

_AGREEMENT, _METRICS, _PLOTS = (f"vla_rl/evaluation/{name}.py" for name in ("agreement", "frame_metrics", "plots"))
_ON_AGREEMENT, _ON_METRICS = "tests/evaluation/test_agreement.py::", "tests/evaluation/test_frame_metrics.py::"
_ON_REPORT = "tests/evaluation/test_report.py::"

_REPLAYS = (
    Fault(
        "hallucinations as a share of imagined successes",
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
        "without a failure the bound of hallucinations is 0",
        _AGREEMENT,
        "return 1.0 if self.hallucinated is None",
        "return 0.0 if self.hallucinated is None",
        (f"{_ON_AGREEMENT}test_rates_over_no_replay_are_none",),
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
        "one single answer is perfect agreement",
        _AGREEMENT,
        "/ chance if chance else 0.0",
        "/ chance if chance else 1.0",
        (f"{_ON_AGREEMENT}test_kappa_with_a_single_answer",),
    ),
    Fault(
        "a success at the horizon does not count",
        _AGREEMENT,
        "said, was = imagined_step[known] <= horizon, true_step[known] <= horizon",
        "said, was = imagined_step[known] < horizon, true_step[known] < horizon",
        (f"{_ON_AGREEMENT}test_replays_by_hand",),
    ),
    Fault(
        "replays shorter than the horizon count as failures",
        _AGREEMENT,
        "known = (true_step <= horizon) | (steps >= horizon)",
        "known = steps >= 1",
        (f"{_ON_AGREEMENT}test_replays_by_hand",),
    ),
    Fault(
        "successes of replays shorter than the horizon are dropped",
        _AGREEMENT,
        "known = (true_step <= horizon) | (steps >= horizon)",
        "known = steps >= horizon",
        (f"{_ON_AGREEMENT}test_replays_by_hand",),
    ),
    Fault(
        "the world model decides which replays are used",
        _AGREEMENT,
        "known = (true_step <= horizon) | (steps >= horizon)",
        "known = (true_step <= horizon) | (imagined_step <= horizon) | (steps >= horizon)",
        (f"{_ON_AGREEMENT}test_the_world_model_does_not_decide_which_replays_are_used",),
    ),
    Fault(
        "a horizon is trusted by its rate and not by the upper bound",
        _AGREEMENT,
        "if table.hallucinated_high <= max_hallucinated]",
        "if table.hallucinated is not None and table.hallucinated.success <= max_hallucinated]",
        (f"{_ON_AGREEMENT}test_the_longest_trusted_horizon",),
    ),
    Fault(
        "the horizon with the lowest bound instead of the longest",
        _AGREEMENT,
        "key=lambda table: table.horizon)",
        "key=lambda table: -table.hallucinated_high)",
        (f"{_ON_AGREEMENT}test_the_longest_trusted_horizon",),
    ),
    Fault(
        "horizons beyond every replay",
        _AGREEMENT,
        "if not 1 <= horizon <= steps.max():",
        "if not 1 <= horizon:",
        (f"{_ON_AGREEMENT}test_impossible_replays_are_refused",),
    ),
)

_POLICIES = (
    Fault(
        "gaps of imagined rates in MMRV",
        _AGREEMENT,
        "mmrv=mmrv(estimates, truth)",
        "mmrv=mmrv(truth, estimates)",
        (f"{_ON_AGREEMENT}test_policies_by_hand",),
    ),
    Fault(
        "the true rate regressed on the imagined one",
        _AGREEMENT,
        "slope = r * float(estimates.std() / truth.std())",
        "slope = r * float(truth.std() / estimates.std())",
        (f"{_ON_AGREEMENT}test_policies_by_hand",),
    ),
    Fault(
        "optimism without its sign",
        _AGREEMENT,
        "optimism=float((estimates - truth).mean())",
        "optimism=float(abs(estimates - truth).mean())",
        (f"{_ON_AGREEMENT}test_policies_equal_numpy_and_brute_force",),
    ),
    Fault(
        "leverage without regard to the sign of the change",
        _AGREEMENT,
        "max(abs(r - reduced) for reduced in without)",
        "max(r - reduced for reduced in without)",
        (f"{_ON_AGREEMENT}test_policies_equal_numpy_and_brute_force",),
    ),
    Fault(
        "leaving out one policy leaves its imagined rate",
        _AGREEMENT,
        "_pearson(np.delete(estimates, u), np.delete(truth, u))",
        "_pearson(np.delete(estimates, u), np.delete(truth, u - 1))",
        (f"{_ON_AGREEMENT}test_policies_equal_numpy_and_brute_force",),
    ),
    Fault(
        "equal rates are detected by their variance",
        _AGREEMENT,
        "if np.ptp(x) == 0 or np.ptp(y) == 0:",
        "if np.var(x) == 0 or np.var(y) == 0:",
        (f"{_ON_AGREEMENT}test_a_world_model_of_one_rate_ranks_nothing",),
    ),
    Fault(
        "a single imagined rate has a narrow correlation interval",
        _AGREEMENT,
        "if np.ptp(estimates) > 0 and abs(r)",
        "if abs(r)",
        (f"{_ON_AGREEMENT}test_a_world_model_of_one_rate_ranks_nothing",),
    ),
    Fault(
        "Kendall's tau-a",
        _AGREEMENT,
        "untied = math.sqrt(float((dx**2).sum() * (dy**2).sum()))",
        "untied = len(x) * (len(x) - 1)",
        (f"{_ON_AGREEMENT}test_kendall_of_a_published_example",),
    ),
    Fault(
        "ties of the first argument only",
        _AGREEMENT,
        "untied = math.sqrt(float((dx**2).sum() * (dy**2).sum()))",
        "untied = float((dx**2).sum())",
        (f"{_ON_AGREEMENT}test_policies_by_hand",),
    ),
    Fault(
        "percentages are accepted as rates",
        _AGREEMENT,
        "np.all((values >= 0) & (values <= 1))",
        "np.all(values >= 0)",
        (f"{_ON_AGREEMENT}test_policies_that_cannot_be_compared_are_refused",),
    ),
)

_FRAMES = (
    Fault(
        "differences of pixels overflow",
        _METRICS,
        "np.square(frames.astype(np.int32) - true.astype(np.int32))",
        "np.square((frames - true).astype(np.int32))",
        (f"{_ON_METRICS}test_psnr_by_hand",),
    ),
    Fault(
        "255 instead of its square",
        _METRICS,
        "255.0**2 * true.size",
        "255.0 * true.size",
        (f"{_ON_METRICS}test_psnr_by_hand",),
    ),
    Fault(
        "the frame after the horizon",
        _METRICS,
        "frames = true[index, horizon - 1]",
        "frames = true[index, min(horizon, true.shape[1] - 1)]",
        (f"{_ON_METRICS}test_frames_by_hand",),
    ),
    Fault(
        "frames after the end of a replay",
        _METRICS,
        "index = np.flatnonzero(steps >= horizon)",
        "index = np.arange(steps.size)",
        (f"{_ON_METRICS}test_frames_by_hand",),
    ),
    Fault(
        "the previous frame is copied and not the first",
        _METRICS,
        "psnr(first[index], frames)",
        "psnr(true[index, max(horizon - 2, 0)], frames)",
        (f"{_ON_METRICS}test_frames_by_hand",),
    ),
    Fault(
        "floats in [0, 1] are accepted as pixels",
        _METRICS,
        "or any(item.dtype != np.uint8 for item in frames)",
        "or True in ()",
        (f"{_ON_METRICS}test_mismatched_frames_are_refused",),
    ),
)

_FIGURE = (
    Fault(
        "a whisker uses the other axis",
        _PLOTS,
        "(point.y.success, point.y.low, point.y.high)",
        "(point.y.success, point.x.low, point.x.high)",
        (f"{_ON_REPORT}test_two_rates_cross_where_their_values_are",),
    ),
)

FAULTS = (*_REPLAYS, *_POLICIES, *_FRAMES, *_FIGURE)
