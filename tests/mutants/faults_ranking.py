"""Faults in ranking policies by imagined and real outcomes, and in what counts as tried."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RANKING, _NOVELTY, _RANK = (
    "vla_rl/evaluation/ranking.py",
    "vla_rl/evaluation/novelty.py",
    "vla_rl/recipes/imagine/rank.py",
)
_ON, _ON_NOVELTY = "tests/evaluation/test_ranking.py::", "tests/evaluation/test_novelty.py::"
_POSTERIOR = f"{_ON}test_the_posterior_is_that_of_importance_sampling"
_ROBOTS = f"{_ON}test_on_simulated_robots_it_orders_and_its_intervals_hold"
_RUN = "tests/recipes/imagine/test_rank.py::test_it_is_the_ranking_of_what_they_do_in_the_world_model"

_SEARCH, _ON_SEARCH = "vla_rl/evaluation/best_policy.py", "tests/evaluation/test_best_policy.py::"

FAULTS = (
    Fault(
        "a search ends when it is undecided",
        _SEARCH,
        "if good.mean() >= CONFIDENCE or played >= MOST:",
        "if good.mean() >= 0.5 or played >= MOST:",
        (f"{_ON_SEARCH}test_what_is_found_is_good_enough_as_often_as_it_says",),
    ),
    Fault(
        "a search begins without what is known",
        _SEARCH,
        "noise_covariance(imagined), list(policies), 0",
        "noise_covariance(imagined), [replace(one, real=(0, 0)) for one in policies], 0",
        (f"{_ON_SEARCH}test_real_episodes_that_were_played_are_not_played_again",),
    ),
    Fault(
        "searches without imagined rollouts know them",
        _SEARCH,
        "for spread in (found.spread, _UNINFORMED)",
        "for spread in (found.spread, found.spread)",
        (f"{_ON_SEARCH}test_what_is_expected_are_searches_among_truths_that_are_believed",),
    ),
    Fault(
        "the rival of the best is the best",
        _SEARCH,
        "others[:, best] = -1.0",
        "others[:, best] = 2.0",
        (f"{_ON_SEARCH}test_episodes_go_to_the_two_that_may_be_best",),
    ),
    Fault(
        "what is known from real episodes is not used",
        _RANKING,
        "shown - prior @ mean + won - played * rate",
        "shown - prior @ mean",
        (_POSTERIOR,),
    ),
    Fault(
        "dreams are taken for real",
        _RANKING,
        "design = np.hstack([np.eye(k), -np.ones((k, 1))])",
        "design = np.hstack([np.eye(k), np.zeros((k, 1))])",
        (f"{_ON}test_dreams_that_are_too_strict_are_corrected_by_what_is_known",),
    ),
    Fault(
        "the world model errs for no policy",
        _RANKING,
        "weight = np.linalg.inv(noise + spread**2 * np.eye(k))",
        "weight = np.linalg.inv(noise + 1e-6 * np.eye(k))",
        (_ROBOTS,),
    ),
    Fault(
        "starts are not common",
        _RANKING,
        "joint: Floats = deviations @ deviations.T / n**2 * slope[:, None] * slope",
        "joint: Floats = np.diag(np.diag(deviations @ deviations.T)) / n**2 * slope[:, None] * slope",
        (f"{_ON}test_the_same_starts_decide_more_than_others_would",),
    ),
    Fault(
        "noise counts as error between policies",
        _RANKING,
        "excess = float((weight * (gap - centre) ** 2).sum()) - (len(known) - 1)",
        "excess = float((weight * (gap - centre) ** 2).sum())",
        (f"{_ON}test_the_spread_between_policies_by_hand",),
    ),
    Fault(
        "one episode less is asked for",
        _RANKING,
        "low, high = (low, middle) if decides(middle) else (middle, high)",
        "low, high = (low, middle - 1) if decides(middle) else (middle, high)",
        (f"{_ON}test_as_many_real_episodes_as_it_says_decide_it_and_one_less_does_not",),
    ),
    Fault(
        "the worse policy comes first",
        _RANKING,
        'order = np.argsort(-mean, kind="stable")',
        'order = np.argsort(mean, kind="stable")',
        (f"{_ON}test_pairs_are_all_of_them_the_better_first",),
    ),
    Fault(
        "the nearest decision is of the same episode",
        _NOVELTY,
        "distance[episode[kept][:, None] == episode[kept]] = np.inf",
        "np.fill_diagonal(distance, np.inf)",
        (f"{_ON_NOVELTY}test_distances_are_in_standard_deviations_to_the_nearest_of_another_episode",),
    ),
    Fault(
        "actions do not count",
        _NOVELTY,
        "for one in (state, chunk)]",
        "for one in (state, 0 * chunk)]",
        (f"{_ON_NOVELTY}test_an_action_that_nobody_took_there_leaves_it",),
    ),
    Fault(
        "an episode's end counts as an action",
        _RANK,
        "np.arange(begin, max(begin, end - horizon))",
        "np.arange(begin, max(begin, end - horizon + 1))",
        ("tests/recipes/imagine/test_rank.py::test_tried_are_the_recorded_chunks_at_every_step",),
    ),
    Fault(
        "environments that idle decide, too",
        _RANK,
        "running = on_host(decision.step.valid).any(1)",
        "running = on_host(decision.step.valid).any(1) | True",
        (_RUN,),
    ),
    Fault(
        "what is known of one policy is known of none",
        _RANK,
        "played.append(Played(name, outcomes, known.get(name, (0, 0))))",
        "played.append(Played(name, outcomes))",
        (_RUN,),
    ),
)
