"""Faults in the squashed policy, SAC, IQL, Cal-QL and WSRL."""

from __future__ import annotations

from tests.mutants.fault import Fault

_HEADS, _POLICY = "vla_rl/policies/heads.py", "vla_rl/policies/squashed.py"
_ON_POLICY = "tests/policies/test_squashed.py::"
_SAC, _ON_SAC = "vla_rl/algorithms/sac.py", "tests/algorithms/test_sac.py::"
_IQL, _ON_IQL = "vla_rl/algorithms/iql.py", "tests/algorithms/test_iql.py::"
_CAL, _ON_CAL = "vla_rl/algorithms/cal_ql.py", "tests/algorithms/test_cal_ql.py::"
_WSRL, _ON_WSRL = "vla_rl/algorithms/wsrl.py", "tests/algorithms/test_wsrl.py::"
_DENSITY = f"{_ON_POLICY}test_the_density_is_that_of_torch_summed_over_the_whole_chunk"
_UNITS = f"{_ON_POLICY}test_samples_are_normalised_chunks_and_actions_physical"
_TARGET = f"{_ON_SAC}test_the_target_by_hand"
_TEMPERATURE = f"{_ON_SAC}test_the_temperature_rises_when_the_entropy_is_below_its_target_and_falls_above"
_EXPECTILE = f"{_ON_IQL}test_golden_expectile_losses"
_WEIGHTS = f"{_ON_IQL}test_recorded_actions_are_imitated_by_the_exponential_of_their_advantage"
_GOLDEN = f"{_ON_CAL}test_golden_penalties"
_PARTS = f"{_ON_CAL}test_the_penalty_of_the_regulariser_is_that_of_its_parts"
_BEST = f"{_ON_CAL}test_the_target_is_the_best_of_several_actions_by_their_minimum_over_critics_without_entropy"
_DROPPED = f"{_ON_WSRL}test_after_pre_training_the_recorded_data_are_gone_and_all_else_goes_on"

_SQUASHED = (
    Fault(
        "the tanh's slope is left out of a sample's density",
        _HEADS,
        "return torch.tanh(u), (density - log_tanh_derivative(u)).sum(-1)",
        "return torch.tanh(u), normal.sum(-1)",
        (_DENSITY,),
    ),
    Fault(
        "the density of a chunk is a mean",
        _HEADS,
        "return torch.tanh(u), (density - log_tanh_derivative(u)).sum(-1)",
        "return torch.tanh(u), (density - log_tanh_derivative(u)).mean(-1)",
        (_DENSITY,),
    ),
    Fault(
        "atanh of an action at a bound is infinite",
        _HEADS,
        "torch.atanh(action.clamp(-1.0 + 1e-5, 1.0 - 1e-5))",
        "torch.atanh(action)",
        (f"{_ON_POLICY}test_a_density_far_outside_stays_finite_with_its_gradient",),
    ),
    Fault(
        "no gradient through the std of the noise",
        _HEADS,
        "u = mean + log_std.exp() * xi",
        "u = mean + log_std.exp().detach() * xi",
        (f"{_ON_POLICY}test_the_gradient_of_a_sample_is_that_of_its_distribution",),
    ),
    Fault(
        "critics get the sampled action and not the executed one",
        _POLICY,
        "return self.action_scale.normalize(executed).flatten(1)",
        "return sample.flatten(1)",
        (_UNITS,),
    ),
    Fault(
        "critics get actions in physical units",
        _POLICY,
        "return self.action_scale.normalize(executed).flatten(1)",
        "return executed.flatten(1)",
        (_UNITS,),
    ),
    Fault(
        "what is deployed explores",
        _POLICY,
        "flat = self.head.mode(features)",
        "flat, _ = self.head(features, generator)",
        (f"{_ON_POLICY}test_what_is_deployed_is_the_squashed_mean_without_noise",),
    ),
    Fault(
        "the std of a squashed policy is not kept within bounds",
        "vla_rl/policies/squashed.py",
        "self.config.head, self.config.std, bounds)",
        "self.config.head, self.config.std)",
        ("tests/policies/test_squashed.py::test_the_std_stays_within_its_bounds",),
    ),
)

_MAXIMUM_ENTROPY = (
    Fault(
        "the entropy is charged for in the target",
        _SAC,
        "next_decision.action) - self.temperature * next_decision.logprob",
        "next_decision.action) + self.temperature * next_decision.logprob",
        (_TARGET,),
    ),
    Fault(
        "the entropy of what follows an end counts",
        _SAC,
        "return batch.reward + batch.discount * value",
        "return batch.reward + batch.discount * value"
        " - self.temperature * (batch.discount == 0) * next_decision.logprob",
        (_TARGET,),
    ),
    Fault(
        "the actor ascends the minimum of SAC's critics",
        _SAC,
        "value: Tensor = self.critic(features, action).mean(0)",
        "value: Tensor = self.critic(features, action).amin(0)",
        (f"{_ON_SAC}test_the_actor_loss_by_hand_and_its_entropy_is_per_entry",),
    ),
    Fault(
        "the actor shuns entropy",
        _SAC,
        "return (self.temperature * decision.logprob - value).mean()",
        "return (-self.temperature * decision.logprob - value).mean()",
        (f"{_ON_SAC}test_the_actors_gradient_is_that_of_the_expectation",),
    ),
    Fault(
        "no gradient through the density",
        _SAC,
        "return (self.temperature * decision.logprob - value).mean()",
        "return (self.temperature * decision.logprob.detach() - value).mean()",
        (f"{_ON_SAC}test_the_actors_gradient_is_that_of_the_expectation",),
    ),
    Fault(
        "the temperature moves away from its target",
        _SAC,
        '* (info["policy/entropy"] - self.config.target_entropy)',
        '* (self.config.target_entropy - info["policy/entropy"])',
        (_TEMPERATURE,),
    ),
    Fault(
        "the target entropy is that of the whole action",
        _SAC,
        "entropy = -float(decision.logprob.detach().mean()) / decision.action.shape[-1]",
        "entropy = -float(decision.logprob.detach().mean())",
        (f"{_ON_SAC}test_the_actor_loss_by_hand_and_its_entropy_is_per_entry",),
    ),
    Fault(
        "a resumed run begins with a new temperature",
        _SAC,
        'self.log_temperature.copy_(state["log_temperature"])',
        'self.log_temperature.add_(0.0 * state["log_temperature"])',
        (f"{_ON_SAC}test_a_resumed_run_is_bit_identical",),
    ),
)

_OFFLINE = (
    Fault(
        "the expectile is turned round",
        _IQL,
        "torch.where(error < 0, 1.0 - expectile, expectile)",
        "torch.where(error < 0, expectile, 1.0 - expectile)",
        (_EXPECTILE,),
    ),
    Fault(
        "critics are regressed on the greatest value of what follows",
        _IQL,
        "next_value: Tensor = self.value(batch.next_features)",
        'next_value: Tensor = self.critic(batch.next_features, batch.next_features["q"]).amax(0)',
        (f"{_ON_IQL}test_critics_are_regressed_on_the_next_value",),
    ),
    Fault(
        "the weight has no limit",
        _IQL,
        ".exp().clamp_max(self.config.weight_limit)",
        ".exp()",
        (_WEIGHTS,),
    ),
    Fault(
        "recorded actions are imitated by their value, not their advantage",
        _IQL,
        "self.min_target_q(batch.features, action) - self.value(batch.features)",
        "self.min_target_q(batch.features, action)",
        (_WEIGHTS,),
    ),
    Fault(
        "worse actions are preferred",
        _IQL,
        "weight = (self.config.beta * advantage)",
        "weight = (-self.config.beta * advantage)",
        (_WEIGHTS,),
    ),
    Fault(
        "the value's inputs are not standardised",
        _IQL,
        "return [*super().input_normalizers(), self.value]",
        "return super().input_normalizers()",
        (f"{_ON_IQL}test_the_value_network_has_the_critics_inputs",),
    ),
    Fault(
        "uniform actions are bounded as well",
        _CAL,
        "torch.cat([uniform - entries * math.log(0.5), bounded], -1)",
        "torch.cat([torch.maximum(uniform, bound[:, None]) - entries * math.log(0.5), bounded], -1)",
        (_GOLDEN,),
    ),
    Fault(
        "the bound is on weighted values",
        _CAL,
        "bounded = torch.maximum(policy, bound[:, None]) - logprob",
        "bounded = torch.maximum(policy - logprob, bound[:, None])",
        (_GOLDEN,),
    ),
    Fault(
        "no bound: CQL",
        _CAL,
        "bounded = torch.maximum(policy, bound[:, None]) - logprob",
        "bounded = policy - logprob",
        (_GOLDEN,),
    ),
    Fault(
        "likely actions weigh more",
        _CAL,
        "bounded = torch.maximum(policy, bound[:, None]) - logprob",
        "bounded = torch.maximum(policy, bound[:, None]) + logprob",
        (_GOLDEN, f"{_ON_CAL}test_the_sum_estimates_the_integral_over_all_actions"),
    ),
    Fault(
        "the density of uniform actions is that of one entry",
        _CAL,
        "uniform - entries * math.log(0.5)",
        "uniform - math.log(0.5)",
        (f"{_ON_CAL}test_the_sum_estimates_the_integral_over_all_actions",),
    ),
    Fault(
        "the copies of decisions are mixed up",
        _CAL,
        "item.repeat_interleave(count, 0)",
        "item.repeat(count, *[1] * (item.dim() - 1))",
        (_PARTS, _BEST),
    ),
    Fault(
        "the target takes the worst of several actions",
        _CAL,
        "values.view(-1, self.config.actions).amax(1)",
        "values.view(-1, self.config.actions).amin(1)",
        (_BEST,),
    ),
    Fault(
        "the recorded data stay in the buffer",
        _WSRL,
        'self.replay.keep_only("online")',
        'self.replay.keep_only("demonstrations")',
        (_DROPPED,),
    ),
    Fault(
        "the targets begin anew after pre-training",
        _WSRL,
        "self.target_critic.load_state_dict(offline.target_critic.state_dict())",
        "self.target_critic.load_state_dict(self.target_critic.state_dict())",
        (f"{_ON_WSRL}test_the_targets_are_those_of_pre_training",),
    ),
    Fault(
        "the temperature begins anew after pre-training",
        _WSRL,
        "self.log_temperature.data.copy_(offline.log_temperature.data)",
        "self.log_temperature.data.copy_(self.log_temperature.data)",
        (_DROPPED,),
    ),
    Fault(
        "the warm-up is made up for afterwards",
        "vla_rl/algorithms/off_policy.py",
        "(self.decisions - max(before, self.config.learning_starts - 1))",
        "(self.decisions - (before if before >= self.config.learning_starts else 0))",
        (f"{_ON_WSRL}test_the_frozen_policy_collects_before_anything_is_learnt_online",),
    ),
    Fault(
        "a resumed run learns from what was dropped",
        "vla_rl/experience/mixture.py",
        "if state.keys() < self.parts.keys():",
        "if state.keys() > self.parts.keys():",
        (f"{_ON_WSRL}test_a_resumed_run_is_bit_identical_without_the_recorded_data",),
    ),
)

FAULTS = (*_SQUASHED, *_MAXIMUM_ENTROPY, *_OFFLINE)
