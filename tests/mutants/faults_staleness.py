"""Faults in how decisions of older policies and log-probs that disagree are treated, and in micro-batches."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STALE, _DECISIONS = "vla_rl/algorithms/staleness.py", "vla_rl/algorithms/decisions.py"
_SHARED, _PPO = "vla_rl/algorithms/policy_gradient.py", "vla_rl/algorithms/ppo.py"
_ON_STALE, _ON_UPDATES = "tests/algorithms/test_staleness.py::", "tests/algorithms/test_ppo_updates.py::"
_BY_HAND = f"{_ON_STALE}test_the_decoupled_objective_by_hand"
_DROPPED = f"{_ON_STALE}test_decisions_beyond_the_age_bound_are_dropped_and_counted"
_ROUNDING = f"{_ON_STALE}test_rounding_of_the_same_version_is_corrected_and_said_once"
_REFUSED = f"{_ON_STALE}test_a_log_prob_that_is_not_the_density_is_refused"
_BFLOAT16 = f"{_ON_STALE}test_rounding_to_bfloat16_passes_whatever_the_size_of_the_action"
_TOGETHER = f"{_ON_STALE}test_all_processes_correct_or_refuse_together"
_FUTURE = f"{_ON_STALE}test_a_decision_from_the_future_is_refused"
_MICRO = f"{_ON_UPDATES}test_micro_batches_leave_the_gradient_as_it_is"

_OBJECTIVE = (
    Fault(
        "stale decisions are anchored at the present policy",
        _STALE,
        "torch.where(stale, gap.exp().clamp(max=limits.max_importance_weight), 1.0)",
        "torch.ones_like(gap)",
        (_BY_HAND,),
    ),
    Fault(
        "stale decisions keep their recorded log-prob",
        _STALE,
        "torch.where(stale, old.logprob, batch.logprob)",
        "batch.logprob",
        (_BY_HAND,),
    ),
    Fault(
        "the importance weight inverted",
        _STALE,
        "torch.where(stale, gap.exp()",
        "torch.where(stale, (-gap).exp()",
        (_BY_HAND,),
    ),
    Fault(
        "an unbounded importance weight",
        _STALE,
        "gap.exp().clamp(max=limits.max_importance_weight)",
        "gap.exp()",
        (f"{_ON_STALE}test_the_importance_weight_is_bounded",),
    ),
    Fault(
        "the weight is computed and not used",
        _STALE,
        "weight=for_parts(batch.weight, gap) * importance)",
        "weight=batch.weight)",
        (_BY_HAND,),
    ),
    Fault(
        "PPO and GRPO leave the weight out",
        "vla_rl/algorithms/surrogate.py",
        "torch.where(executed, _columns(minibatch.weight) * value, 0.0)",
        "torch.where(executed, value, 0.0)",
        (_BY_HAND,),
    ),
    Fault(
        "DPPO leaves the weight out",
        "vla_rl/algorithms/dppo.py",
        "(minibatch.weight * objective).mean()",
        "objective.mean()",
        (f"{_ON_STALE}test_dppo_weights_its_steps_too",),
    ),
)

_AGES = (
    Fault(
        "the age counts from the rollout's newest decision",
        _DECISIONS,
        "age: Tensor = version - rollout.version",
        "age: Tensor = rollout.version.max() - rollout.version",
        (f"{_ON_STALE}test_the_age_counts_from_the_learners_version",),
    ),
    Fault(
        "the age bound drops decisions of that age",
        _SHARED,
        "fresh = age <= self._max_age()",
        "fresh = age < self._max_age()",
        (_DROPPED,),
    ),
    Fault(
        "decisions beyond the age bound are used", _SHARED, "return own & fresh, age", "return own, age", (_DROPPED,)
    ),
    Fault(
        "decisions from the future are fresh",
        _DECISIONS,
        "(age[active] < 0).any()",
        "(age[active] < -99).any()",
        (_FUTURE,),
    ),
    Fault(
        "idle slots have an age",
        _DECISIONS,
        "active = rollout.valid.any(-1)",
        "active = torch.ones_like(rollout.terminated)",
        (_FUTURE,),
    ),
    Fault(
        "GoRL learns from noise of an earlier decoder",
        "vla_rl/algorithms/gorl.py",
        "return min(self.config.max_age, self.stage_iteration) if self.stage else self.config.max_age",
        "return self.config.max_age",
        ("tests/algorithms/test_gorl.py::test_noise_that_went_through_an_earlier_decoder_is_dropped",),
    ),
)

_DENSITY = (
    Fault(
        "log-probs that rounding changed are kept",
        _STALE,
        "float(largest > limits.max_logprob_gap)",
        "float(largest < -limits.max_logprob_gap)",
        (_ROUNDING, _REFUSED),
    ),
    Fault(
        "a wrong density is recomputed", _STALE, "    if recompute:", "    if recompute and len(gap) < 0:", (_REFUSED,)
    ),
    Fault(
        "a systematic error passes",
        _STALE,
        "if not (beyond or abs(mean) > systematic):",
        "if not beyond:",
        (_TOGETHER, _REFUSED),
    ),
    Fault(
        "a single wrong density passes",
        _STALE,
        "if not (beyond or abs(mean) > systematic):",
        "if not abs(mean) > systematic:",
        (_BFLOAT16,),
    ),
    Fault(
        "the bound of rounding does not grow with the action",
        _STALE,
        "bound = 8.0 * BF16_ERROR * terms.double().sqrt()",
        "bound = 8.0 * BF16_ERROR * math.sqrt(8)",
        (_BFLOAT16,),
    ),
    Fault(
        "rounding does not depend on how little noise divides it",
        _STALE,
        "(NOISY * mean.abs().clamp(min=1.0) / std).square()",
        "torch.ones_like(mean / std).square()",
        (f"{_ON_STALE}test_a_term_with_little_noise_rounds_like_several",),
    ),
    Fault(
        "stale decisions count as rounding",
        _STALE,
        "largest = max_abs(gap[~is_stale])",
        "largest = max_abs(gap)",
        (f"{_ON_STALE}test_stale_log_probs_are_no_numerical_gap",),
    ),
    Fault(
        "every process corrects by itself",
        _STALE,
        "float(reducer.sum(torch.tensor(float(largest > limits.max_logprob_gap), dtype=torch.float64))) > 0",
        "largest > limits.max_logprob_gap",
        (_TOGETHER,),
    ),
    Fault("the correction is said every time", _SHARED, " and not self._warned:", ":", (_ROUNDING,)),
)

_MICRO_BATCHES = (
    Fault(
        "a small micro-batch weighs as much as a large one",
        _DECISIONS,
        "yield part, len(part) / size",
        "yield part, micro_batch / size",
        (_MICRO,),
    ),
    Fault(
        "every micro-batch weighs as much as the whole", _SHARED, "weight = share * part", "weight = share", (_MICRO,)
    ),
    Fault(
        "the critic's micro-batches weigh as much as the whole",
        _PPO,
        "yield share * part * 0.5",
        "yield share * 0.5",
        (_MICRO,),
    ),
    Fault(
        "only the last micro-batch has a gradient",
        _SHARED,
        "                loss.backward()",
        "                optimizer.zero_grad() or loss.backward()",
        (_MICRO,),
    ),
    Fault(
        "old likelihoods are of the first micro-batch",
        _SHARED,
        "params = {name: torch.cat([part.params[name] for part in parts])",
        "params = {name: torch.cat([parts[0].params[name] for part in parts])",
        (_MICRO,),
    ),
    Fault(
        "the likelihood is not split",
        _SHARED,
        "micro_batches(size, self.config.micro_batch)",
        "micro_batches(size, 0)",
        (_MICRO,),
    ),
)

FAULTS = (*_OBJECTIVE, *_AGES, *_DENSITY, *_MICRO_BATCHES)
