"""Data of others that name code, programs and files."""

from tests.mutants.fault import Fault

_TRUST = "vla_rl/contract/trust.py"
_HOSTILE = "tests/cli/test_hostile.py"
_RUNS = f"{_HOSTILE}::test_a_hostile_run_is_refused"
_CHECKPOINTS = f"{_HOSTILE}::test_a_hostile_checkpoint_is_refused"

FAULTS = (
    Fault(
        "what data name is loaded whoever wrote them",
        _TRUST,
        "        if origins is None:",
        "        if False:",
        (_CHECKPOINTS, _RUNS),
    ),
    Fault(
        "an environment that starts programs counts as harmless",
        _TRUST,
        '    if config.get("name") not in ENVIRONMENTS:',
        '    if ":" in str(config.get("name")):',
        (_RUNS,),
    ),
    Fault(
        "a config file of others is run",
        "vla_rl/recipes/config_files.py",
        "            require_own(read_bytes(kept),",
        "            print(read_bytes(kept),",
        (_RUNS,),
    ),
    Fault(
        "a module of the same name elsewhere is taken for the user's",
        _TRUST,
        "            if now != origins.get(name):",
        "            if False:",
        (f"{_HOSTILE}::test_another_module_of_the_same_name_is_not_the_users",),
    ),
    Fault(
        "--trust is forgotten",
        _TRUST,
        "        mark(data)  # asked once",
        "        pass",
        (f"{_HOSTILE}::test_trust_is_asked_for_once",),
    ),
)
