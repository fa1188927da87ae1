"""Any Gymnasium environment, single or vector, behind the environment contract, without autoreset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from sims.base import BaseEnv, ReplayingEnv, VariedEnv, require_positive
from sims.gym_rows import (
    SUCCESS_KEYS,
    FirstRow,
    Result,
    Rows,
    SingleRows,
    VectorRows,
    begun,
    copied,
    flag,
    name_of,
    naming,
    stepped,
)
from sims.gym_spaces import ActionWriter, ObservationReader, Privileged, spec_of_entries
from vla_rl.contract.env import PRIVILEGED, EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError, cause_of
from vla_rl.contract.load import load
from vla_rl.contract.task import Parameter, declare_task
from vla_rl.contract.tracker import DIVERGED, FAILURES, TIME_LIMIT, EpisodeTracker


class GymEnv(BaseEnv):
    """``E`` Gymnasium environments of one id behind the environment contract (``VecEnv``).

    images  {camera: uint8 [E,h,w,c]}  image observations; "image" where the observation is nothing else
    state   float32 [E,S]    the rest of the observation as one vector, in Gymnasium's units, without privileged entries
    extras  {"privileged/NAME": float32 [E,n]}  entries for critics and rewards only
    action  [E,H,D]  float32 within the bounds of the action space, or int64 indices (see ``sims/gym_spaces.py``)

    Rewards are Gymnasium's own.  Its termination is the cause "terminated", its truncation and the time limit are
    "time_limit" (termination at the same time counts); an observation that is not finite truncates the episode
    ("diverged", reward 0) and is not returned, nor is a reward; the first of them is warned of.

    Success ("at_end") is what ``info["is_success"]`` or ``info["success"]`` says in the last step of an episode, or
    another key, ``success_key``.  With ``success_return`` an episode has succeeded if its rewards add up to that at
    least.  Otherwise there is no notion of success: ``spec.success`` is None; compare returns.  ``success_from`` says
    which it is.
    """

    def __init__(
        self,
        rows: Rows,
        privileged: Privileged,
        time_limit: int | None = None,
        success_return: float | None = None,
        success_key: str | None = None,
        action_bounds: Sequence[float] | None = None,
    ) -> None:
        """Owns ``rows``; ``privileged`` is what only critics see; ``time_limit`` in actions, None: the registry's.

        ``success_key`` of ``info``; "": none, None: the one of ``SUCCESS_KEYS`` that the first step has.
        """
        self._rows, self._success_return = rows, success_return
        self._reader = ObservationReader(rows.facts.name, rows.facts.observation_space)
        self._write = ActionWriter(rows.facts.name, rows.facts.action_space, action_bounds)
        self._success_key = success_key if success_key is not None or success_return is not None else self._find_key()
        rows.keys = (self._success_key,) if self._success_key else ()
        self._warned = False
        hidden = {name: self._reader.entries(name, chosen) for name, chosen in privileged.items()}
        self._privileged = {PRIVILEGED + name: entries for name, entries in hidden.items()}
        taken = [entry for chosen in self._privileged.values() for entry in chosen]
        size, num_envs = len(self._reader.low), rows.num_envs
        self._public = np.setdiff1d(np.arange(size), np.array(taken, int))
        self.spec = self._make_spec(time_limit)
        self._book = EpisodeTracker(num_envs, ("terminated",))
        self._return = np.zeros(num_envs, np.float64)
        self._vector = np.zeros((num_envs, size), np.float32)
        self._images = {
            name: np.zeros((num_envs, *item.shape), np.uint8) for name, item in self._reader.image_specs.items()
        }

    @property
    def success_from(self) -> str:
        """What says whether an episode has succeeded; "" where nothing does."""
        if self._success_return is not None:
            return f"a return of at least {self._success_return:g}"
        return f'info["{self._success_key}"]' if self._success_key else ""

    def close(self) -> None:
        self._rows.close()

    def _find_key(self) -> str:
        """The entry of ``info`` that says success, found by one action in the middle of their range; "" for none."""
        everyone, low, high = range(self._rows.num_envs), self._write.spec.low, self._write.spec.high
        self._rows.reset(everyone, everyone)
        middle = (np.add(low, high) / 2).astype(self._write.spec.dtype)
        info = self._rows.step([0], self._write(middle[None]))[0][-1]
        return next((key for key in SUCCESS_KEYS if key in info), "")

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        reward, cause, results = self._advance(env_ids, action)
        success, ended = np.zeros(env_ids.size, bool), (cause > 0) & (cause != DIVERGED)
        if self._success_return is not None:
            success = ended & (self._return[env_ids] >= self._success_return)
        elif key := self._success_key:
            for k in np.flatnonzero(ended):
                success[k] = self._succeeded(results[k][-1], key)
        return reward, success, cause

    def _succeeded(self, info: Mapping[str, Any], key: str) -> bool:
        """What ``key`` of an episode's last ``info`` says; raises ContractError when it says nothing."""
        if key not in info:
            raise ContractError(
                f"environment {self.spec.name!r} has no info[{key!r}] in the last step of an episode, so "
                'nobody knows whether it succeeded; give it there, or set the option success_key to another key or "".'
            )
        return flag(self.spec.name, f"info[{key!r}]", info[key])

    def _start(self, env_ids: np.ndarray) -> None:
        if not env_ids.size:
            return
        self._return[env_ids] = 0.0
        observations = self._rows.reset(env_ids.tolist(), self._book.seed[env_ids].tolist())
        self._keep(env_ids, self._reader.vectors(observations), observations)

    def _advance(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[Result]]:
        """Execute ``action`` [R,D]: rewards [R], codes of the causes of ends [R] (0: still running), results."""
        results = self._rows.step(env_ids.tolist(), self._write(action))
        value = np.array([result[1] for result in results])
        terminated, truncated = (np.array([result[i] for result in results], bool) for i in (2, 3))
        vectors = self._reader.vectors([result[0] for result in results])
        finite = np.isfinite(vectors).all(1) & np.isfinite(value)
        if not finite.all():
            self._warn(env_ids[~finite], "a reward" if not np.isfinite(value).all() else "an observation")
        kept = np.flatnonzero(finite)
        self._keep(env_ids[kept], vectors[kept], [results[k][0] for k in kept])
        late = truncated | (self._book.time[env_ids] >= self.spec.time_limit)
        ends = np.where(terminated, FAILURES, np.where(late, TIME_LIMIT, 0))
        reward, cause = np.where(finite, value, 0).astype(np.float32), np.where(finite, ends, DIVERGED)
        self._return[env_ids] += reward
        return reward, cause, results

    def _warn(self, env_ids: np.ndarray, what: str) -> None:
        """Say once that an episode is cut because of ``what``, in the first of ``env_ids``."""
        if not self._warned:
            self._warned, env_id = True, int(env_ids[0])
            warnings.warn(
                f"environment {self.spec.name!r} returned {what} that is not finite (seed "
                f"{int(self._book.seed[env_id])}, time step {int(self._book.time[env_id])}), so that episode, and "
                "every other in which it happens, is truncated there (cause 'diverged'); correct the environment.",
                stacklevel=2,
            )

    def _keep(self, env_ids: np.ndarray, vectors: np.ndarray, observations: Sequence[Any]) -> None:
        """Let ``env_ids`` [R] show ``vectors`` [R,N] and the images of ``observations``."""
        self._vector[env_ids] = vectors
        for env_id, obs in zip(env_ids, observations, strict=True) if self._images else ():
            for name, image in self._reader.images(obs).items():
                self._images[name][env_id] = image

    def _observe(self) -> Observation:
        extras = {name: self._vector[:, entries] for name, entries in self._privileged.items()}
        images = {name: image.copy() for name, image in self._images.items()}
        task = np.zeros(self.num_envs, np.int64)
        return Observation(images, self._vector[:, self._public], task, self._book.time.copy(), extras)

    def _make_spec(self, time_limit: int | None) -> EnvSpec:
        facts = self._rows.facts
        limit = time_limit or facts.time_limit
        if not limit:
            raise UserError(
                f"{facts.name!r} has no time limit in Gymnasium's registry, so its episodes might never end; give the "
                "option time_limit, in actions."
            )
        return EnvSpec(
            name=facts.name,
            images=self._reader.image_specs,
            state=spec_of_entries(self._reader, self._public),
            action=self._write.spec,
            tasks=(facts.name,),
            control_dt=facts.control_dt,
            time_limit=limit,
            max_chunk=limit,
            success="at_end" if self.success_from else None,
            extras={key: spec_of_entries(self._reader, entries) for key, entries in self._privileged.items()},
            can_snapshot=hasattr(self, "snapshot"),
        )


class ReplayingGymEnv(VariedEnv, ReplayingEnv, GymEnv):
    """A ``GymEnv`` of single environments, with ``Snapshots``: Gymnasium requires that episodes can be replayed.

    Environments are stepped one after the other: a pool of two threads took 0.9 to 1.5 times as long for six MuJoCo
    tasks on two cores, since most of a step of these small models is Python.

    ``reset`` takes the values of the parameters that :func:`parameters` declares; they are part of snapshots.
    """

    def __init__(
        self,
        rows: SingleRows,
        privileged: Privileged,
        declared: Sequence[Parameter] = (),
        physics: Sequence[ModelPhysics] = (),
        **others: Any,
    ) -> None:
        """``physics`` of every environment, where parameters are ``declared``; ``others`` as of :class:`GymEnv`."""
        super().__init__(rows, privileged, **others)
        self._physics = physics
        self._declare(declared)

    def _set_physics(self, env_ids: np.ndarray) -> None:
        for env_id, values in zip(env_ids, self._values(env_ids), strict=True):
            self._physics[env_id].set(values)

    def _replay(self, env_id: int, action: np.ndarray) -> None:
        self._advance(np.array([env_id]), action[None])

    def _arrays(self) -> dict[str, np.ndarray]:
        return super()._arrays() | {"parameters": self._parameters}


def parameters(id: str = "InvertedPendulum-v5", vectorization_mode: str = "", **options: Any) -> tuple[Parameter, ...]:
    """What episodes of :func:`make` can vary: the physics of Gymnasium's own MuJoCo tasks, as single environments."""
    return () if vectorization_mode else physics_of(registered(id))


@declare_task(parameters=parameters)
def make(
    num_envs: int,
    id: str = "InvertedPendulum-v5",
    privileged: Privileged | None = None,
    time_limit: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    wrappers: Mapping[str, Mapping[str, Any]] | None = None,
    vectorization_mode: str = "",
    vector_kwargs: Mapping[str, Any] | None = None,
    success_return: float | None = None,
    success_key: str | None = None,
    action_bounds: Sequence[float] | None = None,
) -> GymEnv:
    """``num_envs`` environments of Gymnasium's ``id``; "module:ID" imports the module that registers it first.

    privileged  {name: entries of the observation, or a part of a Dict} for critics only, as ``privileged/name``
    time_limit  actions per episode, where Gymnasium's registry has none or another one is wanted
    arguments   of the environment itself (``{"healthy_reward": 0.0}``)
    wrappers    {"module:Class": its arguments}, the innermost first (``gymnasium.wrappers:FrameStackObservation``)
    vectorization_mode  "": single environments, one after the other, with snapshots; "sync", "async" (a process for
                each) or "vector_entry_point" (the id's own vector environment): as in ``gymnasium.make_vec``
    vector_kwargs  of Gymnasium's vector environment ("sync", "async"): ``{"autoreset_mode": "NextStep"}``
    success_return  an episode whose rewards add up to this at its end has succeeded
    success_key  the entry of ``info`` that says in the last step whether the episode has succeeded; None: "is_success"
                or "success" where there is one; "": none is read
    action_bounds  [low, high] of continuous actions where their space has no bounds

    Raises UserError for an id that cannot be made and for spaces that no policy could read or choose from.
    """
    require_positive(num_envs=num_envs)
    limit = {} if time_limit is None else {"max_episode_steps": time_limit}
    options = {**limit, **(arguments or {})}
    around = [partial(load(name), **dict(given)) for name, given in (wrappers or {}).items()]
    id = registered(id)
    try:
        if not vectorization_mode:
            envs, declared = [make_single(id, options, around) for _ in range(num_envs)], physics_of(id)
            physics = [ModelPhysics(one.unwrapped) for one in envs] if declared else []
        else:
            env = make_vector(id, num_envs, vectorization_mode, options, around, vector_kwargs or {})
    except UserError:
        raise
    except Exception as error:  # of whoever wrote the environment
        raise UserError(
            f"Gymnasium cannot make {id!r} ({cause_of(error)}), so there is no environment; check the id and its "
            "arguments, or install its requirements (pip install 'gymnasium[mujoco]')."
        ) from error
    said: dict[str, Any] = {"success_return": success_return, "success_key": success_key}
    said |= {"time_limit": time_limit, "action_bounds": action_bounds}
    if not vectorization_mode:
        return ReplayingGymEnv(SingleRows(envs), privileged or {}, declared, physics, **said)
    return GymEnv(VectorRows(env), privileged or {}, **said)


def registered(id: str) -> str:
    """``id`` without the "module:" that registers it, which is imported, also from the working folder."""
    module, _, name = id.rpartition(":")
    if module:
        load(f"{module}:__name__")
    return name


def make_single(id: str, options: Mapping[str, Any], around: Sequence[Callable[..., Any]]) -> Any:
    """One environment; where the id has no other form, a vector environment of one row as one."""
    if gymnasium.spec(id).entry_point is None:
        return FirstRow(gymnasium.make_vec(id, 1, "vector_entry_point", wrappers=around, **options))
    env: Any = gymnasium.make(id, disable_env_checker=True, **options)
    for wrapper in around:
        env = wrapper(env)
    return env


def make_vector(
    id: str,
    num_envs: int,
    mode: str,
    options: Mapping[str, Any],
    around: Sequence[Callable[..., Any]],
    vector_kwargs: Mapping[str, Any],
) -> Any:
    """Gymnasium's vector environment.

    Its own kinds restart an ended row at once (SameStep) unless ``vector_kwargs`` says otherwise: in "async" without
    shared memory, NextStep would restart a row twice.
    """
    if mode == "vector_entry_point":
        return gymnasium.make_vec(id, num_envs, mode, dict(vector_kwargs), wrappers=around, **options)
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP, **vector_kwargs}
    plain = [*around, Plain]
    return gymnasium.make_vec(id, num_envs, mode, kwargs, wrappers=plain, disable_env_checker=True, **options)


class Plain(gymnasium.Wrapper[Any, Any, Any, Any]):
    """What an environment returns, checked, in Python's own numbers and in memory of its own.

    Gymnasium's vector environments keep the last observation of an episode while they restart it, which overwrites the
    buffer of an environment that hands out one again and again.
    """

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        name = name_of(self)
        with naming(name, "reset"):
            obs, info = begun(name, self.env.reset(**options))
        return obs, copied(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        name = name_of(self)
        with naming(name, "step"):
            *rest, info = stepped(name, self.env.step(action))
        return (*rest, copied(info))


PHYSICS = (
    Parameter("mass", 1.0, 0.2, 3.0, "factor", "mass and inertia of every body"),
    Parameter("friction", 1.0, 0.1, 3.0, "factor", "friction of all contacts"),
    Parameter("damping", 1.0, 0.2, 3.0, "factor", "damping of every joint"),
    Parameter("gravity", 1.0, 0.5, 2.0, "factor", "gravity"),
)
_OURS = "gymnasium.envs.mujoco."


def physics_of(id: str) -> tuple[Parameter, ...]:
    """``PHYSICS`` where ``id`` is one of Gymnasium's own MuJoCo tasks, otherwise nothing."""
    return PHYSICS if str(gymnasium.spec(id).entry_point).startswith(_OURS) else ()


class ModelPhysics:
    """Sets ``PHYSICS`` in the model of one MuJoCo environment; nominal values leave it as it is, bit for bit."""

    def __init__(self, env: Any) -> None:
        """``env``: an environment with ``model`` and ``data``, without wrappers."""
        self._env, self._values = env, {parameter.name: parameter.nominal for parameter in PHYSICS}
        model = env.model
        fields = {"body_mass": "mass", "body_inertia": "mass", "geom_friction": "friction", "dof_damping": "damping"}
        self._nominal = {field: (name, getattr(model, field).copy()) for field, name in fields.items()}
        self._gravity = model.opt.gravity.copy()

    def set(self, values: Mapping[str, float]) -> None:
        """The physics of the episode that the next reset starts: {parameter: value}."""
        if values == self._values:
            return
        import mujoco

        model = self._env.model
        for field, (name, nominal) in self._nominal.items():
            getattr(model, field)[:] = nominal * values[name]
        model.opt.gravity[:] = self._gravity * values["gravity"]
        mujoco.mj_setConst(model, self._env.data)
        self._values = dict(values)
