"""Faults in the execution of chunks by a robot that moves while its policy computes."""

from __future__ import annotations

from tests.mutants.fault import Fault

_POLICY, _ON_POLICY = "vla_rl/policies/real_time_chunking.py", "tests/policies/test_real_time_chunking.py::"
_WEIGHTS = f"{_ON_POLICY}test_golden_weights"
_STRAIGHT = f"{_ON_POLICY}test_with_a_straight_flow_the_error_shrinks_by_the_product_of_its_steps"
_CLOSED_FORM = f"{_ON_POLICY}test_a_linear_gaussian_flow_is_guided_by_its_closed_form"
_ALONE = f"{_ON_POLICY}test_without_anything_to_continue_it_decides_as_its_base"
_REFUSED = f"{_ON_POLICY}test_a_chunk_that_cannot_be_bridged_is_refused"

FAULTS = (
    Fault(
        "weights decay from the first action on",
        _POLICY,
        "index < delay, 1.0, decaying",
        "index < 0, 1.0, decaying",
        (_WEIGHTS,),
    ),
    Fault("weights decay linearly", _POLICY, "c * torch.expm1(c) / math.expm1(1.0)", "c", (_WEIGHTS,)),
    Fault("weights reach 0 one action early", _POLICY, "(left - delay + 1)", "(left - delay)", (_WEIGHTS,)),
    Fault("actions beyond the last chunk are guided", _POLICY, " * (index < left)", "", (_WEIGHTS,)),
    Fault(
        "guidance is not bounded",
        _POLICY,
        ".clamp_max(beta)",
        ".clamp_max(1e3)",
        (f"{_ON_POLICY}test_golden_guidance_weight", _STRAIGHT),
    ),
    Fault(
        "the chunk is estimated as if time ran from noise at 0",
        _POLICY,
        "a_hat = x - time * velocity",
        "a_hat = x - (1.0 - time) * velocity",
        (_STRAIGHT, _CLOSED_FORM),
    ),
    Fault(
        "the guidance is added to a velocity towards noise",
        _POLICY,
        "velocity.detach() - guidance_weight",
        "velocity.detach() + guidance_weight",
        (_STRAIGHT,),
    ),
    Fault(
        "the Jacobian is that of LeRobot",
        _POLICY,
        "torch.autograd.grad(end, at, error)[0]",
        "error",
        (_CLOSED_FORM, f"{_ON_POLICY}test_the_guidance_of_a_network_is_that_of_its_jacobian"),
    ),
    Fault(
        "the last chunk is continued from its beginning",
        _POLICY,
        " + (horizon - left)[:, None]",
        " + 0 * left[:, None]",
        (_STRAIGHT, _CLOSED_FORM),
    ),
    Fault("a reset keeps the last chunk", _POLICY, "left=0, length=0, delay=0", "delay=0", (_ALONE,)),
    Fault("a reset forgets only what was said", _POLICY, "left=0, length=0, delay=0", "left=0, delay=0", (_ALONE,)),
    Fault(
        "what was said holds for later chunks",
        _POLICY,
        'fresh = {"length": self.horizon, "left": 0, "delay": 0}',
        'fresh = {"length": self.horizon, "left": state["left"][0], "delay": 0}',
        (_ALONE,),
    ),
    Fault(
        "two entries of a state are one tensor",
        _POLICY,
        "{name: torch.full_like(state[name], value) for name, value in fresh.items()}",
        "dict.fromkeys(fresh, torch.zeros_like(state['left'])) | {'length': torch.full_like(state['left'], 8)}",
        (f"{_ON_POLICY}test_entries_of_a_state_can_be_written_one_by_one",),
    ),
    Fault(
        "a delay beyond what is left is accepted",
        _POLICY,
        "(steps <= self.horizon - late)",
        "(steps <= self.horizon)",
        (_REFUSED,),
    ),
    Fault("a delay beyond what was consumed is accepted", _POLICY, " & (late <= steps)", "", (_REFUSED,)),
    Fault(
        "what one environment says changes all",
        _POLICY,
        "changed[name][rows] = value",
        "changed[name][:] = value[0] if isinstance(value, Tensor) else value",
        (f"{_ON_POLICY}test_rows_are_independent", _ALONE),
    ),
    Fault(
        "padding of the noise is guided as well",
        _POLICY,
        "nn.functional.pad(item, padding)",
        "nn.functional.pad(item, padding, value=1.0)",
        (f"{_ON_POLICY}test_padded_chunks_are_guided_where_they_are_executed",),
    ),
    Fault(
        "samples of guided chains are given to learners",
        _POLICY,
        'if mode != "eval":',
        'if mode == "":',
        (f"{_ON_POLICY}test_nothing_learns_with_it",),
    ),
    Fault(
        "a joint at rest in the demonstrations is blown up",
        "vla_rl/recipes/tiny.py",
        "torch.as_tensor(episodes.state), self.smallest_scale)",
        "torch.as_tensor(episodes.state))",
        ("tests/recipes/test_imitate_expert.py::test_a_joint_at_rest_in_the_demonstrations_is_not_blown_up",),
    ),
)
