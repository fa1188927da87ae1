"""``python -m tests.experience.sharing_learner FOLDER SEED ROLLOUTS DIES_AT``: one of the learners that share a folder.

It plays the counting environment and says in one JSON line each what it publishes and what it read, by the seed and
the step of each column's first decision.  At publication ``DIES_AT`` (0: never) it is killed in the middle of a write.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from sims.catalog import make
from tests.auditing import AuditingPolicy
from tests.patience import wait_until
from vla_rl.contract.batch import Rollout
from vla_rl.contract.wire import framed
from vla_rl.experience import board as module
from vla_rl.experience.board import Board, SharedSource
from vla_rl.experience.rollout import RolloutSource, SeedStream

COLUMNS, DECISIONS, HORIZON = 2, 3, 4


def main(folder: str, seed: int, rollouts: int, dies_at: int) -> None:
    board, policy = Board(folder, "counting", keep=3), AuditingPolicy(HORIZON)
    env, seeds = make("counting", num_envs=COLUMNS), SeedStream(100_000 * seed, 100_000 * (seed + 1))
    source = SharedSource(RolloutSource(env, policy, DECISIONS, seeds, torch.Generator()), board, policy, 2)
    publish = board.publish

    def noted(rollout: Rollout) -> None:
        say("published", rollout, 0)
        publish(rollout)

    board.publish = noted  # type: ignore[method-assign]
    for number in range(1, rollouts + 1):
        if number == dies_at:
            module.write_message = torn
        rollout = source.next()
        for column in range(COLUMNS, rollout.reward.shape[1], COLUMNS):
            say("read", rollout, column)
        if number == 1:  # both have begun, so what follows is played side by side
            wait_until(lambda: len({path.name[:12] for path in Path(folder).glob("*.rollout")}) == 2)


def say(what: str, rollout: Rollout, column: int) -> None:
    found = rollout.features["counters"][:, column : column + COLUMNS].tolist()
    print(json.dumps([what, found]), flush=True)


def torn(file, message) -> None:
    """Half of ``message`` is on the disk when the process dies."""
    file.write(framed(message)[:700])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
