"""How long a policy takes to decide for an arm, before the arm is driven."""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np

from robot_drivers.budget import PolicyTiming
from robot_drivers.cameras.camera import open_camera
from robot_drivers.config import RobotConfig
from robot_drivers.decisions import Query
from robot_drivers.env import robot_env_spec
from robot_drivers.simulated import SimulatedRobot
from vla_rl.contract.env import Observation
from vla_rl.contract.load import load
from vla_rl.contract.spec import EnvSpec
from vla_rl.recipes.robots.decide import PolicyDecider, open_policy
from vla_rl.recipes.robots.session import MAX_CHUNK

_DECISIONS = 20


def measure_policy(config: RobotConfig, name: str, decisions: int = _DECISIONS) -> PolicyTiming:
    """Time ``decisions`` of the policy ``name`` on dark pictures of the declared sizes; the arm is not needed.

    The first decision is not counted: models are compiled there.  Raises UserError for a policy that does not fit the
    arm, and for a server that does not answer.
    """
    import torch

    spec = declared_spec(config)
    obs = _dark(spec)
    with closing(PolicyDecider(open_policy(name, spec), torch.Generator().manual_seed(1))) as decide:
        horizon = len(decide(Query(obs, 0, None, 1)).chunk)
        took = []
        for _ in range(decisions):
            began = time.perf_counter()
            decide(Query(obs, 0, None, 1))
            took.append(time.perf_counter() - began)
    return PolicyTiming(np.array(took), horizon)


def declared_spec(config: RobotConfig) -> EnvSpec:
    """What a policy for the robot of ``config`` is made for, by what its parts declare; nothing is connected."""
    driver = config.open()
    if load(config.driver.name) is SimulatedRobot:
        spec: EnvSpec = config.driver.make().env_spec
        return spec
    declared = {name: open_camera(part.name, part.options, name).spec for name, part in config.cameras.items()}
    sizes = {name: (camera.height, camera.width) for name, camera in declared.items()}
    steps = round(config.seconds * driver.spec.control_hz)
    return robot_env_spec(driver.spec, sizes, config.tasks, steps, min(steps, MAX_CHUNK))


def _dark(spec: EnvSpec) -> Observation:
    """Dark pictures, and joints in the middle of their ranges."""
    low, high = (np.asarray(getattr(spec.state, end), np.float32) for end in ("low", "high"))
    state = np.broadcast_to((low + high) / 2, spec.state.shape)[None].astype(np.float32)
    images = {name: np.zeros((1, *item.shape), np.uint8) for name, item in spec.images.items()}
    return Observation(images, state, np.zeros(1, np.int64), np.zeros(1, np.int64))
