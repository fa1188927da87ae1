"""openpi's DROID keys, of an environment with two cameras and a state of seven joints and a gripper."""

from typing import Any

from vla_rl.serving.observation import SingleObservation


def request(obs: SingleObservation) -> dict[str, Any]:
    """``ws://127.0.0.1:8000?layout=droid_layout:request``."""
    return {
        "observation/exterior_image_1_left": obs.images["exterior"],
        "observation/wrist_image_left": obs.images["wrist"],
        "observation/joint_position": obs.state[:7],
        "observation/gripper_position": obs.state[7:],
        "prompt": obs.instruction,
    }
