"""Learners that take turns, each in a process of its own with one thread, until each has reached the goal.

A drift of the machine affects all of them, and none has another's memory, threads or settings of torch.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sims.catalog import make
from vla_rl.contract.errors import UserError
from vla_rl.recipes.improve import Improve


@dataclass(frozen=True)
class Row:
    """One learner with one seed; ``seconds`` of the wall and of its process's processor time are of training only.

    ``score`` is the last mean return, and ``reached`` whether it is the goal; a learner that fails has what it spent.
    """

    task: str
    peer: str
    seed: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    steps: int = 0
    score: float = -math.inf
    reached: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        """What is measured once."""
        return self.task, self.peer, self.seed

    def after(self, seconds: float, cpu_seconds: float, steps: int, score: float, goal: float) -> Row:
        """The row when a turn of so many ``seconds`` and ``steps`` has ended with ``score``."""
        spent = self.seconds + seconds, self.cpu_seconds + cpu_seconds, self.steps + steps
        return Row(*self.key, *spent, score, score > goal)


@dataclass(frozen=True)
class Task:
    """What is learnt: the environment, rollouts and network sizes of ``recipe``, and where it ends."""

    name: str
    recipe: Improve
    goal: float  # mean return
    longest: int = 200  # iterations after which a learner has failed
    turn: int = 5  # iterations
    episodes: int = 8  # of an evaluation, which is not timed

    @property
    def steps(self) -> int:
        """Control steps of an iteration."""
        return self.recipe.rl.experience.num_envs * self.recipe.rl.experience.decisions

    def ends(self, row: Row) -> bool:
        """Whether ``row`` has reached the goal, or will not."""
        return row.reached or row.steps >= self.longest * self.steps


class Racer:
    """The process of one learner; it works only inside :meth:`turn`."""

    def __init__(self, task: Task, peer: str, seed: int, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, task, peer, seed, str(log)), daemon=True)
        self._process.start()
        other.close()
        self._task, self._log = task, log
        self.row = Row(task.name, peer, seed)

    def turn(self) -> Row:
        """Train for some iterations, then evaluate; what has come of it so far.

        Raises UserError when the process has ended.
        """
        try:
            self._link.send("turn")
            seconds, cpu_seconds, score = self._link.recv()
        except (EOFError, OSError) as error:
            raise UserError(
                f"the process of {self.row.peer!r} with seed {self.row.seed} ended, so its cell was not measured; see "
                f"the end of {self._log}, and run the same command again."
            ) from error
        task = self._task
        self.row = self.row.after(seconds, cpu_seconds, task.turn * task.steps, score, task.goal)
        return self.row

    @property
    def finished(self) -> bool:
        """Whether the goal is reached, or will not be."""
        return self._task.ends(self.row)

    def close(self) -> None:
        """End the process."""
        self._link.close()
        self._process.join(10)
        self._process.kill()


def _serve(link: Connection, task: Task, peer: str, seed: int, log: str) -> None:
    """Work whenever asked, until the other side closes; what is printed goes to ``log``."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    import torch

    from tests.benchmarks.peers.sides import PEERS
    from tests.benchmarks.peers.state_ppo import mean_return

    torch.set_num_threads(1)
    side = PEERS[peer](task.recipe, seed)
    with closing(make("gym", num_envs=task.episodes, **task.recipe.env.options)) as held:
        while _asked(link):
            start, busy = time.perf_counter(), time.process_time()
            side.advance(task.turn)
            spent = time.perf_counter() - start, time.process_time() - busy
            link.send((*spent, mean_return(side.act, held)))


def _asked(link: Connection) -> bool:
    try:
        link.recv()
    except EOFError:
        return False
    return True


def race(task: Task, seed: int, peers: Sequence[str], log: Path) -> Iterator[Row]:
    """The row of every peer after each of its turns, the last one of each is that of its end."""
    racers = [Racer(task, peer, seed, log) for peer in peers]
    try:
        while racing := [racer for racer in racers if not racer.finished]:
            for racer in racing:
                yield racer.turn()
                if racer.finished:
                    racer.close()
    finally:
        for racer in racers:
            racer.close()


def to_json(row: Row) -> dict[str, Any]:
    """``row`` as it is written."""
    return {**asdict(row), "seconds": round(row.seconds, 3), "cpu_seconds": round(row.cpu_seconds, 3)}
