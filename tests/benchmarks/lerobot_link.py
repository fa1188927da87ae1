"""What the link to a LeRobot policy costs: ``python -m tests.benchmarks.lerobot_link`` prints milliseconds a decision.

The policy in the process is one whose own work is next to nothing, so what is left is the link: both sides' messages,
shared memory, and each environment's own memory.  It is measured beside the same calls without a process.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sims import catalog
from tests.policies.lerobot.small import STATE
from tests.policies.lerobot.test_policy import ElsewherePolicy, SmallPolicy
from vla_rl.contract.env import ArraySpec

_DECISIONS = 200
SHAPES = {"state": (), "one camera of 64 x 64": ((64, 64, 3),), "two cameras of 224 x 224": ((224, 224, 3),) * 2}


def main() -> None:
    for what, shapes in SHAPES.items():
        images = {f"camera{i}": ArraySpec(shape, "uint8", 0, 255) for i, shape in enumerate(shapes)}
        spec = replace(catalog.spec_of("point_mass"), images=images)
        inputs = {STATE: {"type": "STATE", "shape": [2]}}
        inputs |= {
            f"observation.images.{name}": {"type": "VISUAL", "shape": [3, *item.shape[:2]]}
            for name, item in images.items()
        }
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps({"type": "Chunked", "inputs": inputs}))
            for num_envs in (1, 16):
                for kind in (ElsewherePolicy, SmallPolicy):
                    with closing(kind(spec, Path(folder))) as policy:
                        print(f"{what}, {num_envs} environments, {kind.__name__}: {_median(policy, num_envs):.2f} ms")


def _median(policy: SmallPolicy, num_envs: int) -> float:
    """The median of a decision, milliseconds."""
    features, state = policy.encode(policy.spec.zeros(num_envs)), policy.initial_state(num_envs)
    generator, taken = torch.Generator(), []
    for _ in range(_DECISIONS):
        start = time.perf_counter()
        _, state = policy.act(features, state, "eval", generator)
        taken.append(time.perf_counter() - start)
    return 1000 * float(np.median(taken))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
