"""Any environment in processes of its own, possibly in another installation: it may crash without ending the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from sims.isolation.channel import Arrays
from sims.isolation.messages import (
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
from sims.isolation.supervised import Answer, Request, SupervisedWorker
from vla_rl.contract.env import WORKER, Observation, Observe, Step
from vla_rl.contract.errors import ContractError
from vla_rl.contract.tracker import EpisodeTracker

Answers: TypeAlias = dict[SupervisedWorker, Answer]
_WAIT = 1.25  # of its steps, for which a worker that is to be replaced waits for episodes that are running


class IsolatedEnv:
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
        self._cause = [""] * self.num_envs
        self._asked: dict[SupervisedWorker, Request] = {}  # those that have not answered yet
        self._begun: tuple[int, int] | None = None  # actions and frames of a step that nobody has waited for
        # Environments for which no worker answers, as it failed or they were never reset, and their observation.
        self._frozen = np.ones(self.num_envs, bool)
        self._layout = observation_layout(self.spec)
        self._kept = {name: np.zeros((self.num_envs, *shape), dtype) for name, (shape, dtype) in self._layout.items()}

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    @property
    def restarts(self) -> int:
        """How often a worker was replaced."""
        return sum(worker.restarts for worker in self.workers)

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R], not negative)."""
        index = self._book.index(env_ids)
        seed = self._book.seeds(index, seeds)
        self._recycle(index)
        self._insist(self._owners(index), partial(self._reset_request, index, seed), index.tolist())
        self._book.begin(index, seed)
        self._frozen[index] = False
        for env_id in index.tolist():
            self._cause[env_id] = ""
        return self._observation()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D]; see ``VecEnv.step``."""
        self.step_async(chunk, observe)
        return self.step_wait()

    def step_async(self, chunk: Any, observe: Observe = "last") -> None:
        """Let the workers execute ``chunk`` [E,H,D]; see ``AsyncSteps``."""
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
        """The step that the workers were asked for; see ``AsyncSteps``."""
        if self._begun is None:
            raise ContractError(
                "no step was begun, or another call gave it up, so there is none to wait for; call step_async first."
            )
        (horizon, frames), self._begun = self._begun, None
        answers = self._receive()
        parts: dict[str, Any] = self._per_action(answers, horizon)
        self._latch(answers)
        seen = tuple(self._observation(frame(number)) for number in range(frames))
        flags: dict[str, Any] = {name: getattr(self._book, name).copy() for name in FLAGS}
        return Step(self._observation(), **parts, **flags, cause=tuple(self._cause), frames=seen)

    def close(self) -> None:
        """End every worker; safe to call twice."""
        for worker in self.workers:
            worker.close()

    # -- asking the workers -------------------------------------------------------------------------------------------

    def _ask(self, requests: Mapping[SupervisedWorker, Request], given_up: Sequence[int] = ()) -> Answers:
        """The answers of the workers that did not fail; see :meth:`_receive`."""
        self._send(requests)
        return self._receive(given_up)

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
            answers |= self._ask({worker: request(worker) for worker in missing}, given_up)
        return answers

    @staticmethod
    def _places(index: np.ndarray, worker: SupervisedWorker) -> np.ndarray:
        """int: where the environments of ``worker`` are in ``index`` [R]."""
        return np.flatnonzero((index >= worker.rows.start) & (index < worker.rows.stop))

    def _owners(self, index: np.ndarray) -> list[SupervisedWorker]:
        """The workers of the environments ``index``."""
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
            for k, env_id in zip(live.tolist(), rows.tolist(), strict=True):
                self._cause[env_id] = answer.fields["cause"][k]

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
