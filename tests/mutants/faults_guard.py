"""Faults in what keeps an off-policy actor from falling below its base: ranking, release, return, blend, penalty."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RANKING, _GUARD, _OFF, _TD3 = (
    f"vla_rl/algorithms/{name}.py" for name in ("ranking", "guard", "off_policy", "residual_td3")
)
_BLEND, _RESIDUAL, _EXPLORING = (
    "vla_rl/policies/blend.py",
    "vla_rl/policies/residual.py",
    "vla_rl/recipes/exploring.py",
)
_ON_RANKING, _ON_GUARD = "tests/algorithms/test_ranking.py::", "tests/algorithms/test_guard.py::"
_ON_BLEND, _ON_TD3 = "tests/policies/test_blend.py::", "tests/algorithms/test_residual_td3.py::"
_RESUMED = f"{_ON_GUARD}test_a_resumed_run_is_bit_identical_with_all_remedies"

_RANKS = (
    Fault(
        "ties count as won",
        _RANKING,
        "0.5 * (difference == 0).sum()",
        "1.0 * (difference == 0).sum()",
        (f"{_ON_RANKING}test_pairs_at_the_same_time_by_hand",),
    ),
    Fault(
        "decisions of different times are compared",
        _RANKING,
        "scores.setdefault(time, ([], []))",
        "scores.setdefault(0, ([], []))",
        (f"{_ON_RANKING}test_time_alone_ranks_nothing",),
    ),
    Fault(
        "what is decided already is ranked",
        _RANKING,
        "if attempt.steps - time > decided:",
        "if attempt.steps - time > 0:",
        (f"{_ON_RANKING}test_what_is_decided_is_left_out_of_successes_and_failures",),
    ),
    Fault(
        "chunks count as one control step",
        _RANKING,
        "one.steps += int(count[t, e])",
        "one.steps += 1",
        (f"{_ON_RANKING}test_chunks_count_their_control_steps",),
    ),
    Fault(
        "an attempt that was broken off goes on",
        _RANKING,
        "if e not in running or running[e].seed != seeds[t, e]:",
        "if e not in running:",
        (f"{_ON_RANKING}test_episodes_are_assembled_across_windows",),
    ),
    Fault(
        "a simulator's breakdown leaves half an episode behind",
        _RANKING,
        "                    running.pop(e, None)",
        "                    pass",
        (f"{_ON_RANKING}test_episodes_are_assembled_across_windows",),
    ),
    Fault(
        "streams continue each other's episodes",
        _RANKING,
        "self._running.setdefault(rollout.stream, {})",
        'self._running.setdefault("", {})',
        (f"{_ON_RANKING}test_streams_do_not_continue_each_others_episodes",),
    ),
)

_GUARDS = (
    Fault(
        "the gate closes as soon as it is below the share that opens it",
        _GUARD,
        "self.config.hold if self.open else self.config.auroc",
        "self.config.auroc if self.open else self.config.auroc",
        (f"{_ON_GUARD}test_the_gate_opens_at_one_share_and_closes_below_another",),
    ),
    Fault(
        "a few outcomes open the gate",
        _GUARD,
        "min(self.recent.outcomes()) >= self.config.least",
        "min(self.recent.outcomes()) >= 1",
        (f"{_ON_GUARD}test_few_outcomes_of_a_kind_decide_nothing",),
    ),
    Fault(
        "a held actor moves",
        _OFF,
        "if turn and self.steps >= self.config.critic_warmup and self.guard.free:",
        "if turn and self.steps >= self.config.critic_warmup:",
        (f"{_ON_GUARD}test_a_held_actor_stays_while_the_critics_learn",),
    ),
    Fault(
        "decisions are scored after they were added to the replay buffer",
        _OFF,
        "watched = self._watch(rollout)",
        "watched = (self.replay.add(rollout), self._watch(rollout))[1]",
        (f"{_ON_GUARD}test_decisions_are_scored_before_anything_is_learnt_from_them",),
    ),
    Fault(
        "the actor's episodes count as the base's",
        _GUARD,
        "self.trial if self.moved and attempt.corrected else self.base",
        "self.trial if self.moved and not attempt.corrected else self.base",
        (f"{_ON_GUARD}test_the_base_is_counted_before_and_beside_the_actor",),
    ),
    Fault(
        "it returns at the sight of a mean below the base's",
        _GUARD,
        "> self.config.z * math.sqrt(level",
        "> 0.0 * math.sqrt(level",
        (f"{_ON_GUARD}test_it_returns_only_when_the_interval_lies_below_the_base",),
    ),
    Fault(
        "two failures in a row send the actor back",
        _GUARD,
        "if n < self.config.least:",
        "if n < 1:",
        (f"{_ON_GUARD}test_a_few_failures_are_no_news",),
    ),
    Fault(
        "the actor does not wait after a return",
        _GUARD,
        "self.waiting = wait",
        "self.waiting = 0 * wait",
        (f"{_ON_GUARD}test_after_a_fall_the_base_acts_and_the_actor_waits",),
    ),
    Fault(
        "the actor's moments survive a return",
        _OFF,
        "self.optimizer.state.clear()",
        "self.optimizer.state.items()",
        (f"{_ON_GUARD}test_after_a_fall_the_base_acts_and_the_actor_waits",),
    ),
    Fault(
        "the target actor does not return",
        _TD3,
        "            self.target_parameters[name].copy_(parameter)",
        "            self.target_parameters[name].copy_(self.target_parameters[name])",
        (f"{_ON_GUARD}test_after_a_fall_the_base_acts_and_the_actor_waits",),
    ),
    Fault(
        "it returns to the same weights again and again",
        _GUARD,
        'self.kept["base"] if to_base else self.kept.pop("good")',
        'self.kept["base"] if to_base else self.kept["good"]',
        (f"{_ON_GUARD}test_it_returns_to_weights_that_were_followed_by_successes_and_next_time_to_the_base",),
    ),
    Fault(
        "the blend grows whatever the actor's success",
        _GUARD,
        "(self.fallback is None or self.fallback.level)",
        "(self.fallback is None or True)",
        (f"{_ON_GUARD}test_the_blend_grows_only_with_an_actor_that_succeeds_as_often_as_the_base",),
    ),
    Fault(
        "what noise costs counts against the actor when it is decided whether to return",
        _GUARD,
        "max(0.0, self.base_success - self.config.margin)",
        "max(0.0, self.base_success)",
        (f"{_ON_GUARD}test_a_margin_is_what_noise_may_cost",),
    ),
    Fault(
        "what noise costs counts against weights on trial",
        _GUARD,
        "self.trial[0] / self.trial[1] >= self.base_success - self.config.margin",
        "self.trial[0] / self.trial[1] >= self.base_success",
        (f"{_ON_GUARD}test_a_margin_is_what_noise_may_cost",),
    ),
    Fault(
        "the actor's latest outcomes are lost when a run is resumed",
        _GUARD,
        'deque((bool(success) for success in state["latest"])',
        'deque((bool(success) for success in state["latest"][:0])',
        (_RESUMED,),
    ),
    Fault(
        "running episodes are lost when a run is resumed",
        _GUARD,
        '"fallback": self.fallback, "attempts": self.attempts}',
        '"fallback": self.fallback, "attempts": None}',
        (_RESUMED,),
    ),
    Fault(
        "a run whose actor is held has no estimate of its memory",
        "vla_rl/recipes/memory.py",
        '"release": None, "fallback": None}',
        "}",
        ("tests/recipes/test_memory.py::test_an_actor_that_would_be_held_is_estimated_as_if_it_were_not",),
    ),
    Fault(
        "the burst comes again with every rollout",
        _OFF,
        "            if before < max(1, self.config.learning_starts):",
        "            if before < math.inf:",
        ("tests/algorithms/test_off_policy.py::test_a_burst_is_taken_once_when_learning_starts",),
    ),
)

_BLENDS = (
    Fault(
        "the probability does not grow",
        _BLEND,
        "return first + (1.0 - first) * min(released / self.decisions, 1.0)",
        "return first",
        (f"{_ON_BLEND}test_the_probability_grows_with_the_decisions",),
    ),
    Fault(
        "an episode's share is drawn anew in every step",
        _BLEND,
        "mine = torch.where(new, drawn[:, 1] < probability, mine)",
        "mine = drawn[:, 1] < probability",
        (f"{_ON_BLEND}test_a_probability_of_episodes_is_drawn_once_in_each",),
    ),
    Fault(
        "the correction acts from the first step on",
        _BLEND,
        "return acts & (steps >= begin), after",
        "return acts, after",
        (f"{_ON_BLEND}test_the_base_plays_a_random_number_of_steps_first",),
    ),
    Fault(
        "the base's first steps are counted in decisions",
        _BLEND,
        '"blend_steps": steps + self.horizon,',
        '"blend_steps": steps + 1,',
        ("tests/policies/test_residual_horizon.py::test_the_base_alone_plays_its_share_in_control_steps",),
    ),
    Fault(
        "the base's steps are those of the episode before",
        _BLEND,
        "steps[env_ids], begin[env_ids] = 0, -1",
        "steps[env_ids] = 0",
        (f"{_ON_BLEND}test_a_probability_of_episodes_is_drawn_once_in_each",),
    ),
    Fault(
        "the base acts with the residual's noise",
        _RESIDUAL,
        'total = torch.where(acts[:, None], total, features["base_action"].to(total))',
        'total = torch.where(acts[:, None], total, features["base_action"].to(total) + noise)',
        (f"{_ON_BLEND}test_where_the_correction_does_not_act_it_is_the_base_without_noise",),
    ),
    Fault(
        "critics evaluate corrections that are larger than the executed ones",
        _RESIDUAL,
        "total = self.corrected(features, self.correction(features)).clamp(-1.0, 1.0)",
        "total = self.corrected(features, self.delta(features)).clamp(-1.0, 1.0)",
        (f"{_ON_BLEND}test_the_size_caps_the_correction_for_critics_and_when_deployed",),
    ),
    Fault(
        "how much is released does not travel with the weights",
        _RESIDUAL,
        '({"released": self.released} if self.blend else {})',
        "{}",
        (f"{_ON_BLEND}test_what_is_released_is_published_and_saved_with_the_weights",),
    ),
    Fault(
        "values of untried corrections are pushed up",
        _TD3,
        "return config.weight * penalty.mean(1).sum()",
        "return -config.weight * penalty.mean(1).sum()",
        (f"{_ON_TD3}test_the_conservative_penalty_by_hand",),
    ),
    Fault(
        "a window of exploring episodes ends too soon",
        _EXPLORING,
        "if episodes >= size:",
        "if episodes >= size / 2:",
        ("tests/recipes/test_exploring.py::test_windows_end_with_the_iteration_in_which_they_are_full",),
    ),
)

FAULTS = (*_RANKS, *_GUARDS, *_BLENDS)
