"""Faults in the study of few episodes: the simulator as a model, its uses, and what the page concludes."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SIMULATOR, _USES, _SELECTION, _STUDY, _REPORT, _LEARN = (
    f"vla_rl/recipes/few/{name}.py" for name in ("simulator", "uses", "selection", "study", "report", "learn")
)
_LATENT, _TRAINER = "world_models/latent.py", "vla_rl/training/latent_model.py"
_ON_LATENT, _ON_TRAINER = "tests/world_models/test_latent.py::", "tests/training/test_latent_model.py::"
_ON_USES, _ON_FEW = "tests/recipes/test_few_uses.py::", "tests/recipes/test_few.py::"
_COPY = f"{_ON_USES}test_a_decision_in_a_copy_is_what_the_environment_then_does"
_BRANCHES = f"{_ON_USES}test_branches_begin_with_what_was_executed_or_with_the_actor_and_go_on_with_it"
_BATCH = f"{_ON_USES}test_a_batch_has_its_share_of_branches_of_today"
_WHOLE = f"{_ON_USES}test_branches_are_whole_episodes"
_BY_HAND = f"{_ON_USES}test_rewards_are_discounted_by_action_and_nothing_follows_an_end"
_BEST = f"{_ON_USES}test_the_best_candidate_is_executed"

_MODEL = (
    Fault(
        "a decision is tried where the last one ended",
        _SIMULATOR,
        "self._restore(filled.snapshot)",
        "self._started or self._restore(filled.snapshot)",
        (_COPY,),
    ),
    Fault(
        "the base forgets its queue in a copy",
        _SIMULATOR,
        "features, state = self._encode(step.obs, filled.state)",
        "features, state = self._encode(step.obs, self.policy.initial_state(size))",
        (_COPY,),
    ),
    Fault(
        "the real environment is what is tried in",
        _SIMULATOR,
        "return Moments(dict(features), dict(state), env.snapshot(np.arange(env.num_envs)))",
        "return env.step(np.zeros((env.num_envs, 1, 2), np.float32)) and None",
        (_COPY,),
    ),
    Fault(
        "after an end by the task there is a value",
        _SIMULATOR,
        "torch.where(self.terminated, 0.0, gamma ** self.valid.sum(1))",
        "gamma ** self.valid.sum(1)",
        (_BY_HAND,),
    ),
    Fault(
        "a chunk counts as one action",
        _SIMULATOR,
        "powers = gamma ** torch.arange(self.reward.shape[1])",
        "powers = gamma ** torch.zeros(self.reward.shape[1])",
        (_BY_HAND,),
    ),
)

_USE = (
    Fault(
        "the worst candidate is executed",
        _SELECTION,
        "[out for out, _ in tried]).argmax(0)",
        "[out for out, _ in tried]).argmin(0)",
        (_BEST,),
    ),
    Fault(
        "candidates do not explore",
        _SELECTION,
        '*(["sample"] * (self.candidates - 1))',
        '*(["eval"] * (self.candidates - 1))',
        (_BEST,),
    ),
    Fault(
        "branches begin with the actor, whatever was asked",
        _USES,
        'if depth or self.config.first == "actor":',
        "if True:",
        (_BRANCHES,),
    ),
    Fault(
        "the executed decision is repeated along the branch",
        _USES,
        'if depth or self.config.first == "actor":',
        'if self.config.first == "actor":',
        (_BRANCHES,),
    ),
    Fault(
        "branches of old actors are kept",
        _USES,
        "replay = Replay(self.kept * (self.decisions + 1), gamma, self.decisions)",
        "replay = Replay(9 * self.kept * (self.decisions + 1), gamma, self.decisions)",
        (_BATCH,),
    ),
    Fault(
        "a branch that goes on has no end",
        _USES,
        "ends[-1] |= active[-1]",
        "ends[-1] &= active[-1]",
        (_WHOLE,),
    ),
    Fault(
        "the observation after a branch is the one before it",
        _USES,
        "item[index[:, 0] + 1, index[:, 1]]",
        "item[index[:, 0], index[:, 1]]",
        (_WHOLE,),
    ),
    Fault(
        "the value is that of the base",
        _SELECTION,
        "found: Tensor = learner.critic(features, action).mean(0)",
        "found: Tensor = learner.critic(features, 0 * action).mean(0)",
        (f"{_ON_USES}test_the_value_is_that_of_the_actors_own_decision",),
    ),
)

_LEARNT = (
    Fault(
        "the critics score the actor's own decision",
        _SELECTION,
        "[critic(features, policy.critic_action(features, out.sample, out.action)).mean(0) for out in candidates]",
        "[critic(features, policy.rsample(features, None).action).mean(0) for out in candidates]",
        (f"{_ON_USES}test_critics_score_the_decision_that_would_be_executed",),
    ),
    Fault(
        "the latent model never learns",
        _SELECTION,
        "for _ in range(due):",
        "for _ in range(0):",
        (f"{_ON_USES}test_every_selection_collects_and_is_deployed",),
    ),
    Fault(
        "a model that foresees nothing selects",
        _SELECTION,
        "(self.release is not None and not self.release.open)",
        "(self.release is None and not self.model)",
        (f"{_ON_USES}test_nothing_is_selected_by_a_model_that_does_not_foresee_outcomes",),
    ),
    Fault(
        "what is deployed does not select",
        _SELECTION,
        "return Selecting(policy, self.candidates, self.scores(env, simulator))",
        "return Selecting(policy, 2, self.scores(env, simulator))",
        (f"{_ON_USES}test_every_selection_collects_and_is_deployed",),
    ),
    Fault(
        "the score forgets the reward",
        _LATENT,
        "return (found.reward + discount",
        "return (0 * found.reward + discount",
        (f"{_ON_LATENT}test_it_scores_decisions_as_the_system_does",),
    ),
    Fault(
        "a value follows an end",
        _LATENT,
        "(1.0 - found.end) * self.value(found.latent)",
        "self.value(found.latent)",
        (f"{_ON_LATENT}test_it_scores_decisions_as_the_system_does",),
    ),
    Fault(
        "what follows an end is predicted",
        _LATENT,
        '"self_prediction": (apart * goes_on).mean(),',
        '"self_prediction": apart.mean(),',
        (f"{_ON_LATENT}test_what_follows_an_end_does_not_matter",),
    ),
    Fault(
        "errors do not count by the value",
        _LATENT,
        "+ (reached * goes_on).mean(),",
        "+ 0 * reached.mean(),",
        (f"{_ON_LATENT}test_losses_by_hand",),
    ),
    Fault(
        "the slow encoder stands still",
        _LATENT,
        "slow.lerp_(present, self.config.tau)",
        "slow.lerp_(present, 0.0)",
        (f"{_ON_LATENT}test_no_gradient_reaches_the_targets_and_the_slow_encoder_follows",),
    ),
    Fault(
        "the model looks as far ahead as the critics",
        _TRAINER,
        "generator=generator).to(slots.device)], 1)",
        "generator=generator).to(slots.device)], 0)",
        (f"{_ON_TRAINER}test_decisions_are_single_whatever_the_buffer_looks_ahead",),
    ),
    Fault(
        "the model's values are those of the base",
        _TRAINER,
        "found: Tensor = self.critic(features, action).mean(0)",
        "found: Tensor = self.critic(features, 0 * action).mean(0)",
        (f"{_ON_TRAINER}test_values_are_those_of_the_critics_for_the_actor",),
    ),
    Fault(
        "a loss that is not finite is learnt from",
        _TRAINER,
        "if not torch.isfinite(total):",
        "if False:",
        (f"{_ON_TRAINER}test_a_loss_that_is_not_finite_moves_nothing",),
    ),
)

_TABLE = (
    Fault(
        "the area is the mean of the milestones",
        _STUDY,
        "np.trapezoid(self.success().mean(0), self.episodes) / self.episodes[-1]",
        "self.success().mean()",
        (f"{_ON_FEW}test_the_area_is_the_mean_success_while_learning_and_the_lowest_that_of_the_worst_seed",),
    ),
    Fault(
        "the lowest point is that of the mean",
        _STUDY,
        "return float((found - found[:, :1]).min())",
        "return float((found - found[:, :1]).mean(0).min())",
        (f"{_ON_FEW}test_the_area_is_the_mean_success_while_learning_and_the_lowest_that_of_the_worst_seed",),
    ),
    Fault(
        "gains are those over the worst residual",
        _REPORT,
        "return max(curves, key=lambda curve: curve.area())",
        "return min(curves, key=lambda curve: curve.area())",
        (f"{_ON_FEW}test_the_area_is_the_mean_success_while_learning_and_the_lowest_that_of_the_worst_seed",),
    ),
    Fault(
        "everything is worth building",
        _REPORT,
        ">= worth else",
        ">= -worth else",
        (f"{_ON_FEW}test_a_use_is_worth_building_only_where_the_perfect_model_gains_enough",),
    ),
    Fault(
        "a run that begins anew goes on with the old metrics",
        _LEARN,
        "if folder.resumed:",
        "if False:",
        (f"{_ON_FEW}test_a_run_that_was_stopped_begins_anew",),
    ),
    Fault(
        "the base is tested with the model",
        _LEARN,
        "rows = [self._test(OnlyLearning(), setup.policy, 0, seconds)]",
        "rows = []",
        (f"{_ON_FEW}test_every_method_is_tested_at_every_milestone_and_nothing_runs_twice",),
    ),
)

FAULTS = (*_MODEL, *_USE, *_LEARNT, *_TABLE)
