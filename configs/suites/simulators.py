"""Suites of other simulators, each in an installation of its own (``vla-rl sims install NAME``)."""

from sims.libero import TIME_LIMITS
from sims.metaworld import MT10, TASKS
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask

STATES = 50  # initial states of a task of LIBERO; the test seeds begin at a multiple of it
LIMITS = {"PickCube-v1": 50, "StackCube-v1": 50, "PushT-v1": 100, "PegInsertionSide-v1": 100}  # ManiSkill's own
HORIZON = 500  # Meta-World's own
ROBOMIMIC_HORIZON = 400  # for the tasks of robosuite that robomimic has too


def libero() -> Suite:
    """LIBERO's four suites of ten tasks that are reported together, every task from its fifty initial states.

    The horizons are those that the adapter gives each suite by default, as OpenVLA's evaluation has them.
    """
    return _libero("libero", "libero_spatial", "libero_object", "libero_goal", "libero_10")


def libero_spatial() -> Suite:
    """The same objects in other places."""
    return _libero("libero-spatial", "libero_spatial")


def libero_object() -> Suite:
    """Other objects in the same places."""
    return _libero("libero-object", "libero_object")


def libero_goal() -> Suite:
    """The same scene with other goals."""
    return _libero("libero-goal", "libero_goal")


def libero_long() -> Suite:
    """Ten tasks of several parts."""
    return _libero("libero-long", "libero_10")


def maniskill() -> Suite:
    """Four of ManiSkill's tasks, from pixels, by changes of the gripper's pose where the robot has one."""
    tasks = []
    for name, limit in LIMITS.items():
        control = {} if name == "PushT-v1" else {"control_mode": "pd_ee_delta_pose"}
        options = {"task": name, "obs": "rgb", "time_limit": limit, **control}
        tasks.append(SuiteTask(name, EnvConfig("maniskill", options), limit))
    return Suite("maniskill", 1, tuple(tasks))


def metaworld_mt10() -> Suite:
    """Ten tasks of Meta-World, by its own horizon and rule of success."""
    return Suite("metaworld-mt10", 1, tuple(SuiteTask(task, _metaworld(task), HORIZON) for task in MT10))


def metaworld_mt50() -> Suite:
    """All fifty."""
    return Suite("metaworld-mt50", 1, tuple(SuiteTask(task, _metaworld(task), HORIZON) for task in TASKS))


def robosuite() -> Suite:
    """Five of robosuite's manipulation tasks with a Panda arm."""
    limit, names = ROBOMIMIC_HORIZON, ("Lift", "Stack", "PickPlaceCan", "NutAssemblySquare", "Door")
    envs = {name: EnvConfig("robosuite", {"task": name, "time_limit": limit}) for name in names}
    return Suite("robosuite", 1, tuple(SuiteTask(name, env, limit) for name, env in envs.items()))


def genesis() -> Suite:
    """The scenes, actions, states and cameras of MuJoCo's lift in Genesis: a policy of that plays here as it is."""
    return Suite("genesis", 1, (SuiteTask("lift", EnvConfig("genesis", {"workers": 1}), 60),))


def _libero(name: str, *suites: str) -> Suite:
    tasks = [
        SuiteTask(f"{suite}-{i}", EnvConfig("libero", {"suite": suite, "tasks": [i]}), TIME_LIMITS[suite])
        for suite in suites
        for i in range(10)
    ]
    return Suite(name, 1, tuple(tasks), episodes=STATES)


def _metaworld(task: str) -> EnvConfig:
    return EnvConfig("metaworld", {"tasks": task})
