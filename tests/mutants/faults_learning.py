"""Faults in samplers, advantages and the inputs of networks."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FLOW, _SCHEDULES = "vla_rl/policies/flow.py", "vla_rl/policies/flow_schedules.py"
_GAE = "vla_rl/algorithms/advantages.py"
_TOKENS, _NORMALIZE = "vla_rl/policies/tokens.py", "vla_rl/policies/normalization.py"

_DENSITY = "tests/policies/test_flow.py::test_density_is_the_sum_of_torch_normals"
_RATIO = "tests/policies/test_flow.py::test_ratio_is_one_before_the_first_update"
_TABLE = "tests/policies/test_flow_schedules.py::test_golden_step_table"
_WORKED = "tests/policies/test_flow.py::test_worked_scalar"
_GRADIENT = "tests/policies/test_flow_gradients.py::test_score_gradient_is_the_true_one"
_ADVANTAGES = "tests/algorithms/test_advantages.py::"
_INPUTS = "tests/policies/test_inputs.py::"

_SAMPLERS = (
    Fault(
        "a chain's log-prob is a mean",
        _FLOW,
        "std, logprob.sum((1, 2), dtype=torch.float64)",
        "std, logprob.mean((1, 2), dtype=torch.float64)",
        (_DENSITY,),
    ),
    Fault(
        "drift with the wrong sign",
        _SCHEDULES,
        "w1.append(s - sigma**2 * (t - s) / (2.0 * t))",
        "w1.append(s + sigma**2 * (t - s) / (2.0 * t))",
        (_TABLE,),
    ),
    Fault(
        "drift without its factor two",
        _SCHEDULES,
        "w1.append(s - sigma**2 * (t - s) / (2.0 * t))",
        "w1.append(s - sigma**2 * (t - s) / t)",
        (_TABLE,),
    ),
    Fault(
        "std without the root of the step",
        _SCHEDULES,
        "std.append(sigma * math.sqrt(t - s))",
        "std.append(sigma * (t - s))",
        (_TABLE,),
    ),
    Fault(
        "t clipped where the noise is singular",
        _SCHEDULES,
        "(1.0 - min(t, times[1]))",
        "(1.0 - min(t, 0.99))",
        (_TABLE,),
    ),
    Fault("s for t in the network's input", _SCHEDULES, "list(self.times[:-1]),", "list(self.times[1:]),", (_WORKED,)),
    Fault("t for s in w0", _SCHEDULES, "1.0 - s for s in times[1:]", "1.0 - t for t in times[:-1]", (_TABLE,)),
    Fault("twice the decay of the OU step", _SCHEDULES, "** (self.a**2 / 2.0)", "** (self.a**2)", (_TABLE,)),
    Fault(
        "no noise in the last step",
        _SCHEDULES,
        "return [*std[:-1], last_std]",
        "return [*std[:-1], 0.0]",
        ("tests/policies/test_flow_schedules.py::test_last_std_changes_only_the_last_std",),
    ),
    Fault(
        "the learned std is ignored",
        _SCHEDULES,
        "bounded_log_std(field.log_std.to(table_std.dtype),",
        "bounded_log_std(0.0 * field.log_std.to(table_std.dtype),",
        (_DENSITY,),
    ),
    Fault(
        "likelihood on another time grid than sampling",
        _FLOW,
        "*self._transition(field, starts, chain.noisy_steps))",
        "*self._transition(field, starts, (chain.noisy_steps + 1) % self.steps))",
        (_RATIO,),
    ),
    Fault(
        "likelihood of the wrong end of a step",
        _FLOW,
        "_gather(chain.points, chain.noisy_steps + 1) - mean",
        "_gather(chain.points, chain.noisy_steps) - mean",
        (_DENSITY,),
    ),
    Fault(
        "one noisy step for the whole batch",
        _FLOW,
        "torch.tensor(table.noisy, dtype=torch.int64)[choice]",
        "torch.tensor(table.noisy, dtype=torch.int64)[choice[:1].expand(batch, 1)]",
        ("tests/policies/test_flow.py::test_one_random_step_is_drawn_per_sample_among_noisy_steps",),
    ),
    Fault(
        "noise in steps that should follow the ODE",
        _FLOW,
        "torch.where((noisy_steps == k).any(1, keepdim=True), k, self.steps + k)",
        "torch.where((noisy_steps == k).any(1, keepdim=True), k, k)",
        ("tests/policies/test_flow.py::test_other_steps_follow_the_ode",),
    ),
    Fault(
        "the prefix re-run one step too far",
        _FLOW,
        "chain.points.shape[1] - 2)",
        "chain.points.shape[1] - 1)",
        (_RATIO,),
    ),
    Fault(
        "the prefix re-run without gradient",
        _FLOW,
        "return integrate(chain.points[:, 0], chain.points.shape[1] - 2)",
        "return integrate(chain.points[:, 0], chain.points.shape[1] - 2).detach()",
        (f"{_GRADIENT}[FlowSde-LastStepFromNoise]",),
    ),
    Fault(
        "half of the drift without gradient",
        _FLOW,
        "mean = w0 * (x - t * velocity)",
        "mean = w0 * (x - t * velocity.detach())",
        (f"{_GRADIENT}[FlowSde-AllSteps]",),
    ),
    Fault(
        "KL with the wrong sign of its logarithm",
        _FLOW,
        "(ratio + 1.0) - ratio.log()",
        "(ratio + 1.0) + ratio.log()",
        ("tests/policies/test_flow.py::test_kl_equals_torch_and_the_velocity_form",),
    ),
    Fault(
        "flow matching towards the noise",
        _FLOW,
        "(velocity.to(x0.dtype) - (noise - x0))",
        "(velocity.to(x0.dtype) - (x0 - noise))",
        ("tests/policies/test_flow.py::test_flow_matching_loss",),
    ),
)

_RETURNS = (
    Fault(
        "truncation counts as termination",
        _GAE,
        "torch.where(terminated, 0.0, next_value.double())",
        "torch.where(terminated | truncated, 0.0, next_value.double())",
        (f"{_ADVANTAGES}test_g4_truncated_inside_a_chunk",),
    ),
    Fault(
        "bootstrap through a termination",
        _GAE,
        "torch.where(terminated, 0.0, next_value.double())",
        "torch.where(terminated, next_value.double(), next_value.double())",
        (f"{_ADVANTAGES}test_g3_terminated_inside_a_chunk",),
    ),
    Fault(
        "gamma per chunk instead of per action",
        _GAE,
        "discount = torch.pow(gamma, count.double())",
        "discount = torch.pow(gamma, (count > 0).double())",
        (f"{_ADVANTAGES}test_g5_ragged_chunks",),
    ),
    Fault(
        "lambda leaks into the next episode",
        _GAE,
        "torch.where(ended, 0.0, discount * decay)",
        "discount * decay",
        (f"{_ADVANTAGES}test_g6_two_rows_and_normalisation",),
    ),
    Fault(
        "an end while idle does not part its neighbours",
        _GAE,
        "skipped = torch.where(ended[j], 0.0, next_advantage)",
        "skipped = next_advantage",
        (f"{_ADVANTAGES}test_an_end_while_idle_separates_episodes",),
    ),
    Fault(
        "rewards of unexecuted actions count",
        _GAE,
        "masked = torch.where(valid, reward.double(), 0.0)",
        "masked = reward.double()",
        (f"{_ADVANTAGES}test_chunk_reward_discounts_over_valid_actions",),
    ),
    Fault(
        "the first reward of a chunk is discounted",
        _GAE,
        "(valid.long().cumsum(-1) - 1)",
        "valid.long().cumsum(-1)",
        (f"{_ADVANTAGES}test_g1_lambda_per_decision",),
    ),
    Fault(
        "advantages divided by the sample std",
        _GAE,
        "reducer.sum(centred.square().sum()) / count.clamp(min=1.0)",
        "reducer.sum(centred.square().sum()) / (count - 1.0).clamp(min=1.0)",
        (f"{_ADVANTAGES}test_g6_two_rows_and_normalisation",),
    ),
    Fault(
        "every process its own mean",
        _GAE,
        "reducer.sum(torch.stack([values.sum(), mask.sum().double()])).unbind()",
        "torch.stack([values.sum(), mask.sum().double()]).unbind()",
        (f"{_ADVANTAGES}test_normalisation_does_not_depend_on_processes",),
    ),
    Fault(
        "every process its own std",
        _GAE,
        "(reducer.sum(centred.square().sum()) /",
        "(centred.square().sum() /",
        (f"{_ADVANTAGES}test_normalisation_does_not_depend_on_processes",),
    ),
)

_INPUT = (
    Fault(
        "the first word is padding",
        _TOKENS,
        "{word: i + 1 for i, word",
        "{word: i for i, word",
        (f"{_INPUTS}test_words_are_numbered_in_order_and_zero_is_padding",),
    ),
    Fault(
        "bounds become a half",
        _NORMALIZE,
        "tuple((b - a) / 2 for a, b",
        "tuple((b - a) for a, b",
        (f"{_INPUTS}test_bounds_become_one",),
    ),
    Fault(
        "a policy may act at another control rate",
        _NORMALIZE,
        '"action", "control_dt"):',
        '"action"):',
        (f"{_INPUTS}test_a_policy_is_refused_another_environment",),
    ),
)

FAULTS = (*_SAMPLERS, *_RETURNS, *_INPUT)
