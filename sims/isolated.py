"""Any environment in processes of its own, possibly in another installation: it may crash without ending the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sims import installations
from sims.host_memory import SHARE, free_bytes, process_bytes
from sims.isolation.env import IsolatedEnv
from sims.isolation.links import LocalWorker, Start
from sims.isolation.snapshots import IsolatedSnapshotEnv
from sims.isolation.supervised import Deadlines, SupervisedWorker
from vla_rl.contract.config import check_positive
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import declare_task

_MOST = 10**9  # bytes; no environment of ours takes more, its process included


@declare_task(expert="sims.isolation.expert:ExpertInWorker", wraps=True)
def make(
    num_envs: int,
    env: str = "",
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
    installation: str = "",
    expert: bool = False,
    python: str = "",
    variables: Mapping[str, str] | None = None,
    deadline_s: float = 120.0,
    start_deadline_s: float = 900.0,
    recycle_steps: int = 0,
) -> IsolatedEnv:
    """``num_envs`` environments ``env`` (of the catalogue or "package.module:make") in processes of their own.

    options           of ``env``, as JSON
    workers           processes; each has its share of the environments, at most one process for each
    installation      where they run: the name of one that "vla-rl sims install" made ("": here)
    expert            let the environment's scripted expert act in the workers: observations hold its next action as
                      ``privileged/expert_action``
    python            the interpreter that runs them, for instance that of another virtual environment ("": this one)
    variables         environment variables of the processes, on top of those of this one
    deadline_s        for a reset, step or snapshot of one worker's share
    start_deadline_s  to start and to make the environment
    recycle_steps     control steps of its environments together after which a worker is replaced, as soon as a reset
                      finds no other episode of it running, and a quarter later in any case; 0: never

    Raises UserError when ``env`` cannot be made, and when so many workers do not fit the memory.
    """
    if not env:
        raise UserError(
            "no environment was named to be isolated, so nothing can be made; give the option env, for instance "
            "--env.options.env lift."
        )
    if installation:
        python = python or str(installations.find(installation).python)
        variables = {**installations.child_environment(installation), **(variables or {})}
    start: Start = partial(LocalWorker, python, dict(variables or {}))
    request = {"env": env, "options": dict(options or {}), "expert": expert}
    deadlines = Deadlines(deadline_s, start_deadline_s)
    many = num_envs * _MOST > SHARE * free_bytes()
    return supervise(start, num_envs, workers, request, deadlines, recycle_steps, _require_memory if many else None)


def supervise(
    start: Start,
    num_envs: int,
    workers: int,
    request: Mapping[str, Any],
    deadlines: Deadlines,
    recycle_steps: int = 0,
    look: Callable[[SupervisedWorker, int], None] | None = None,
) -> IsolatedEnv:
    """``num_envs`` environments in workers that ``start`` starts; ``request`` says what each has to make.

    ``look`` is shown the first worker, once it has made its environments, and how many there will be; then the others
    are started.
    """
    if num_envs < 1 or workers < 1:
        raise UserError(
            f"{num_envs} environments in {workers} workers leave nothing to simulate; give at least 1 of each."
        )
    check_positive(deadlines, "answer", "start")
    count = min(workers, num_envs)
    ends = [num_envs * part // count for part in range(count + 1)]
    made: list[SupervisedWorker] = []
    try:
        for first, stop in itertools.pairwise(ends):
            own = {**request, "num_envs": stop - first}
            made.append(SupervisedWorker(start, own, slice(first, stop), deadlines, recycle_steps))
            if look is not None and len(made) == 1 < count:
                made[0].spec()
                look(made[0], count)
        return (IsolatedSnapshotEnv if made[0].spec().can_snapshot else IsolatedEnv)(made)
    except BaseException:
        for worker in made:
            worker.close()
        raise


def _require_memory(first: SupervisedWorker, count: int) -> None:
    """Raise UserError, saying how many fit, when ``count`` workers that take as much as the ``first`` do not."""
    assert isinstance(first.link, LocalWorker)
    each = process_bytes(first.link.pid)
    free = free_bytes() + each  # without the first one
    if count * each > SHARE * free:
        fit = int(SHARE * free / each)
        raise UserError(
            f"{count} worker processes of {each / 1e6:.0f} MB each, for {first.size} environments each, do not fit the "
            f"{free / 1e9:.1f} GB that are free, so none was kept; {fit} fit."
        )
