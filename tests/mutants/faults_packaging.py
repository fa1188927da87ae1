"""Faults in the wheel and in the check for foreign packages with the names of ours."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PACKAGES, _PROJECT = "vla_rl/contract/packages.py", "pyproject.toml"
_ON_WHEEL, _ON_FOREIGN = "tests/packaging/test_wheel.py::", "tests/packaging/test_foreign_packages.py::"
_CONTENTS = f"{_ON_WHEEL}test_it_holds_four_packages_the_configs_the_simulators_pins_and_nothing_else"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "any package of that name will do",
        _PACKAGES,
        "beside = found.parent.parent.resolve() == _HOME",
        "beside = True",
        (f"{_ON_FOREIGN}test_the_distribution_it_came_with_is_named",),
    ),
    Fault(
        "what was installed over ours is not noticed",
        _PACKAGES,
        "if not beside or not found.is_file() or MARK not in found.read_bytes():",
        "if not beside:",
        (f"{_ON_FOREIGN}test_the_distribution_it_came_with_is_named",),
    ),
    Fault(
        "a folder without code is not noticed",
        _PACKAGES,
        "return next(map(Path, spec.submodule_search_locations or ()), None)",
        "return None",
        (f"{_ON_FOREIGN}test_a_folder_without_code_is_named_only_where_python_would_take_it",),
    ),
    Fault(
        "the command line does not check the packages",
        "vla_rl/cli/main.py",
        "        check_packages()",
        "        check_packages(())",
        (f"{_ON_FOREIGN}test_another_one_that_comes_first_is_named",),
    ),
    Fault(
        "a reader that leaves is a crash",
        "vla_rl/cli/main.py",
        "if isinstance(error, BrokenPipeError) and _nobody_reads():",
        "if False:",
        ("tests/cli/test_main.py::test_a_reader_that_leaves_ends_it_silently",),
    ),
    Fault(
        "whatever pipe breaks, it ends silently",
        "vla_rl/cli/main.py",
        "if isinstance(error, BrokenPipeError) and _nobody_reads():",
        "if isinstance(error, BrokenPipeError):",
        ("tests/cli/test_main.py::test_another_pipe_that_breaks_is_an_error",),
    ),
    Fault(
        "what nobody has foreseen ends with a traceback",
        "vla_rl/cli/main.py",
        "if _TRACEBACK in os.environ:",
        "if True:",
        ("tests/cli/test_main.py::test_what_nobody_has_foreseen_ends_with_one_sentence",),
    ),
    Fault("the wheel has no configs", _PROJECT, '    "vla_rl._configs",', "", (_CONTENTS,)),
    Fault(
        "the contract needs a renderer",
        "vla_rl/contract/check.py",
        "import numpy as np",
        "import numpy as np, mujoco",
        (f"{_ON_WHEEL}test_with_the_base_dependencies_alone_it_imports_and_inspects",),
    ),
    Fault(
        "a base dependency is missing",
        _PROJECT,
        '"tyro>=0.9.1", ',
        "",
        (f"{_ON_WHEEL}test_it_says_what_it_needs",),
    ),
)
