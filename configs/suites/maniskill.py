"""ManiSkill's tasks that papers on vision-language-action models report (``vla-rl sims install maniskill``)."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask

LIMITS = {"PickCube-v1": 50, "StackCube-v1": 50, "PushT-v1": 100, "PegInsertionSide-v1": 100}
"""ManiSkill's own, in actions."""


def maniskill() -> Suite:
    """Four tasks from pixels, by changes of the gripper's pose where the robot has one."""
    return Suite("maniskill", 1, tuple(_task(name) for name in LIMITS))


def _task(name: str) -> SuiteTask:
    control = {} if name == "PushT-v1" else {"control_mode": "pd_ee_delta_pose"}
    options = {"task": name, "obs": "rgb", "time_limit": LIMITS[name], **control}
    return SuiteTask(name, EnvConfig("maniskill", options), LIMITS[name])
