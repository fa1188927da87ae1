"""Faults in the configs of downloaded models and in serving such a folder."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RECIPES, _ON = "vla_rl/recipes/vla.py", "tests/recipes/test_vla_configs.py::"
_BUILT = f"{_ON}test_every_config_is_built_for_every_environment"

FAULTS = (
    Fault(
        "without a downloaded folder another policy imitates",
        _RECIPES,
        "ImitateDataset(new=Downloaded(family), ",
        "ImitateDataset(",
        (f"{_ON}test_without_a_folder_it_says_what_to_name",),
    ),
    Fault(
        "the configs of downloaded models have options of one environment",
        _RECIPES,
        'LIFT = EnvConfig("lift")',
        'LIFT = EnvConfig("lift", training_options={"deadline": 25})',
        (_BUILT,),
    ),
    Fault(
        "RL opens a downloaded folder without the config's options",
        _RECIPES,
        "env=LIFT, evaluation=_EVALUATION, vla=options)",
        "env=LIFT, evaluation=_EVALUATION)",
        (_BUILT,),
    ),
    Fault(
        "imitation opens a downloaded folder without the config's options",
        _RECIPES,
        "imitation=study, vla=options)",
        "imitation=study)",
        (f"{_ON}test_a_recorded_dataset_is_imitated",),
    ),
    Fault(
        "a downloaded folder is served without the options that were given",
        "vla_rl/cli/serve_policy.py",
        "load_policy(checkpoint, spec, config.vla)",
        "load_policy(checkpoint, spec)",
        ("tests/cli/test_serve_policy.py::test_a_downloaded_folder_is_served_for_the_environment_that_is_named",),
    ),
)
