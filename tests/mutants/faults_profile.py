"""Faults in the profiles of check_env."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PROFILE, _CHECK, _ON = "vla_rl/contract/profile.py", "vla_rl/contract/check.py", "tests/contract/test_profile.py::"
_TOLERANT = f"{_ON}test_a_tolerant_environment_may_differ_in_its_last_digits_and_a_bitwise_one_not_at_all"
_PICTURES = f"{_ON}test_pictures_may_differ_on_average_by_a_share_of_their_range_and_indices_never"
_ROBOT = f"{_ON}test_a_robot_is_looked_at_and_not_moved"

FAULTS = (
    Fault(
        "what may differ in its last digits is compared bit for bit",
        _PROFILE,
        'if not self.tolerance or a.shape != b.shape or a.dtype.kind in "bi":',
        "if True:",
        (_TOLERANT, _PICTURES),
    ),
    Fault(
        "every environment may differ in its last digits",
        _PROFILE,
        '"bitwise": Profile(0.0), "tolerant"',
        '"bitwise": Profile(1e-3), "tolerant"',
        (_TOLERANT, _PICTURES),
    ),
    Fault(
        "pictures may differ by any amount",
        _PROFILE,
        "return not a.size or bool((apart.mean(1) <= self.tolerance * 255).all())",
        "return True",
        (_PICTURES,),
    ),
    Fault(
        "indices may be off by one",
        _PROFILE,
        'or a.dtype.kind in "bi":',
        'or a.dtype.kind in "b":',
        (_PICTURES,),
    ),
    Fault(
        "a check starts episodes and executes actions on a robot",
        _CHECK,
        "if not profile_of(env.spec).moves:",
        "if False:",
        (f"{_ROBOT}[check_env]", f"{_ON}test_inspect_does_not_move_a_robot"),
    ),
    Fault(
        "a robot whose clock runs by itself passes",
        _CHECK,
        'np.array_equal(on_host(obs.time), on_host(later.time)), "time counts',
        'True, "time counts',
        (f"{_ROBOT}[check_env]",),
    ),
    Fault(
        "a policy's first action is executed on a robot that is only inspected",
        _CHECK,
        "    if moves:",
        "    if True:",
        (f"{_ON}test_a_policy_is_tried_on_a_robot_without_moving_it",),
    ),
    Fault(
        "a robot is moved before it is trained with",
        "vla_rl/contract/foreign.py",
        "if not profile_of(env.spec).moves:",
        "if False:",
        (f"{_ROBOT}[check_env_quickly]",),
    ),
    Fault(
        "environments as one repeat themselves as the strictest of them",
        _PROFILE,
        "return max((spec.profile for spec in specs), key=order.index)",
        "return min((spec.profile for spec in specs), key=order.index)",
        (f"{_ON}test_environments_as_one_have_the_loosest_profile",),
    ),
)
