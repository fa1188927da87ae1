"""Faults in the script of `make gpu`, and in what is skipped without a GPU."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SCRIPT, _ON = "tests/gpu.py", "tests/test_gpu.py::test_"
_SMALL = (f"{_ON}without_a_gpu_it_runs_small_and_says_so",)
_LINE = (f"{_ON}what_fails_is_slow_or_is_missing_is_a_line_and_the_others_go_on",)
_SKIPPED = (f"{_ON}the_tests_that_need_a_gpu_are_skipped_visibly_and_counted",)

FAULTS = (
    Fault(
        "small numbers are shown as large ones",
        _SCRIPT,
        '        small = "There is',
        '        small = "" and "There is',
        _SMALL,
    ),
    Fault("the script is large without a GPU", _SCRIPT, 'if device != "cpu" else', 'if device == "cpu" else', _SMALL),
    Fault(
        "a part that fails ends the script",
        _SCRIPT,
        "except Exception as error:",
        "except ZeroDivisionError as error:",
        _LINE,
    ),
    Fault("a part may take for ever", _SCRIPT, "with at_most(plan.seconds):", "with at_most(9e5):", _LINE),
    Fault(
        "failed tests count as passed",
        _SCRIPT,
        "len(cases) - len(failed) - len(skipped)",
        "len(cases) - len(skipped)",
        (f"{_ON}tests_that_fail_are_lines_of_their_own",),
    ),
    Fault(
        "what needs a GPU runs without one",
        "tests/conftest.py",
        "if not torch.cuda.is_available():",
        "if False:",
        _SKIPPED,
    ),
    Fault("skipped tests are not counted", _SCRIPT, 'case.find("skipped") is not None', "False", _SKIPPED),
    Fault(
        "a missing simulator is tried",
        _SCRIPT,
        "if importlib.util.find_spec(self.package) is not None:",
        "if True:",
        (f"{_ON}a_simulator_that_is_not_installed_says_what_to_install",),
    ),
    Fault(
        "the run does not tell where its time went",
        _SCRIPT,
        '"steps/s", spent.shares())',
        '"steps/s")',
        (f"{_ON}a_run_of_ppo_tells_its_speed_its_return_and_where_the_time_went",),
    ),
)
