"""Faults in rollbacks, interventions, the order of off-policy steps and the checks of algorithm configs."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SHARED, _PPO = "vla_rl/algorithms/policy_gradient.py", "vla_rl/algorithms/ppo.py"
_RELATIVE, _OFF = "vla_rl/algorithms/group_relative.py", "vla_rl/algorithms/off_policy.py"
_LOOP, _LIMITS = "vla_rl/training/loop.py", "vla_rl/contract/limits.py"
_ROLLBACK = "tests/algorithms/test_rollback.py::"
_CRITICS = f"{_ROLLBACK}test_critics_and_targets_are_rolled_back_with_the_policy"
_SLOW = f"{_ROLLBACK}test_slow_actors_are_rolled_back"
_START_TD3 = f"{_ROLLBACK}test_a_rollback_to_the_start_keeps_the_input_statistics_of_residual_td3"
_START_PPO = f"{_ROLLBACK}test_a_rollback_to_the_start_keeps_the_input_statistics_of_residual_ppo"
_CLIMB = f"{_ROLLBACK}test_after_a_rollback_ppo_has_no_moments_and_its_learning_rate_does_not_climb_back"
_IN_LOOP = "tests/training/test_loop.py::test_after_a_collapse_the_learner_restores_its_own_state_of_the_best_weights"
_RESCUE_PPO = "tests/algorithms/test_ppo_arguments.py::test_a_rescue_is_cut_out_of_the_return"
_RESCUE_GRPO = "tests/algorithms/test_grpo.py::test_a_rescue_is_not_the_policys_success"
_PREDICTED = "tests/algorithms/test_grpo.py::test_a_predicted_return_is_not_added_to_a_success_or_a_rescue"
_STEPS = "tests/algorithms/test_off_policy.py::test_steps_follow_the_decisions_once_there_are_enough"
_RLPD = "tests/algorithms/test_sac.py::test_rlpds_actor_steps_after_the_last_of_its_critic_steps"
_PENALTY = "tests/algorithms/test_cal_ql.py::test_the_penalty_of_the_regulariser_is_that_of_its_parts"
_CONFIGS = "tests/algorithms/test_configs.py::test_a_number_without_a_meaning_is_refused_in_one_sentence"
_BOUNDS = "tests/algorithms/test_configs.py::test_the_bounds_themselves_are_allowed"

_ROLLBACKS = (
    Fault(
        "moments survive a rollback",
        _SHARED,
        "            item.state.clear()",
        "            item.state.copy()",
        (_CRITICS, _CLIMB),
    ),
    Fault(
        "the learning rate climbs back after a rollback",
        _SHARED,
        "self.max_lr = max(self.config.lr_bounds[0], self.lr * lr_factor)",
        "self.lr = self.lr * lr_factor",
        (_CLIMB,),
    ),
    Fault(
        "a resumed learner forgets the bound of its learning rate",
        _SHARED,
        'self.max_lr = state["max_lr"]',
        "self.max_lr = self.config.lr_bounds[1]",
        (_CLIMB,),
    ),
    Fault(
        "a rollback to the start loses the input statistics",
        _SHARED,
        'for name, value in self.calibration.items() if not state["calibrated"] else ():',
        "for name, value in ():",
        (_START_PPO,),
    ),
    Fault(
        "a resumed learner forgets its input statistics",
        _SHARED,
        'self.calibration = {name: value.clone() for name, value in state["calibration"].items()}',
        "self.calibration = {}",
        (_START_PPO,),
    ),
    Fault(
        "off-policy input statistics are not fitted again",
        _OFF,
        'if self.steps and not state["calibrated"]:',
        'if self.steps and state["calibrated"]:',
        (_START_TD3,),
    ),
    Fault(
        "the targets are not rolled back",
        _OFF,
        'return {"critic": self.critic, "target_critic": self.target_critic}',
        'return {"critic": self.critic}',
        (_CRITICS,),
    ),
    Fault(
        "what is rolled back to goes on training",
        _OFF,
        "state[key] = {name: value.clone() for name, value in network.state_dict().items()}",
        "state[key] = dict(network.state_dict())",
        (_SLOW,),
    ),
    Fault(
        "the temperature is not rolled back",
        "vla_rl/algorithms/sac.py",
        'self.log_temperature.data.copy_(state["log_temperature"])',
        'self.log_temperature.data.add_(0.0 * state["log_temperature"])',
        (_CRITICS,),
    ),
    Fault(
        "IQL's V is not rolled back",
        "vla_rl/algorithms/iql.py",
        'return {**super()._networks(), "value": self.value}',
        "return super()._networks()",
        (_CRITICS,),
    ),
    Fault(
        "the slow actor is not rolled back",
        "vla_rl/algorithms/residual_td3.py",
        "self.target_parameters[name].copy_(item)",
        "self.target_parameters[name].add_(0.0 * item)",
        (_SLOW,),
    ),
    Fault(
        "a collapse restores the weights only",
        _LOOP,
        "if isinstance(self.learner, CanRollBack) and self.best.learner:",
        "if isinstance(self.learner, CanRollBack) and not self.best.weights:",
        (_IN_LOOP,),
    ),
    Fault(
        "a resumed run forgets the learner's best state",
        _LOOP,
        '"learner": self.best.learner,',
        '"learner": {},',
        (_IN_LOOP,),
    ),
)

_INTERVENTIONS = (
    Fault(
        "a rescue is credited to the decision before it",
        _PPO,
        "rollout.truncated | intervened,",
        "rollout.truncated,",
        (_RESCUE_PPO,),
    ),
    Fault(
        "the reward of a rescue stays in the advantages",
        _PPO,
        "rollout.valid & ~intervened[..., None],",
        "rollout.valid,",
        (_RESCUE_PPO,),
    ),
    Fault(
        "a rescue is an episode's success",
        _RELATIVE,
        "rollout.valid & own[..., None], rollout.reward",
        "rollout.valid, rollout.reward",
        (_RESCUE_GRPO,),
    ),
    Fault(
        "what follows an intervention is used",
        _RELATIVE,
        "usable &= own & before_success(rollout)",
        "usable &= before_success(rollout)",
        (_RESCUE_GRPO,),
    ),
    Fault(
        "a success is paid twice at the time limit",
        _RELATIVE,
        "rollout.success.any(0) | rollout.intervened.any(-1).any(0)",
        "rollout.intervened.any(-1).any(0)",
        (_PREDICTED,),
    ),
    Fault(
        "the rest of a rescued episode is predicted",
        _RELATIVE,
        "rollout.success.any(0) | rollout.intervened.any(-1).any(0)",
        "rollout.success.any(0)",
        (_PREDICTED,),
    ),
)

_OFF_POLICY = (
    Fault(
        "target critics are not standardised",
        _OFF,
        "return [self.critic, self.target_critic, self.policy]",
        "return [self.critic, self.policy]",
        (_START_TD3,),
    ),
    Fault(
        "IQL's V is regressed on the online critics",
        "vla_rl/algorithms/iql.py",
        "min_q = self.min_target_q(",
        "min_q = (lambda features, action: self.critic(features, action).amin(0))(",
        ("tests/algorithms/test_iql.py::test_the_value_is_regressed_on_the_target_critics",),
    ),
    Fault(
        "Cal-QL's penalty is at the next state",
        "vla_rl/algorithms/cal_ql.py",
        "self.critic(repeated(batch.features, 3 * count)",
        "self.critic(repeated(batch.next_features, 3 * count)",
        (_PENALTY,),
    ),
    Fault(
        "Cal-QL's next actions are those of the state itself",
        "vla_rl/algorithms/cal_ql.py",
        "self._sample(batch.features), self._sample(batch.next_features)",
        "self._sample(batch.features), self._sample(batch.features)",
        (
            "tests/algorithms/test_cal_ql.py::test_the_penalty_has_the_actions_of_the_next_state_at_the_values_of_this_one",
        ),
    ),
)

_STEPS_AND_NUMBERS = (
    Fault(
        "the actor steps after the first of the critics' steps",
        _OFF,
        "turn = (self.steps + 1) % self.config.policy_delay == 0",
        "turn = self.steps % self.config.policy_delay == 0",
        (_RLPD,),
    ),
    Fault(
        "steps accrue while nothing can be sampled",
        _OFF,
        "self.update_debt = min(self.update_debt, self.config.utd_ratio * new)",
        "self.update_debt = max(self.update_debt, self.config.utd_ratio * new)",
        (_STEPS,),
    ),
    Fault("zero is a positive number", _LIMITS, "if not value > 0:", "if not value >= 0:", (_CONFIGS,)),
    Fault(
        "a bound itself is refused", _LIMITS, "if not low <= value <= high:", "if not low < value < high:", (_BOUNDS,)
    ),
    Fault("bounds may be exchanged", _LIMITS, "not pair[0] <= pair[1]", "not pair[0] != pair[1]", (_CONFIGS,)),
    Fault(
        "PPO accepts a discount above 1",
        _PPO,
        "check_limits(self, gamma=(0, 1), lam=(0, 1))",
        "check_limits(self, lam=(0, 1))",
        (_CONFIGS,),
    ),
)

FAULTS = (*_ROLLBACKS, *_OFF_POLICY, *_INTERVENTIONS, *_STEPS_AND_NUMBERS)
