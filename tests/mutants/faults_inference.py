"""Faults in how a flow VLA runs when it acts."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FILE, _FLOW = "vla_rl/policies/vla/inference.py", "vla_rl/policies/vla/flow_vla.py"
_ON = "tests/policies/vla/test_inference.py::"
_RIGHT = f"{_ON}test_what_is_recorded_once_is_right_for_every_observation_step_and_batch"
_COPY = f"{_ON}test_a_copy_of_a_policy_runs_its_own_network"

FAULTS = (
    Fault(
        "a graph decides on the first observation for ever",
        _FILE,
        "if known is not item or version != item._version:",
        "if known is None:",
        (_RIGHT,),
    ),
    Fault(
        "a graph overlooks inputs that changed in place",
        _FILE,
        "if known is not item or version != item._version:",
        "if known is not item:",
        (f"{_ON}test_an_input_that_changes_in_place_is_copied_again",),
    ),
    Fault(
        "a graph has the time of its first denoising step in all of them",
        _FILE,
        'self._inner.velocity(rest, given["x"], given["t"])',
        'self._inner.velocity(rest, given["x"], t)',
        (_RIGHT,),
    ),
    Fault(
        "a graph of one batch size serves all",
        _FILE,
        "(key, item.shape, item.dtype, item.device)",
        "(key, item.dtype, item.device)",
        (_RIGHT,),
    ),
    Fault(
        "what a graph returned changes at the next observation",
        _FILE,
        "return {name: item.clone() for name, item in self._outputs.items()}",
        "return dict(self._outputs)",
        (f"{_ON}test_what_was_returned_stays_when_the_next_observation_comes",),
    ),
    Fault(
        "a graph reads weights where they no longer are",
        _FILE,
        "if weights != self._weights:",
        "if not self._weights:",
        (f"{_ON}test_weights_that_lie_elsewhere_are_recorded_again_and_those_that_learn_are_not",),
    ),
    Fault(
        "graphs of old batch sizes are never thrown away",
        _FILE,
        "del self._recorded[same[0]]",
        "pass",
        (f"{_ON}test_old_shapes_make_room_for_new_ones",),
    ),
    Fault(
        "the copy of a policy runs the network of the first",
        _FILE,
        "return Graphs(copy.deepcopy(self._network, memo), copy.deepcopy(self._inner, memo), self._record)",
        "return Graphs(self._network, self._inner, self._record)",
        (_COPY,),
    ),
    Fault(
        "the copy of a compiled policy runs the network of the first",
        _FILE,
        "return CompiledOperations(copy.deepcopy(self.network, memo), self._backend)",
        "return CompiledOperations(self.network, self._backend)",
        (_COPY,),
    ),
    Fault(
        "acting overlooks how the network is to run",
        _FLOW,
        "return self._field(features, self._acting)",
        "return self._field(features, self.network)  # acting",
        (f"{_ON}test_weights_that_lie_elsewhere_are_recorded_again_and_those_that_learn_are_not",),
    ),
    Fault(
        "SmolVLA's vision tower makes a mask on the host, which no graph can read",
        "vla_rl/policies/smolvla/network.py",
        "edges = torch.arange(1 / side, 1.0, 1 / side, device=pixels.device)",
        'edges = torch.arange(1 / side, 1.0, 1 / side, device="cpu").to(pixels.device)',
        (f"{_ON}test_nothing_that_is_recorded_waits_for_the_host",),
    ),
    Fault(
        "two sides that decide differently are timed",
        "tests/benchmarks/vla_inference.py",
        "assert gap <= 1e-4",
        "assert gap <= 1e4",
        ("tests/test_benchmarks.py::test_two_sides_that_decide_differently_are_not_compared",),
    ),
    Fault(
        "a part of the GPU script that fails ends it",
        "tests/benchmarks/gpu.py",
        "except Exception as error:",
        "except OverBudget as error:",
        ("tests/test_benchmarks.py::test_a_part_that_fails_or_is_too_slow_is_reported_and_the_others_go_on",),
    ),
)
