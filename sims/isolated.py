"""Any environment in processes of its own, possibly in another installation: it may crash without ending the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from sims import installations
from sims.base import SHARE, BaseEnv, free_bytes, process_bytes
from sims.isolation.messages import (
    EXPERT_ACTION,
    FLAGS,
    OBS,
    PER_ACTION,
    Layout,
    frame,
    observation_layout,
    require_layout,
    step_layout,
    to_observation,
)
from sims.isolation.supervised import Answer, Deadlines, LocalWorker, Request, Start, SupervisedWorker
from vla_rl.contract.config import check_positive
from vla_rl.contract.env import WORKER, Observation, Observe, Snapshot, Step, on_host
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.task import declare_task
from vla_rl.contract.tracker import EpisodeTracker
from vla_rl.contract.wire import Arrays

_MOST = 10**9  # bytes; no environment of ours takes more, its process included


@declare_task(expert="sims.isolated:ExpertInWorker", wraps=True)
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


Answers: TypeAlias = dict[SupervisedWorker, Answer]
_LONGEST_CAUSE = 64  # letters
_WAIT = 1.25  # of its steps, for which a worker that is to be replaced waits for episodes that are running


class ExpertInWorker:
    """The expert that runs beside its simulator, read from ``privileged/expert_action``."""

    def __init__(self, horizon: int = 1) -> None:
        """Raises UserError unless it is asked for one action at a time."""
        if horizon != 1:
            raise UserError(
                f"an expert that runs beside its simulator knows its next action only, so it cannot plan {horizon}; "
                "ask for one at a time."
            )

    def act(self, obs: Observation) -> np.ndarray:
        """The next action, float32 [E,1,D]; raises UserError for an environment that was made without it."""
        if EXPERT_ACTION not in obs.extras:
            raise UserError(
                f"the observation has no {EXPERT_ACTION!r}, so the expert cannot be followed; make the isolated "
                "environment with expert=True."
            )
        return on_host(obs.extras[EXPERT_ACTION])[:, None]


class IsolatedEnv(BaseEnv):
    """``E`` environments of which every worker has a share; the workers compute at the same time (``VecEnv``).

    A worker that dies, misses its deadline, raises, or returns a NaN or what breaks its own spec is replaced, with one
    warning that holds its last words.  Its running episodes are truncated with the cause "worker": their observation
    stays the last one that arrived, their actions are not valid, and they idle until they are reset, as after any end.
    The environments of other workers never notice.  A reset or snapshot that fails is tried again with the new worker.
    UserError is raised when a worker fails ``LIMIT`` times in a row without one completed step in between.

    truncated_by_worker  how many running episodes were truncated because their worker failed
    """

    def __init__(self, workers: Sequence[SupervisedWorker]) -> None:
        """``workers`` have equal environments and belong to this object; their rows follow each other."""
        self.workers = workers
        specs = [worker.spec() for worker in workers]
        self.spec = replace(specs[0], device="cpu")
        self.truncated_by_worker = 0
        self._book = EpisodeTracker(workers[-1].rows.stop)
        self._cause = np.zeros(self.num_envs, f"U{_LONGEST_CAUSE}")
        self._asked: dict[SupervisedWorker, Request] = {}  # those that have not answered yet
        self._begun: tuple[int, int] | None = None  # actions and frames of a step that nobody has waited for
        # Environments for which no worker answers, as it failed or they were never reset, and their observation.
        self._frozen = np.ones(self.num_envs, bool)
        self._layout = observation_layout(self.spec)
        self._kept = {name: np.zeros((self.num_envs, *shape), dtype) for name, (shape, dtype) in self._layout.items()}

    @property
    def restarts(self) -> int:
        """How often a worker was replaced."""
        return sum(worker.restarts for worker in self.workers)

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        index, seed = self._checked(env_ids, seeds)
        self._recycle(index)
        self._insist(self._owners(index), partial(self._reset_request, index, seed), index.tolist())
        self._book.begin(index, seed)
        self._frozen[index] = False
        self._cause[index] = ""
        return self._observation()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        self.step_async(chunk, observe)
        return self.step_wait()

    def step_async(self, chunk: Any, observe: Observe = "last") -> None:
        action = self._book.chunk(chunk, self.spec)
        horizon = action.shape[1]
        frames = horizon if observe == "all" else 0
        check = partial(self._check_step, step_layout(self.spec, horizon), frames)
        self._send(
            {
                worker: Request(
                    "step", {"chunk": action[worker.rows]}, partial(check, worker.size), {"observe": observe}
                )
                for worker in self.workers
                if not worker.fresh
            }
        )
        self._begun = horizon, frames

    def step_wait(self) -> Step:
        if self._begun is None:
            raise ContractError(
                "no step was begun, or another call gave it up, so there is none to wait for; call step_async first."
            )
        (horizon, frames), self._begun = self._begun, None
        answers = self._receive()
        parts: dict[str, Any] = self._per_action(answers, horizon)
        self._latch(answers)
        seen = tuple(self._observation(frame(number)) for number in range(frames))
        flags = self._book.flags() | {"cause": tuple(self._cause.tolist())}
        return Step(self._observation(), **parts, **flags, frames=seen)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    # -- asking the workers -------------------------------------------------------------------------------------------

    def _send(self, requests: Mapping[SupervisedWorker, Request]) -> None:
        """Ask all workers before one of them is waited for."""
        for worker in self._asked:  # the exchange before was interrupted, and answers may still come
            worker.abandon()
        self._asked, self._begun = dict(requests), None
        for worker, request in requests.items():
            worker.send(request)

    def _receive(self, given_up: Sequence[int] = ()) -> Answers:
        """The answers of the workers that were asked and did not fail; the environments of the others are frozen.

        Nobody cares for the episodes of the rows ``given_up``.
        """
        answers: Answers = {}
        refusal: ContractError | None = None
        for worker, request in self._asked.items():
            try:
                answer = worker.receive(request)
            except ContractError as error:
                refusal = error
            else:
                if answer is None:
                    self._freeze(worker, given_up)
                else:
                    answers[worker] = answer
        self._asked = {}  # not before: where one is interrupted, nobody takes what the others have answered
        if refusal is not None:
            raise refusal
        return answers

    def _insist(
        self,
        workers: Sequence[SupervisedWorker],
        request: Callable[[SupervisedWorker], Request],
        given_up: Sequence[int] = (),
    ) -> Answers:
        """The answers of all ``workers``, also of those that replace one."""
        answers: Answers = {}
        while missing := [worker for worker in workers if worker not in answers]:
            self._send({worker: request(worker) for worker in missing})
            answers |= self._receive(given_up)
        return answers

    @staticmethod
    def _places(index: np.ndarray, worker: SupervisedWorker) -> np.ndarray:
        """int: where the environments of ``worker`` are in ``index`` [R]."""
        return np.flatnonzero((index >= worker.rows.start) & (index < worker.rows.stop))

    def _owners(self, index: np.ndarray) -> list[SupervisedWorker]:
        return [worker for worker in self.workers if self._places(index, worker).size]

    def _recycle(self, index: np.ndarray) -> None:
        """Replace workers of ``index``, which is reset, that have worked enough; see ``sims/isolated.py``."""
        for worker in self._owners(index):
            others = np.setdiff1d(np.arange(worker.rows.start, worker.rows.stop), index)
            running = not self._book.done[others].all()
            if worker.worn >= (_WAIT if running else 1.0):
                self._freeze(worker, index.tolist())
                worker.retire()

    def _reset_request(self, index: np.ndarray, seed: np.ndarray, worker: SupervisedWorker) -> Request:
        """Reset those of ``index`` [R] that belong to ``worker``, and all others that a new worker has."""
        own = self._places(index, worker)
        env_ids, seeds = index[own] - worker.rows.start, seed[own]
        if worker.fresh:  # it steps nothing before all are reset; the others stay frozen here
            others = np.setdiff1d(np.arange(worker.size), env_ids)
            spare = seeds[:1] if seeds.size else np.maximum(self._book.seed[worker.rows][others], 0)
            env_ids, seeds = np.append(env_ids, others), np.append(seeds, np.broadcast_to(spare, others.shape))
        arrays = {"env_ids": env_ids.astype(np.int64), "seeds": seeds.astype(np.int64)}
        return Request("reset", arrays, partial(self._check_observation, OBS, worker.size))

    def _check_step(self, layout: Layout, frames: int, size: int, answer: Answer) -> None:
        require_layout(answer.arrays, layout, size)
        causes = answer.fields.get("cause")
        if not isinstance(causes, list) or len(causes) != size or not all(isinstance(cause, str) for cause in causes):
            raise ContractError(f"the causes are {causes!r}, so nobody knows why episodes ended; give one text each.")
        for prefix in (OBS, *map(frame, range(frames))):
            self._check_observation(prefix, size, answer)

    def _check_observation(self, prefix: str, size: int, answer: Answer) -> None:
        require_layout(answer.arrays, {prefix + name: item for name, item in self._layout.items()}, size)
        task = answer.arrays[f"{prefix}task"]
        if task.min() < 0 or task.max() >= len(self.spec.tasks):
            raise ContractError(
                f"an observation has tasks {int(task.min())}..{int(task.max())} of {len(self.spec.tasks)}, so its "
                "instruction is unknown; correct the environment."
            )

    # -- what the workers said ----------------------------------------------------------------------------------------

    def _freeze(self, worker: SupervisedWorker, given_up: Sequence[int]) -> None:
        """Keep the environments of a ``worker`` that failed as they were; those that ran are truncated."""
        for env_id in range(worker.rows.start, worker.rows.stop):
            if self._frozen[env_id]:
                continue
            self._frozen[env_id] = True
            for name, kept in self._kept.items():
                kept[env_id] = worker.latest[OBS + name][env_id - worker.rows.start]
            if not self._book.done[env_id] and env_id not in given_up:
                self._book.truncated[env_id], self._cause[env_id] = True, WORKER
                self.truncated_by_worker += 1

    def _per_action(self, answers: Answers, horizon: int) -> Arrays:
        """The arrays [E,H,...] of a step; 0 where no worker answered."""
        layout = step_layout(self.spec, horizon)
        found = {}
        for name in PER_ACTION:
            shape, dtype = layout[name]
            found[name] = np.zeros((self.num_envs, *shape), dtype)
            for worker, answer in answers.items():
                found[name][worker.rows] = answer.arrays[name]
            found[name][self._frozen] = 0
        return found

    def _latch(self, answers: Answers) -> None:
        """Note how episodes ended, and the clocks."""
        for worker, answer in answers.items():
            live = np.flatnonzero(~self._frozen[worker.rows])
            rows = live + worker.rows.start
            self._book.time[rows] = answer.arrays[f"{OBS}time"][live]
            for name in FLAGS:
                getattr(self._book, name)[rows] = answer.arrays[name][live]
            self._cause[rows] = np.array(answer.fields["cause"])[live]

    def _observation(self, prefix: str = OBS) -> Observation:
        """The observation of all environments, as copies; ``prefix`` chooses a frame of the latest step."""
        found = {}
        for name, kept in self._kept.items():
            parts = []
            for worker in self.workers:
                latest, frozen = worker.latest.get(prefix + name), self._frozen[worker.rows]
                part = kept[worker.rows] if latest is None or frozen.all() else latest
                if frozen.any():
                    part = np.where(frozen.reshape(-1, *[1] * (part.ndim - 1)), kept[worker.rows], part)
                parts.append(part)
            found[name] = np.concatenate(parts)
        return to_observation(found, "")


_INNER = "worker/"  # what the workers have saved
_OWN = "isolated/"
_KEPT = _OWN + "kept/"  # the observations of frozen environments, in snapshots that have such
_NOBODY = np.zeros(0, np.int64)


class IsolatedSnapshotEnv(IsolatedEnv):
    """Isolated environments that can be saved and restored in mid-episode (``Snapshots``)."""

    def snapshot(self, env_ids: Any) -> Snapshot:
        index = self._book.index(env_ids)
        self._book.require_started(index)
        answers = self._insist(self._owners(index), partial(self._snapshot_request, index))
        found: Snapshot = {}
        for worker, answer in answers.items():
            places = self._places(index, worker)
            for name, part in answer.arrays.items():
                whole = found.setdefault(_INNER + name, np.zeros((index.size, *part.shape[1:]), part.dtype))
                whole[places] = part
        found |= {_OWN + name: array[index] for name, array in self._own_arrays().items()}
        if self._frozen[index].any():  # what they show
            found |= {_KEPT + name: kept[index] for name, kept in self._kept.items()}
        return found

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        index = self._book.index(env_ids)
        arrays = {name: np.asarray(array) for name, array in snapshot.items()}
        own = {_OWN + name: array for name, array in self._own_arrays().items()}
        missing = own.keys() - arrays.keys()
        if missing or any(array.shape[:1] != index.shape for array in arrays.values()):
            raise ContractError(
                f"the snapshot does not fit these {index.size} environments"
                f"{f' in {sorted(missing)}' if missing else ''}, so nothing was restored; take it from an isolated "
                "environment with the same options, and give as many env_ids as it has entries."
            )
        inner = {name.removeprefix(_INNER): array for name, array in arrays.items() if name.startswith(_INNER)}
        self._insist(self._owners(index), partial(self._restore_request, index, inner), index.tolist())
        for name, array in own.items():
            array[index] = arrays[name]
        for name, kept in self._kept.items():
            if _KEPT + name in arrays:
                kept[index] = arrays[_KEPT + name]
        return self._observation()

    def _own_arrays(self) -> Arrays:
        """{name: [E,...]} of what the workers do not know of episodes; causes are letters as numbers."""
        cause = self._cause.view(np.uint32).reshape(self.num_envs, -1)
        return self._book.arrays() | {"frozen": self._frozen, "cause": cause}

    def _snapshot_request(self, index: np.ndarray, worker: SupervisedWorker) -> Request:
        self._fill(worker)
        env_ids = index[self._places(index, worker)] - worker.rows.start

        def check(answer: Answer) -> None:
            if any(array.shape[:1] != env_ids.shape for array in answer.arrays.values()):
                raise ContractError(f"a snapshot of {env_ids.size} environments has arrays of another length.")

        return Request("snapshot", {"env_ids": env_ids.astype(np.int64)}, check)

    def _restore_request(self, index: np.ndarray, inner: Arrays, worker: SupervisedWorker) -> Request:
        self._fill(worker)
        places = self._places(index, worker)
        arrays = {f"saved/{name}": array[places] for name, array in inner.items()}
        arrays["env_ids"] = (index[places] - worker.rows.start).astype(np.int64)
        return Request("restore", arrays, partial(self._check_observation, OBS, worker.size), arguments=True)

    def _fill(self, worker: SupervisedWorker) -> None:
        """Start some episode in every environment of a new ``worker``; they stay frozen here."""
        if worker.fresh:
            self._insist([worker], partial(self._reset_request, _NOBODY, _NOBODY))
