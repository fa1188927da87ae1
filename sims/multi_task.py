"""Several environments, of different simulators too, as one: a learner trains on all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from sims.base import BaseEnv, SnapshotEnv
from sims.isolation.messages import EXPERT_ACTION
from vla_rl.contract.check import loosest
from vla_rl.contract.env import ArraySpec, AsyncSteps, EnvSpec, Observation, Observe, Snapshot, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.tracker import EpisodeTracker

_LONGEST_CAUSE = 32  # letters


class MultiTaskEnv(BaseEnv):
    """``E`` environments, each of which plays, from reset to reset, one of ``M`` members (``VecEnv``).

    The seed chooses: ``seed % M`` is the member and ``seed // M`` the seed of its episode.  So an episode follows from
    its seed alone, in any place, and every member has ``E`` environments, of which those that are not played idle.
    (Before its first episode an environment of a member cannot idle: it runs unseen to its end, once.)  Members in
    other processes (``AsyncSteps``) are stepped at the same time.

    tasks, families  those of the members, one after the other; a family is prefixed with its member's name
    images           every camera of any member; black where a member has no camera of that name
    state            padded by zeros to the widest member's
    action           within -1 to 1, which are the bounds of the member that is played; entries beyond its own are
                     ignored, and count as 0 among the executed ones
    extras           ``privileged/expert_action`` in these units, if all members have it; no others

    ``control_dt`` is the first member's, the time limit the longest one's.  Snapshots are offered if all members
    offer them (``MultiTaskSnapshots``).
    """

    def __init__(self, members: Sequence[VecEnv]) -> None:
        """``members`` have equally many environments and are owned by this object."""
        self._members = [_Member(env) for env in members]
        self.spec = _joint_spec([env.spec for env in members])
        count = members[0].num_envs
        self._book = EpisodeTracker(count)
        self._played = np.zeros(count, np.int64)
        self._first_task = np.cumsum([0, *(len(env.spec.tasks) for env in members)])
        self._cause = np.zeros(count, f"U{_LONGEST_CAUSE}")

    def _start(self, env_ids: np.ndarray) -> None:
        self._cause[env_ids] = ""
        self._played[env_ids] = self._book.seed[env_ids] % len(self._members)
        for number, member in enumerate(self._members):
            chosen = env_ids[self._played[env_ids] == number]
            if chosen.size:
                member.reset(chosen, self._book.seed[chosen] // len(self._members))

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        action = self._book.chunk(chunk, self.spec)
        count, horizon = action.shape[:2]
        reward, valid = np.zeros((count, horizon), np.float32), np.zeros((count, horizon), bool)
        executed, intervened = np.zeros_like(action), np.zeros((count, horizon), bool)
        frames = [[member.obs for member in self._members] for _ in range(horizon if observe == "all" else 0)]
        for number, rows, step in self._member_steps(action, observe):
            member = self._members[number]
            for i, frame in enumerate(step.frames):
                frames[i][number] = frame
            reward[rows], valid[rows] = on_host(step.reward)[rows], on_host(step.valid)[rows]
            executed[rows] = member.to_joint(on_host(step.executed)[rows], action.shape[-1])
            executed[rows] *= valid[rows][..., None]
            intervened[rows] = on_host(step.intervened)[rows]
            self._latch(step, rows)
        seen = [self._joined(one) for one in frames]
        obs = seen[-1] if seen else self._observe()
        self._book.time[:] = obs.time
        flags = self._book.flags() | {"cause": tuple(self._cause.tolist())}
        return Step(obs, reward, valid, **flags, executed=executed, intervened=intervened, frames=tuple(seen))

    def close(self) -> None:
        for member in self._members:
            member.env.close()

    def _member_steps(self, action: np.ndarray, observe: Observe) -> list[tuple[int, np.ndarray, Step]]:
        """Number, rows and step of every member that is played; those in other processes compute at the same time."""
        running = ~self._book.done
        rows = {number: np.flatnonzero((self._played == number) & running) for number in range(len(self._members))}
        played = [number for number in rows if rows[number].size]
        for number in played:
            self._members[number].begin(action, rows[number], observe)
        played.sort(key=lambda number: self._members[number].asynchronous)  # this process computes before it waits
        return [(number, rows[number], self._members[number].finish()) for number in played]

    def _observe(self) -> Observation:
        return self._joined([member.obs for member in self._members])

    def _latch(self, step: Step, rows: np.ndarray) -> None:
        for name in ("terminated", "truncated", "success"):
            getattr(self._book, name)[rows] = on_host(getattr(step, name))[rows]
        self._cause[rows] = np.asarray(step.cause)[rows]

    def _joined(self, observations: Sequence[Observation | None]) -> Observation:
        """The observations of all environments, each by the member that it plays."""
        count, spec = self.num_envs, self.spec
        images = {name: np.zeros((count, *one.shape), np.uint8) for name, one in spec.images.items()}
        extras = {name: np.zeros((count, *one.shape), one.dtype) for name, one in spec.extras.items()}
        state, task = np.zeros((count, *spec.state.shape), np.float32), np.zeros(count, np.int64)
        time = np.zeros(count, np.int64)
        for number, (member, obs) in enumerate(zip(self._members, observations, strict=True)):
            rows = np.flatnonzero((self._played == number) & (self._book.seed >= 0))
            if obs is None or not rows.size:
                continue
            for name, image in obs.images.items():
                images[name][rows] = on_host(image)[rows]
            state[rows, : obs.state.shape[1]] = on_host(obs.state)[rows]
            task[rows] = on_host(obs.task)[rows] + self._first_task[number]
            time[rows] = on_host(obs.time)[rows]
            if EXPERT_ACTION in extras:
                action = on_host(obs.extras[EXPERT_ACTION])[rows]
                extras[EXPERT_ACTION][rows] = member.to_joint(action, spec.action_dim)
        return Observation(images, state, task, time, extras)


class MultiTaskSnapshots(SnapshotEnv, MultiTaskEnv):
    """The same where every member can be saved in mid-episode (``VecEnv`` and ``Snapshots``)."""

    def snapshot(self, env_ids: Any) -> Snapshot:
        saved = super().snapshot(env_ids)
        for number, member in enumerate(self._members):
            saved |= {f"{number}/{name}": value for name, value in member.snapshots().snapshot(env_ids).items()}
        return saved

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        super().restore(env_ids, {name: value for name, value in snapshot.items() if "/" not in name})
        for number, member in enumerate(self._members):
            prefix = f"{number}/"
            part = {name.removeprefix(prefix): value for name, value in snapshot.items() if name.startswith(prefix)}
            member.obs = member.snapshots().restore(env_ids, part)
        return self._observe()

    def _arrays(self) -> dict[str, np.ndarray]:
        cause = self._cause.view(np.uint32).reshape(self.num_envs, -1)  # the letters as numbers
        return self._book.arrays() | {"played": self._played, "cause": cause}


class _Member:
    """One of the environments, its last observation, and the units of its actions."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.obs: Observation | None = None  # None before the first reset
        self.asynchronous = isinstance(env, AsyncSteps)
        self._begun: tuple[np.ndarray, Observe]
        spec = env.spec.action
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), spec.shape) for bound in (spec.low, spec.high))
        self._centre, self._half = (high + low) / 2, (high - low) / 2

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        self._start()
        self.obs = self.env.reset(rows, seeds)

    def snapshots(self) -> Any:
        """The environment; each of its rows has an episode."""
        self._start()
        return self.env

    def _start(self) -> None:
        """Begin an episode in every row, since none can step before all have one."""
        if self.obs is None:
            self.obs = self.env.reset(np.arange(self.env.num_envs), np.zeros(self.env.num_envs, np.int64))

    def begin(self, action: np.ndarray, rows: np.ndarray, observe: Observe) -> None:
        """Execute the joint ``action`` [E,H,D] in ``rows``; the others get the middle of the bounds."""
        own = np.zeros((*action.shape[:2], self._half.size), np.float32)
        own[rows] = action[rows][..., : self._half.size]
        self._begun = self._centre + own * self._half, observe
        if isinstance(self.env, AsyncSteps):
            self.env.step_async(*self._begun)

    def finish(self) -> Step:
        step = self.env.step_wait() if isinstance(self.env, AsyncSteps) else self.env.step(*self._begun)
        self.obs = step.obs
        return step

    def to_joint(self, action: np.ndarray, width: int) -> np.ndarray:
        """``action`` [...,d] of this member within -1 to 1, padded by zeros to ``width``."""
        joint = np.zeros((*action.shape[:-1], width), np.float32)
        scaled = (action - self._centre) / np.where(self._half > 0, self._half, 1)
        joint[..., : self._half.size] = np.clip(scaled, -1, 1)
        return joint


def _named(given: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and options of a member, from its name or {"env": NAME, "options": {...}}; raises UserError for others."""
    if isinstance(given, str):
        return given, {}
    if "env" not in given or set(given) - {"env", "options"}:
        raise UserError(
            f"the environment {dict(given)} is described by other fields than 'env' and 'options', so it cannot be "
            'made; write {"env": "metaworld", "options": {"tasks": "MT10"}}.'
        )
    return given["env"], given.get("options", {})


def make(num_envs: int, envs: Sequence[str | Mapping[str, Any]] = ("point_mass", "counting")) -> MultiTaskEnv:
    """``num_envs`` environments that play all of ``envs``: names, or {"env": NAME, "options": {...}}.

    Their cameras of the same name have to have the same size, and all or none of them know success.
    """
    from sims import catalog

    if not envs:
        raise UserError("envs is empty, so there is nothing to play; name at least one environment.")
    members: list[VecEnv] = []
    try:
        members.extend(catalog.make(name, num_envs=num_envs, **options) for name, options in map(_named, envs))
        saved = all(env.spec.can_snapshot for env in members)
        return MultiTaskSnapshots(members) if saved else MultiTaskEnv(members)
    except BaseException:
        for env in members:
            env.close()
        raise


def _joint_spec(specs: Sequence[EnvSpec]) -> EnvSpec:
    infinite = float("inf")
    width, size = max(spec.action_dim for spec in specs), max(spec.state.shape[0] for spec in specs)
    action = ArraySpec((width,), "float32", -1.0, 1.0, unit="1 (of the member's range)")
    experts = {EXPERT_ACTION: action} if all(EXPERT_ACTION in spec.extras for spec in specs) else {}
    return EnvSpec(
        name="multi_task",
        images=_joint_images(specs),
        state=ArraySpec((size,), "float32", -infinite, infinite),
        action=action,
        tasks=tuple(text for spec in specs for text in spec.tasks),
        families=tuple(_family(spec, task) for spec in specs for task in range(len(spec.tasks))),
        control_dt=specs[0].control_dt,
        time_limit=max(spec.time_limit for spec in specs),
        max_chunk=min(spec.max_chunk for spec in specs),
        extras=experts,
        success=_joint_success(specs),
        can_snapshot=all(spec.can_snapshot for spec in specs),
        profile=loosest(specs),
    )


def _family(spec: EnvSpec, task: int) -> str:
    family = spec.family(task)
    return family if family == spec.name else f"{spec.name}/{family}"


def _joint_images(specs: Sequence[EnvSpec]) -> dict[str, ArraySpec]:
    images: dict[str, ArraySpec] = {}
    for spec in specs:
        for name, image in spec.images.items():
            known = images.setdefault(name, replace(image, frame=name))
            if known.shape != image.shape:
                raise UserError(
                    f"camera {name!r} of {spec.name!r} has {image.shape[:2]} pixels and that of another environment "
                    f"{known.shape[:2]}, so no network can read both; give both the same image_size."
                )
    return images


def _joint_success(specs: Sequence[EnvSpec]) -> Literal["once", "at_end"] | None:
    unknown = [spec.name for spec in specs if spec.success is None]
    if unknown and len(unknown) < len(specs):
        raise UserError(
            f"{', '.join(unknown)} have no notion of success and the others have, so success says nothing about all; "
            "train on them apart."
        )
    if unknown:
        return None
    return "once" if all(spec.success == "once" for spec in specs) else "at_end"
