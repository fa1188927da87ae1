"""Faults in PPO and in the loop around it."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PPO, _TESTS = "vla_rl/algorithms/ppo.py", "tests/algorithms/test_ppo.py::"
_SHARED, _SURROGATE = "vla_rl/algorithms/policy_gradient.py", "vla_rl/algorithms/surrogate.py"
_UPDATES = "tests/algorithms/test_ppo_updates.py::"
_ARGUMENTS = "tests/algorithms/test_ppo_arguments.py::"
_BY_HAND = f"{_TESTS}test_the_clipped_objective_by_hand"
_VALUES = f"{_TESTS}test_the_critic_learns_the_discounted_return_of_chunks"
_DRAWN = f"{_UPDATES}test_minibatches_are_drawn_anew_in_every_epoch_and_use_every_decision_once"
_ENTERS = f"{_TESTS}test_intervened_and_idle_decisions_never_enter_a_likelihood"

_LOOP, _ON_LOOP = "vla_rl/training/loop.py", "tests/training/test_loop.py::"

_LOSSES = (
    Fault(
        "one permutation for all epochs",
        _SHARED,
        "torch.randperm(total, generator=self.generator)",
        "torch.randperm(total, generator=torch.Generator().manual_seed(0))",
        (_DRAWN,),
    ),
    Fault(
        "the last minibatch is dropped",
        _SHARED,
        "for part in order.tensor_split(",
        "for part in order[:-1].tensor_split(",
        (_DRAWN,),
    ),
    Fault(
        "the ratio inverted",
        _SURROGATE,
        "objective(log_ratio.exp(),",
        "objective((-log_ratio).exp(),",
        (_BY_HAND,),
    ),
    Fault(
        "the old log-prob is that after the update",
        _SURROGATE,
        "objective(log_ratio.exp(),",
        "objective((log_ratio - log_ratio.detach()).exp(),",
        (_BY_HAND,),
    ),
    Fault(
        "the optimistic bound",
        _SHARED,
        "torch.minimum(ratio * advantage,",
        "torch.maximum(ratio * advantage,",
        (_BY_HAND,),
    ),
    Fault(
        "clip bounds exchanged",
        _SHARED,
        "ratio.clamp(1 - low, 1 + high)",
        "ratio.clamp(1 - high, 1 + low)",
        (f"{_ARGUMENTS}test_each_bound_clips_its_own_side",),
    ),
    Fault(
        "the objective is minimised",
        _SURROGATE,
        "return -value.sum(1).mean(),",
        "return value.sum(1).mean(),",
        (f"{_TESTS}test_the_first_gradient_is_the_policy_gradient",),
    ),
    Fault(
        "the critic learns advantages",
        _PPO,
        "(self.critic(micro.features) - micro.returns)",
        "(self.critic(micro.features) - micro.advantage)",
        (_VALUES,),
    ),
    Fault(
        "truncated episodes bootstrap from the next one",
        _PPO,
        "if len(rollout.final_index):",
        "if len(rollout.final_index) < 0:",
        (_VALUES,),
    ),
    Fault(
        "the value of a decision is that of the next",
        _PPO,
        "value, next_value = values[:-1],",
        "value, next_value = values[1:],",
        (f"{_ARGUMENTS}test_an_advantage_is_over_the_value_of_where_the_decision_was_made",),
    ),
    Fault(
        "intervened decisions are learnt from",
        _SHARED,
        "rollout.valid.any(-1) & ~rollout.intervened.any(-1)",
        "rollout.valid.any(-1)",
        (_ENTERS,),
    ),
    Fault(
        "idle decisions are learnt from",
        _SHARED,
        "rollout.valid.any(-1) & ~rollout.intervened.any(-1)",
        "~rollout.intervened.any(-1)",
        (_ENTERS,),
    ),
    Fault(
        "a partly intervened chunk is learnt from",
        _SHARED,
        "& ~rollout.intervened.any(-1)",
        "& ~rollout.intervened.all(-1)",
        (f"{_TESTS}test_one_intervened_action_is_enough_to_leave_a_decision_out",),
    ),
    Fault(
        "the learning rate moves away from the KL target",
        _SHARED,
        "self.lr /= self.config.lr_factor",
        "self.lr *= self.config.lr_factor",
        (f"{_UPDATES}test_the_learning_rate_follows_the_kl_within_its_bounds",),
    ),
    Fault(
        "the KL never stops the epochs",
        _SHARED,
        'stopped = info["policy/kl"] > self.config.stop_kl * self.config.target_kl',
        "stopped = False",
        (f"{_UPDATES}test_epochs_end_early_when_the_kl_is_too_large_and_the_critic_goes_on",),
    ),
    Fault(
        "the KL stop lasts for its epoch only",
        _SHARED,
        "epoch_kl: list[float] = []",
        "epoch_kl, stopped = [], self._in_warmup()",
        (f"{_UPDATES}test_epochs_end_early_when_the_kl_is_too_large_and_the_critic_goes_on",),
    ),
    Fault(
        "the KL of the new policy to the old one",
        _SHARED,
        "self.policy.kl(old if index is None else select_each(old, index), new.params)",
        "self.policy.kl(new.params, old if index is None else select_each(old, index))",
        (f"{_UPDATES}test_the_kl_is_that_of_the_old_policy_to_the_new_one",),
    ),
    Fault(
        "the value loss without its half",
        _PPO,
        "yield share * part * 0.5 * (",
        "yield share * part * (",
        (f"{_TESTS}test_the_value_loss_is_half_the_squared_error",),
    ),
    Fault(
        "an entropy malus",
        _SHARED,
        "weight * (loss - self.config.entropy",
        "weight * (loss + self.config.entropy",
        (f"{_TESTS}test_the_entropy_bonus_widens_the_noise",),
    ),
    Fault(
        "a NaN enters the weights",
        _SHARED,
        "if not math.isfinite(total) or not math.isfinite(norm):",
        'if norm == float("inf"):',
        (f"{_TESTS}test_a_nan_stops_before_it_enters_the_weights_and_says_where",),
    ),
)

_REPORTING = (
    Fault(
        "metrics of an older version are read as none",
        "vla_rl/recipes/metrics.py",
        "for name in _OLD_NAMES & row.keys()",
        "for name in set[str]() & row.keys()",
        ("tests/recipes/test_metrics.py::test_metrics_of_an_older_version_are_refused_in_one_sentence",),
    ),
)

_TRAINING = (
    Fault(
        "the best weights go on training",
        _LOOP,
        "{name: p.detach().clone() for name, p in parameters.items()}",
        "{name: p.detach() for name, p in parameters.items()}",
        (f"{_ON_LOOP}test_kept_weights_are_copies",),
    ),
    Fault(
        "the newest weights count as the best",
        _LOOP,
        "if score < self.score:",
        "if score < 0.0:",
        (f"{_ON_LOOP}test_the_best_validated_weights_are_kept_and_returned",),
    ),
    Fault(
        "a collapse is not noticed",
        _LOOP,
        "found.score < self.best.score - self.config.collapse",
        "found.score > self.best.score + self.config.collapse",
        (f"{_ON_LOOP}test_a_collapse_goes_back_to_the_best_weights_and_slows_down",),
    ),
    Fault(
        "new weights without a new version",
        "vla_rl/training/policy_store.py",
        "self.policy.version += 1",
        "self.policy.version += 0",
        (f"{_ON_LOOP}test_publishing_raises_the_version_that_decisions_carry",),
    ),
)

FAULTS = (*_LOSSES, *_REPORTING, *_TRAINING)
