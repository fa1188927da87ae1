"""Faults in a backbone that learns, and in the states that it learns to foresee."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STATES, _IMITATION, _TINY = (
    "vla_rl/algorithms/future_states.py",
    "vla_rl/algorithms/self_imitation.py",
    "vla_rl/policies/tiny.py",
)
_ON_STATES, _ON_TINY = "tests/algorithms/test_future_states.py::", "tests/policies/test_tiny.py::"
_AHEAD = f"{_ON_STATES}test_the_next_states_of_the_same_episode_and_nothing_beyond_its_end"
_SEES = f"{_ON_STATES}test_a_backbone_learns_to_see_where_its_own_successes_went"
_AGAIN = f"{_ON_STATES}test_improvements_begin_at_the_heads_first_weights_and_resume_bit_for_bit"
_GRADIENT = f"{_ON_TINY}test_a_backbone_that_learns_has_the_gradient_of_what_it_sees_now"

FAULTS = (
    Fault(
        "the states of the next episode are foreseen",
        _STATES,
        "return found.masked_fill((ahead > last[..., None])[..., None], torch.nan).flatten(2)",
        "return found.flatten(2)",
        (_AHEAD,),
    ),
    Fault(
        "the last state is foreseen again and again",
        _STATES,
        "return missed.sum() / known.sum().clamp_min(1)",
        "return missed.mean()",
        (f"{_ON_STATES}test_what_lies_beyond_an_end_has_no_weight",),
    ),
    Fault(
        "the present state is foreseen",
        _STATES,
        "torch.arange(1, decisions + 1, device=ends.device)",
        "torch.arange(decisions, device=ends.device)",
        (_AHEAD,),
    ),
    Fault(
        "what is foreseen teaches the backbone nothing",
        _IMITATION,
        "missed = self.future.loss(kept.features)",
        "missed = self.future.loss({name: item.detach() for name, item in kept.features.items()})",
        (_SEES,),
    ),
    Fault(
        "the head of the last improvement goes on",
        _IMITATION,
        'head = dict(self.future.named_parameters(prefix="future")) if self.future is not None else {}',
        "head: dict[str, nn.Parameter] = {}",
        (_AGAIN,),
    ),
    Fault(
        "an optimizer's moments survive an improvement",
        _IMITATION,
        "self.optimizer.state.clear()",
        "pass",
        ("tests/algorithms/test_self_imitation.py::test_an_improvement_begins_with_a_fresh_optimizer",),
    ),
    Fault(
        "a resumed run has another head",
        _IMITATION,
        'self.future.load_state_dict(state["future"])',
        "pass",
        (_AGAIN,),
    ),
    Fault(
        "a backbone that learns is read as it was when the policy acted",
        _TINY,
        "return self.conditioned_field(self.condition(self.encode_again(features)))",
        "return self.conditioned_field(self.condition(features))",
        (_GRADIENT,),
    ),
    Fault(
        "a backbone that learns is not among what is trained",
        _TINY,
        "            return parameters",
        "            parameters = dict(parameters)",
        (_GRADIENT,),
    ),
    Fault(
        "pictures are kept for a backbone that is frozen",
        _TINY,
        "if not self.backbone_learns:",
        "if not self.spec.images:",
        (f"{_ON_TINY}test_a_backbone_that_learns_keeps_its_pictures_and_decides_as_before",),
    ),
    Fault(
        "a long improvement says at once that it is done",
        _IMITATION,
        "self.report((step + 1) / steps)",
        "self.report(1.0)",
        ("tests/recipes/test_self_imitated.py::test_an_improvement_that_takes_long_says_how_far_it_is",),
    ),
)
