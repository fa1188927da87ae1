"""``python -m tests.recipes.robots.openpi_process``: a policy server of somebody else's, without vla-rl's server.

It prints its address.  Its chunks move a toy arm up from where it is; after SIGUSR1 they are no numbers.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from tests.robot_drivers.arms import DT, SPEED
from vla_rl.serving import openpi

ACTIONS = 16  # of a chunk


def joints(request: Any) -> dict[str, Any]:
    """The layout that the client is given for this server."""
    return {"joint_position": request.state[:1], "gripper_position": request.state[1:], "prompt": request.instruction}


def main() -> None:
    """Serve until it is killed."""
    nonsense: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: nonsense.append(number))

    def answer(connection: Any) -> None:
        with suppress(ConnectionClosed):
            connection.send(openpi.pack({"robot": "toy"}))
            for data in connection:
                request = openpi.unpack(data)
                assert request["prompt"] == "lift" and set(request) == {"joint_position", "gripper_position", "prompt"}
                here = np.concatenate([request["joint_position"], request["gripper_position"]])
                up = here + np.arange(1, ACTIONS + 1)[:, None] * [SPEED * DT, 0.0]
                connection.send(openpi.pack({"actions": np.full_like(up, np.nan) if nonsense else up}))

    with serve(answer, "127.0.0.1", 0, compression=None) as server:
        print(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
