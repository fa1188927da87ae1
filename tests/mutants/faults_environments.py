"""Faults in what environments declare (success, what belongs to a task) and in how foreign ones are checked."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RUN, _CHECK, _GYM = "vla_rl/evaluation/run.py", "vla_rl/contract/check.py", "sims/gym.py"

_SUCCESS = (
    Fault(
        "without success the score is a success rate of 0 %",
        _RUN,
        "has_success=self.driver.env.spec.success is not None",
        "has_success=True",
        ("tests/evaluation/test_run.py::test_without_success_the_score_is_the_mean_return",),
    ),
    Fault(
        "Gymnasium's tasks claim to know success",
        _GYM,
        "success=None,",
        'success="once",',
        ("tests/sims/test_gym.py::test_an_environment_without_success_never_reports_one",),
    ),
    Fault(
        "an environment without success may report one",
        _CHECK,
        "if spec.success is None:",
        'if spec.success == "none":',
        ("tests/sims/test_gym.py::test_an_environment_without_success_never_reports_one",),
    ),
    Fault(
        "a reward model's success does not exist where the environment has none",
        "vla_rl/rewards/env.py",
        'success=env.spec.success or "once")',
        "success=env.spec.success)",
        ("tests/rewards/test_env.py::test_a_reward_model_brings_success_to_an_environment_that_has_none",),
    ),
)

FAULTS = (*_SUCCESS,)
