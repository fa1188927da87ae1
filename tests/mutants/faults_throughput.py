"""Faults in the predicted throughput and in the figures of GPUs."""

from __future__ import annotations

from tests.mutants.fault import Fault

_MODEL, _TABLES = "vla_rl/recipes/throughput.py", "vla_rl/recipes/throughput_tables.py"
_HARDWARE = "vla_rl/recipes/hardware.py"
_ON = "tests/recipes/test_throughput.py::test_"
_BY_HAND = (f"{_ON}an_iteration_by_hand",)
_MEASURED = (f"{_ON}what_was_measured_is_in_sum_over_all_processes_without_validation_and_the_first_iterations",)
_FACTOR = (f"{_ON}the_policy_takes_what_its_flops_or_its_operations_take",)

FAULTS = (
    Fault(
        "collecting ahead takes as long as in turn",
        _MODEL,
        "max(collect + weights, learn) if",
        "collect + weights + learn if",
        _BY_HAND,
    ),
    Fault("collectors share no simulation", _MODEL, "measured.simulate / processes", "measured.simulate", _BY_HAND),
    Fault("a GPU infers faster with more collectors", _MODEL, "plan.ranks if plan.shared_gpu else", "", _BY_HAND),
    Fault("gradients are summed for nothing", _MODEL, " + traffic.optimizer_steps * ring", "", _BY_HAND),
    Fault("one rank sends its gradients", _MODEL, "2 * (plan.ranks - 1) / plan.ranks", "2", _BY_HAND),
    Fault("cores have no end", _MODEL, "max(both, least)", "both", _BY_HAND),
    Fault("collectors are measured as one", _MODEL, '("collector", collectors * ranks)', '("collector", 1)', _MEASURED),
    Fault("validation is slow learning", _MODEL, ' - mean("time/validate_s")', "", _MEASURED),
    Fault("the first iterations count", _MODEL, "_WARM = 2", "_WARM = 0", _MEASURED),
    Fault(
        "launching takes no time",
        _TABLES,
        "max(computing, operations * LAUNCH * hardware.count)",
        "computing",
        _FACTOR,
    ),
    Fault(
        "a link is as fast in one direction as in both",
        _HARDWARE,
        "self.gpu.link * 1e9 / 2",
        "self.gpu.link * 1e9",
        (f"{_ON}hardware_is_read_as_people_write_it",),
    ),
    Fault(
        "no GPUs are some hardware",
        _HARDWARE,
        "if found is None or count < 1:",
        "if found is None:",
        (f"{_ON}other_hardware_is_refused_in_one_sentence",),
    ),
)
