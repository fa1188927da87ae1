"""LeRobot's own way from actor to learner as a process; ``ingest_lerobot.py`` starts it with LeRobot's packages.

``python lerobot_transitions.py STEPS LENGTH`` makes STEPS steps of the pictures in ``steps.npz`` (a path on its first
line of input); for every further line it sends them through ``SendTransitions`` in episodes of LENGTH (by "packed" as
they were saved at the beginning), waits until its learner has them as tensors, and answers with a line.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import torch
from lerobot.transport import services_pb2 as pb
from lerobot.transport import services_pb2_grpc
from lerobot.transport.utils import (
    bytes_to_transitions,
    grpc_channel_options,
    receive_bytes_in_chunks,
    send_bytes_in_chunks,
    transitions_to_bytes,
)

_ANSWERS = 4 << 20


class Learner(services_pb2_grpc.LearnerServiceServicer):
    """As LeRobot's ``LearnerService``, whose module needs more of LeRobot than is installed here."""

    def __init__(self) -> None:
        self.received: queue.Queue[bytes] = queue.Queue()

    def SendTransitions(self, requests: Any, context: Any) -> Any:
        receive_bytes_in_chunks(requests, self.received, threading.Event(), log_prefix="")
        return pb.Empty()


def episodes(path: str, steps: int, length: int) -> list[list[dict[str, Any]]]:
    """Transitions as LeRobot's actor makes them: what follows a step is what the next one begins with."""
    given = np.load(path)
    pictures = {name: torch.from_numpy(given[name]).permute(0, 3, 1, 2).float() / 255 for name in ("front", "wrist")}
    state, action = torch.from_numpy(given["state"]), torch.from_numpy(given["action"])
    count = len(state)

    def observe(i: int) -> dict[str, torch.Tensor]:
        i %= count
        named = {f"observation.images.{name}": pictures[name][i : i + 1].clone() for name in pictures}
        return {"observation.state": state[i : i + 1].clone(), **named}

    made = []
    for start in range(0, steps, length):
        observations = [observe(start + i) for i in range(length + 1)]
        made.append(
            [
                {
                    "state": observations[i],
                    "action": action[(start + i) % count].clone()[None],
                    "reward": 0.0,
                    "next_state": observations[i + 1],
                    "done": i == length - 1,
                    "truncated": False,
                    "complementary_info": {"is_intervention": False},
                }
                for i in range(length)
            ]
        )
    return made


def main(steps: int, length: int) -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    learner = Learner()
    server = grpc.server(ThreadPoolExecutor(3), options=[("grpc.max_receive_message_length", _ANSWERS)])
    services_pb2_grpc.add_LearnerServiceServicer_to_server(learner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = episodes(sys.stdin.readline().strip(), steps, length)
    with grpc.insecure_channel(f"127.0.0.1:{port}", grpc_channel_options()) as channel:
        actor = services_pb2_grpc.LearnerServiceStub(channel)

        packed = [transitions_to_bytes(episode) for episode in made]

        def stream(word: str) -> Iterator[Any]:
            for i, episode in enumerate(made):
                data = packed[i] if word == "packed" else transitions_to_bytes(episode)
                yield from send_bytes_in_chunks(data, pb.Transition)

        print("ready", flush=True)
        for line in sys.stdin:
            sending = threading.Thread(target=actor.SendTransitions, args=(stream(line.strip()),))
            sending.start()
            seen = sum(len(bytes_to_transitions(learner.received.get())) for _ in made)
            sending.join()
            assert seen == steps
            print("done", flush=True)
    server.stop(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
