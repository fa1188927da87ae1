"""Faults in ratios per action and per token."""

from __future__ import annotations

from tests.mutants.fault import Fault

_LAWS = "tests/policies/test_likelihoods.py"
_LAW = f"{_LAWS}::test_densities_entropies_and_kl_are_those_of_torch[gaussian per chunk]"
_SURROGATE, _PARTS = "vla_rl/algorithms/surrogate.py", "vla_rl/policies/likelihood_parts.py"
_STALE, _CHECK = "vla_rl/algorithms/staleness.py", "vla_rl/contract/check.py"
_TESTS = "tests/algorithms/test_surrogate.py::"
_CLIPPED = f"{_TESTS}test_parts_are_clipped_one_by_one_and_those_that_were_not_executed_count_nowhere"
_FIRST = f"{_TESTS}test_the_first_gradient_is_the_same_for_chunks_actions_and_tokens"
_UNEXECUTED = f"{_TESTS}test_actions_that_were_not_executed_have_no_gradient_and_no_say"
_OF_TORCH = "tests/policies/test_likelihood_parts.py::test_parts_are_those_of_torch_and_sum_to_the_chunk"
_CHECKED = "tests/contract/test_check_policy.py::test_a_broken_policy_is_found"
_EXECUTED, _WRONG = f"{_TESTS}test_which_parts_are_executed", f"{_TESTS}test_wrong_parts_are_refused"

FAULTS = (
    Fault(
        "parts are averaged, so the gradient shrinks with their number",
        _SURROGATE,
        "return -value.sum(1).mean(),",
        "return -value.mean(),",
        (f"{_TESTS}test_golden_token_and_chunk_ratios", _FIRST),
    ),
    Fault(
        "tokens share the ratio of their chunk",
        _SURROGATE,
        "objective(log_ratio.exp(), minibatch.advantage[:, None])",
        "objective(log_ratio.sum(1, keepdim=True).exp().expand_as(log_ratio), minibatch.advantage[:, None])",
        (_CLIPPED,),
    ),
    Fault(
        "actions that were not executed are learnt from",
        _SURROGATE,
        "return valid.repeat_interleave(parts // horizon, 1)",
        "return torch.ones_like(logprob, dtype=torch.bool)",
        (_UNEXECUTED,),
    ),
    Fault(
        "the mask of actions is cut to tokens in the wrong order",
        _SURROGATE,
        "return valid.repeat_interleave(parts // horizon, 1)",
        "return valid.repeat(1, parts // horizon)",
        (_EXECUTED, _UNEXECUTED),
    ),
    Fault(
        "a log-prob of an action that was not executed poisons the loss",
        _SURROGATE,
        "log_ratio = torch.where(executed, _columns(logprob) - _columns(minibatch.logprob), 0.0)",
        "log_ratio = executed * (_columns(logprob) - _columns(minibatch.logprob))",
        (_CLIPPED, _UNEXECUTED),
    ),
    Fault(
        "the clipped share counts what was not executed",
        _SURROGATE,
        "torch.where(executed, clipped, 0.0).sum(1) / executed.sum(1)",
        "clipped.sum(1) / executed.shape[1]",
        (_CLIPPED,),
    ),
    Fault("parts that fit no action are used", _SURROGATE, "if parts % horizon:", "if not parts:", (_EXECUTED,)),
    Fault(
        "one number per chunk is compared with several",
        _STALE,
        "if recorded.shape != present.shape:",
        "if len(recorded) != len(present):",
        (_WRONG,),
    ),
    Fault(
        "a systematic error that is small in every token passes",
        _STALE,
        "check_density(joint(gap[~is_stale]),",
        "check_density(gap[~is_stale].flatten(),",
        (_WRONG,),
    ),
    Fault(
        "the tokens of an action belong to different actions",
        _PARTS,
        "terms.unflatten(-1, (horizon, -1)).sum(-1, dtype=torch.float64)",
        "terms.unflatten(-1, (-1, horizon)).sum(-2, dtype=torch.float64)",
        (_OF_TORCH, _UNEXECUTED),
    ),
    Fault(
        "a chunk's log-prob is a mean",
        _PARTS,
        "return terms.sum(-1, dtype=torch.float64)",
        "return terms.mean(-1, dtype=torch.float64)",
        (
            _OF_TORCH,
            _LAW,
        ),
    ),
    Fault(
        "the contract lets parts pass that fit no action",
        _CHECK,
        "_require(len(parts) < 2 and not sum(parts) % horizon,",
        "_require(len(parts) < 2,",
        (_CHECKED,),
    ),
    Fault(
        "the contract does not compare the parts of acting and learning",
        _CHECK,
        "_require(shapes[0] == shapes[1],",
        "_require(shapes[0][0] == shapes[1][0],",
        (_CHECKED,),
    ),
)
