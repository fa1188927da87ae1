"""A new arm, camera or teleoperator is one file in a folder of one's own, known by its name: the how-to's own code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.test_layout import ROOT

SCRIPTS = {
    "own_arm": """
import numpy as np
from robot_drivers.driver import open_driver
from robot_drivers.limits import Limits
arm = open_driver("own_arm:OwnArm", {"address": "here"})
assert not arm.is_connected and arm.spec.names == ("pan.pos", "lift.pos")
Limits.of(arm.spec)
arm.connect()
sent = arm.command(np.array([9.0, 0.5]))
print(sent.tolist(), arm.observe().position.tolist())
arm.disconnect()
""",
    "own_camera": """
from robot_drivers.cameras.camera import open_camera
camera = open_camera("own_camera:OwnCamera", {"fps": 500.0}, "mine")
camera.connect()
first = camera.read().image[0, 0, 0]
while camera.read().image[0, 0, 0] == first:
    pass
print(camera.read().image.shape, camera.error)
camera.disconnect()
""",
    "own_teleoperator": """
import sys
from vla_rl.contract.child import Child
child = Child([sys.executable, "-m", "robot_drivers.teleop.process"], name="control")
child.send({"teleoperator": "own_teleoperator:OwnTeleoperator", "options": {"joints": 2}})
print(child.receive()["velocity"].tolist(), child.receive()["engaged"])
child.kill()
child.close()
""",
}
SAID = {
    "own_arm": "[2.0, 0.5] [2.0, 0.5]",
    "own_camera": "(24, 32, 3)",
    "own_teleoperator": "[0.2, 0.0] True",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_file_outside_the_repository_is_enough(name, tmp_path):
    shutil.copy(ROOT / "docs" / "examples" / f"{name}.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    check = f"{SCRIPTS[name]}\nimport sys\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SAID[name]
