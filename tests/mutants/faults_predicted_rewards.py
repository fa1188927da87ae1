"""Faults in recorded rewards, in the head that predicts them, and in what imagined rollouts are paid."""

from __future__ import annotations

from tests.mutants.fault import Fault

_HEADS, _MODEL, _ENV = "world_models/heads.py", "world_models/model.py", "world_models/env.py"
_PAYMENT, _TRAJECTORIES = "world_models/payment.py", "vla_rl/experience/trajectories.py"
_ON_HEAD, _ON_EPISODES = "tests/world_models/test_rewards.py::test_", "tests/experience/test_trajectories.py::test_"
_UNSEEN = f"{_ON_HEAD}rewards_of_episodes_that_it_never_saw_are_predicted_from_what_it_sees"
_UNKNOWN = f"{_ON_HEAD}actions_that_are_not_known_earn_nothing_and_change_no_reward"
_LOSS = f"{_ON_HEAD}the_loss_is_the_error_of_the_known_actions_rewards"
_SCALE = f"{_ON_HEAD}the_scale_of_rewards_is_that_of_the_first_episodes_and_is_kept_in_the_checkpoint"
_SAME = f"{_ON_HEAD}without_the_head_weights_losses_and_predictions_are_the_same_bit_for_bit"
_PAID = f"{_ON_HEAD}a_rollout_is_paid_what_the_head_says_when_a_call_is_complete"
_SUCCESS = f"{_ON_HEAD}success_ends_a_paid_rollout_and_earns_what_the_head_says"
_REFUSED = f"{_ON_HEAD}a_reward_that_nobody_predicts_is_refused"
_UNCERTAIN = f"{_ON_HEAD}an_uncertain_call_earns_nothing"
_RECORDED = f"{_ON_EPISODES}an_episode_has_every_time_step_and_the_actions_between"
_WINDOW = f"{_ON_EPISODES}a_window_holds_context_actions_and_outcomes"
_OLD = f"{_ON_EPISODES}rewards_are_saved_and_files_without_them_are_read"
_LAST = f"{_ON_EPISODES}the_last_reward_of_a_recorded_episode_is_paid_with_the_last_action_that_is_kept"
_QUALITY = "tests/evaluation/test_reward_metrics.py::test_"
_PLAN = (
    "tests/recipes/imagine/test_general.py::"
    "test_a_reward_that_the_planned_model_does_not_predict_is_refused_before_anything_is_played"
)

_LEARNT = (
    Fault(
        "the head learns nothing",
        _MODEL,
        'loss = loss + self.reward.weight * parts["reward"]',
        "pass",
        (_UNSEEN,),
    ),
    Fault(
        "rewards are predicted without their scale",
        _HEADS,
        "rewards = self.mean + self.std * self(features, call, task, known)",
        "rewards = self(features, call, task, known)",
        (_UNSEEN,),
    ),
    Fault(
        "rewards are read from one place of the picture alone, whatever it shows",
        _HEADS,
        "rewards: Tensor = self.out(torch.cat([seen, steps, frame], -1))[..., 0]",
        "rewards: Tensor = self.out(torch.cat([0 * seen, steps, frame], -1))[..., 0]",
        (_UNSEEN,),
    ),
    Fault(
        "actions that are not known yet are paid",
        _HEADS,
        "return rewards * self._counts(known)",
        "return rewards",
        (_UNKNOWN,),
    ),
    Fault(
        "rewards beyond the known actions are learnt",
        _HEADS,
        "return (error * counts).sum() / counts.sum()",
        "return error.mean()",
        (_LOSS,),
    ),
    Fault(
        "a model that is trained further takes another scale",
        _HEADS,
        "if not self.fitted:",
        "if True:",
        (_SCALE,),
    ),
    Fault(
        "the head is made before other parts",
        _MODEL,
        "self.inverse = InverseDynamics(self.picture, frames * actions)",
        "torch.rand(1 if config.reward else 0); self.inverse = InverseDynamics(self.picture, frames * actions)",
        (_SAME,),
    ),
)

_PAYMENTS = (
    Fault(
        "a call is paid its last action alone",
        _PAYMENT,
        "return future.reward.sum(1)",
        "return future.reward[:, -1]",
        (_PAID,),
    ),
    Fault(
        "what the head says is paid beside 1 for success",
        _PAYMENT,
        "return earned",
        "return earned + success",
        (_SUCCESS,),
    ),
    Fault(
        "success is paid whatever the plan asks for",
        _ENV,
        "self.config.reward.paid(self._earned[complete], self._book.success[complete])",
        "self._book.success[complete]",
        (_PAID, _SUCCESS),
    ),
    Fault(
        "a model with a head pays it without being asked",
        _ENV,
        "self.config.reward.paid(self._earned[complete], self._book.success[complete])",
        "self._earned[complete]",
        (_SUCCESS,),
    ),
    Fault(
        "an uncertain call is paid",
        _ENV,
        "self._finite[uncertain], self._earned[uncertain] = True, 0.0",
        "self._finite[uncertain] = True",
        (_UNCERTAIN,),
    ),
    Fault(
        "a model without a head for rewards is asked for them",
        _ENV,
        "self.config.reward.require(model.config.reward)",
        "pass",
        (_REFUSED,),
    ),
    Fault(
        "that no head is planned is noticed after episodes were played",
        "vla_rl/recipes/imagine/recipe.py",
        "plan.imagination.reward.require(plan.model.reward)",
        "pass",
        (_PLAN,),
    ),
)

_EPISODES = (
    Fault(
        "recorded rewards are one action late",
        "vla_rl/experience/collect.py",
        "reward=np.array([*rewards, 0.0], np.float32)",
        "reward=np.array([0.0, *rewards], np.float32)",
        (_RECORDED,),
    ),
    Fault(
        "a window has the rewards of the actions after its own",
        "vla_rl/experience/windows.py",
        '"reward": trajectories.reward[np.concatenate([present, future[:, :-1]], 1)]',
        '"reward": trajectories.reward[future]',
        (_WINDOW,),
    ),
    Fault(
        "an older file has rewards of 0",
        _TRAJECTORIES,
        "return np.full(len(like), np.nan, np.float32)",
        "return np.zeros(len(like), np.float32)",
        (_OLD, _LAST),
    ),
    Fault(
        "the reward of the action that is left out is lost",
        _TRAJECTORIES,
        "reward[last - 1] += reward[last]",
        "pass",
        (_LAST,),
    ),
    Fault(
        "the reward of the action that is left out stays at the last picture",
        _TRAJECTORIES,
        "reward[last] = 0.0",
        "pass",
        (_LAST,),
    ),
    Fault(
        "replays without the call count",
        "vla_rl/evaluation/reward_metrics.py",
        "(calls >= horizon) & np.isfinite",
        "(calls >= 0) & np.isfinite",
        (f"{_QUALITY}rewards_agree_by_correlation_and_error_of_the_replays_that_have_the_call",),
    ),
)

FAULTS = (*_LEARNT, *_PAYMENTS, *_EPISODES)
