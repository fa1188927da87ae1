"""Faults in traces and in the comparison with another evaluator."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PARITY, _HINTS, _TRACE = (f"vla_rl/evaluation/{name}.py" for name in ("parity", "parity_hints", "trace"))
_ON = "tests/recipes/test_parity.py::test_"

FAULTS = (
    Fault(
        "a NaN of the other evaluator is no difference",
        _PARITY,
        "gap = np.where(same, 0.0, np.inf)",
        "gap = np.where(same, 0.0, 0.0)",
        (f"{_ON}a_nan_is_a_difference_and_equals_a_nan_alone",),
    ),
    Fault(
        "the first difference is that of the first key",
        _PARITY,
        "min(differing, key=lambda one: one.first or 0, default=None)",
        "next(iter(differing), None)",
        (f"{_ON}the_first_step_and_key_that_differ_are_named",),
    ),
    Fault(
        "the last difference of a key is its first",
        _PARITY,
        "if difference > limit and self.first is None:",
        "if difference > limit:",
        (f"{_ON}the_first_step_and_key_that_differ_are_named",),
    ),
    Fault(
        "samples are compared whatever noise they started from",
        _PARITY,
        "if noise_is_known and name in trace.arrays:",
        "if name in trace.arrays:",
        (f"{_ON}noise_is_replayed_or_samples_are_not_compared",),
    ),
    Fault(
        "every decision is made on the first observation",
        _PARITY,
        "obs = trace.observation(step, spec.tasks)",
        "obs = trace.observation(0, spec.tasks)",
        (f"{_ON}our_own_trace_does_not_differ",),
    ),
    Fault(
        "observations outside their range pass",
        _PARITY,
        "            one.fail(step, str(error))",
        "            one.reason = str(error)",
        (f"{_ON}what_the_policy_cannot_read_is_said",),
    ),
    Fault(
        "actions after the end are replayed",
        _TRACE,
        "np.where(on_host(decision.step.valid)[..., None], executed, np.float32(np.nan))",
        "np.where(on_host(decision.step.valid)[..., None], executed, np.float32(np.nan))[:, :1]",
        (f"{_ON}our_own_trace_does_not_differ",),
    ),
    Fault(
        "idle environments are recorded",
        _TRACE,
        "for env_id in np.flatnonzero(running).tolist():",
        "for env_id in range(len(running)):",
        (f"{_ON}our_own_trace_does_not_differ",),
    ),
    Fault(
        "upside down is mirrored",
        _HINTS,
        '"theirs is upside down": lambda image: image[:, ::-1],',
        '"theirs is upside down": lambda image: image[:, :, ::-1],',
        (f"{_ON}pictures_are_explained",),
    ),
    Fault(
        "the order of entries is inverted",
        _HINTS,
        "theirs[:, j] - ours[:, i]",
        "ours[:, j] - theirs[:, i]",
        (f"{_ON}vectors_are_explained",),
    ),
    Fault(
        "recorded noise is drawn again and again",
        "vla_rl/policies/noise.py",
        "taken, self._values = self._values[:count], self._values[count:]",
        "taken = self._values[:1].expand(count)",
        (f"{_ON}noise_is_replayed_or_samples_are_not_compared",),
    ),
)
