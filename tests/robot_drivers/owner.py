"""``python -m tests.robot_drivers.owner FILE LEADER``: owns a control process, until it is killed."""

from __future__ import annotations

import sys

from robot_drivers.runtime import ControlProcess, Runtime
from tests.robot_drivers.file_arm import SPEED, config
from tests.robot_drivers.toy_arm import observation, towards

FAR = 2.0


def main(path: str, leader: str) -> None:
    """Print the ids of the control process and of the teleoperator, and play."""
    with ControlProcess(config(path, leader == "leader")) as control:
        print(control.pid, control.teleoperator_pid, flush=True)
        decide = towards([FAR, 0.5], 400, SPEED)
        with Runtime(control, decide, observation) as runtime:
            for _ in runtime.episode(1, 1 << 30):
                pass


if __name__ == "__main__":
    main(*sys.argv[1:])
