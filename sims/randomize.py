"""Any environment with parameters that differ between episodes: poses, looks, physics, latency, action noise.

An episode's parameters are drawn from its seed and the description (``Randomization``) alone, so they depend neither on
the place nor on the neighbours, and ``extras["privileged/randomization"]`` records them.  Which parameters there are,
with their units, ranges and nominal values, the wrapped environment declares; action noise and latency are added here
for every environment:

    action_noise  standard deviation of Gaussian noise on every executed action, in half the range of its bounds
    latency       control steps from a command to its execution; until the first command arrives, zero actions (as near
                  as the bounds allow) are executed

``Step.executed`` is the command, clipped to the bounds, as on a robot that does not know what its motors make of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from sims import catalog
from sims.base import BaseEnv
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation, Observe, Snapshot, Snapshots, Step, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import RANDOMIZATION, Parameter, Randomization, VariableEnv, declare_task, parameter_generator
from vla_rl.contract.tracker import EpisodeTracker, restore_rows, select_rows

MOST_LATENCY = 6  # control steps
ACTION_PARAMETERS = (
    Parameter("action_noise", 0.0, 0.0, 1.0, "half ranges", "standard deviation of the noise on executed actions"),
    Parameter("latency", 0.0, 0.0, MOST_LATENCY, "control steps", "delay of every command", integer=True),
)
_NOISE = "action_noise/samples"  # names the generator of the noise, which is another than that of its deviation
_OWN = "randomize/"  # prefix of this wrapper's arrays in a snapshot


class RandomizedEnv(BaseEnv):
    """``env`` with parameters drawn for every episode (``VecEnv``); see the module's docstring.

    ``extras[RANDOMIZATION]`` float32 [E,P] holds the values of all parameters, nominal where they are not varied;
    ``names`` of its spec are theirs.
    """

    def __init__(self, env: VecEnv, declared: Sequence[Parameter], randomization: Randomization) -> None:
        """``declared``: the parameters that the reset of ``env`` takes; raises UserError when others are described."""
        self.env, self.randomization = env, randomization
        if hasattr(env, "render_rows"):  # pictures for videos
            self.render_rows = env.render_rows
        self.parameters = (*declared, *ACTION_PARAMETERS)
        self.spec = randomized_spec(env.spec, declared, randomization)
        varied = [parameter.name for parameter in declared if parameter.name in randomization.distributions]
        self._columns = {parameter.name: column for column, parameter in enumerate(self.parameters)}
        self._varied = {name: self._columns[name] for name in varied}
        action, num_envs = env.spec.action, env.num_envs
        low, high = (np.full(action.shape, bound, action.dtype) for bound in (action.low, action.high))
        self._half_range = (high - low) / 2
        self._neutral = np.clip(np.zeros_like(low), low, high)
        self._book = EpisodeTracker(num_envs)
        self._values = np.tile([parameter.nominal for parameter in self.parameters], (num_envs, 1))
        self._pending = np.tile(self._neutral, (num_envs, MOST_LATENCY, 1))  # commands that are still on their way
        self._noise = np.zeros((num_envs, env.spec.time_limit, *action.shape), np.float32)  # of the whole episode

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R]) and the parameters of these seeds."""
        index, seed = self._checked(env_ids, seeds)
        values = self.randomization.draw(self.parameters, seed)
        given = {name: values[:, column] for name, column in self._varied.items()}
        obs = cast(VariableEnv, self.env).reset(index, seed, given) if given else self.env.reset(index, seed)
        self._book.begin(index, seed)
        self._values[index], self._pending[index] = values, self._neutral
        self._draw_noise(index)
        return self._with_record(obs)

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] late and with noise; see ``VecEnv.step``."""
        command = self._book.chunk(chunk, self.spec)
        step = self.env.step(self._executed(command), observe)
        changed = (self._value("action_noise") > 0) | (self._value("latency") > 0)
        as_commanded = (changed[:, None] & step.valid & ~step.intervened)[..., None]
        self._book.time[:] = step.obs.time
        self._book.terminated[:], self._book.truncated[:] = step.terminated, step.truncated
        return replace(
            step,
            obs=self._with_record(step.obs),
            executed=np.where(as_commanded, command, step.executed),
            frames=tuple(map(self._with_record, step.frames)),
        )

    def close(self) -> None:
        self.env.close()

    def _value(self, name: str) -> np.ndarray:
        """float64 [E]: parameter ``name`` in every environment."""
        return self._values[:, self._columns[name]]

    def _executed(self, command: np.ndarray) -> np.ndarray:
        """What the actuators make of ``command`` [E,H,D]; what is late stays in ``_pending``."""
        horizon, action = command.shape[1], command.copy()
        late = self._value("latency").astype(int)
        for delay in set(late.tolist()) - {0}:
            rows = np.flatnonzero(late == delay)
            queue = np.concatenate([self._pending[rows, :delay], command[rows]], axis=1)
            action[rows], self._pending[rows, :delay] = queue[:, :horizon], queue[:, horizon:]
        noise = self._value("action_noise")
        rows = np.flatnonzero(noise)
        if rows.size:
            when = np.minimum(self._book.time[rows, None] + np.arange(horizon), self.spec.time_limit - 1)
            scale = noise[rows, None, None] * self._half_range
            action[rows] += (scale * self._noise[rows[:, None], when]).astype(np.float32)
        return action  # the environment clips it

    def _draw_noise(self, env_ids: np.ndarray) -> None:
        """Unit noise for the episodes of ``env_ids``, from their seeds."""
        for env_id in env_ids[self._value("action_noise")[env_ids] > 0].tolist():
            rng = parameter_generator(int(self._book.seed[env_id]), _NOISE)
            self._noise[env_id] = rng.standard_normal(self._noise.shape[1:], np.float32)

    def _with_record(self, obs: Observation) -> Observation:
        return replace(obs, extras={**obs.extras, RANDOMIZATION: self._values.astype(np.float32)})


class RandomizedSnapshots(RandomizedEnv):
    """The same for an environment with snapshots (``Snapshots``); parameters and late commands are part of them."""

    env: Any

    def snapshot(self, env_ids: Any) -> Snapshot:
        inner: Snapshot = self.env.snapshot(env_ids)
        return inner | select_rows(self._arrays(), self._book.index(env_ids))

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        index = self._book.index(env_ids)
        own = {name: item for name, item in snapshot.items() if name.startswith(_OWN)}
        restored = {name: item.copy() for name, item in self._arrays().items()}
        restore_rows(restored, index, own)
        obs = self.env.restore(env_ids, {name: item for name, item in snapshot.items() if name not in own})
        for name, item in self._arrays().items():
            item[:] = restored[name]
        self._draw_noise(index)  # it follows from the seeds
        return self._with_record(obs)

    def _arrays(self) -> dict[str, np.ndarray]:
        own = {"values": self._values, "pending": self._pending, **self._book.arrays()}
        return {_OWN + name: item for name, item in own.items()}


def randomized_spec(spec: EnvSpec, declared: Sequence[Parameter], randomization: Randomization) -> EnvSpec:
    """The spec with the record of all parameters; raises UserError for what cannot be varied as described."""
    parameters = (*declared, *ACTION_PARAMETERS)
    randomization.check(parameters, spec.name)
    if spec.device != "cpu":
        raise UserError(
            f"{spec.name!r} computes on {spec.device!r}, but only environments in numpy can be randomized; use its own "
            "options for that."
        )
    if not np.issubdtype(np.dtype(spec.action.dtype), np.floating) and "action_noise" in randomization.distributions:
        raise UserError(
            f"the actions of {spec.name!r} are {spec.action.dtype}, to which no noise can be added; leave "
            "'action_noise' out."
        )
    record = ArraySpec(
        (len(parameters),),
        "float32",
        tuple(parameter.low for parameter in parameters),
        tuple(parameter.high for parameter in parameters),
        unit=",".join(parameter.unit for parameter in parameters),
        names=tuple(parameter.name for parameter in parameters),
    )
    return replace(spec, name=f"randomized {spec.name}", extras={**spec.extras, RANDOMIZATION: record})


def parameters_of(env: str, options: Mapping[str, Any] | None = None) -> tuple[Parameter, ...]:
    """All parameters of environment ``env`` with ``options`` that :func:`make` can vary."""
    return (*catalog.parameters(env, **(options or {})), *ACTION_PARAMETERS)


def spec(
    env: str = "lift", options: Mapping[str, Any] | None = None, parameters: Mapping[str, Any] | None = None
) -> EnvSpec:
    """The spec of :func:`make` with the same options."""
    given = options or {}
    declared = catalog.parameters(env, **given)
    return randomized_spec(catalog.spec_of(env, **given), declared, Randomization.from_json(parameters or {}))


@declare_task(spec=spec, wraps=True)
def make(
    num_envs: int,
    env: str = "lift",
    options: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> RandomizedEnv:
    """Environment ``env`` of the catalogue (or "package.module:make") with ``options`` and varying ``parameters``.

    parameters  {name: number | {"low": a, "high": b} | {"values": [...]}}: drawn anew for every episode, see
                ``Randomization``; :func:`parameters_of` lists them

    Raises UserError for a parameter that ``env`` does not declare.
    """
    given = options or {}
    declared, randomization = catalog.parameters(env, **given), Randomization.from_json(parameters or {})
    randomization.check((*declared, *ACTION_PARAMETERS), env)  # before anything is built
    made = catalog.make(env, num_envs=num_envs, **given)
    kind = RandomizedSnapshots if isinstance(made, Snapshots) else RandomizedEnv
    return kind(made, declared, randomization)
