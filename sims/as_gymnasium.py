"""Our environments as Gymnasium's: importing this module registers ``vla_rl/NAME-v0`` for all of the catalogue.

    import gymnasium
    import sims.as_gymnasium  # or name the module in the id: "sims.as_gymnasium:vla_rl/lift-v0"

    env = gymnasium.make("vla_rl/lift-v0", render_mode="rgb_array")
    envs = gymnasium.make_vec("vla_rl/lift-v0", num_envs=16, privileged=True, render=False)

An environment of your own is ``gymnasium.make("vla_rl/custom-v0", environment="package.module:make")``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from sims import catalog
from vla_rl.contract.env import PRIVILEGED, ArraySpec, EnvSpec, Observation, Step, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load

Info: TypeAlias = dict[str, Any]
Seeds: TypeAlias = int | Sequence[int | None] | None
Potential: TypeAlias = Callable[[Observation], np.ndarray]
"""How far episodes have come, float [E], from observations with ``privileged/*``."""
_HIGHEST_SEED = 2**31
_PICTURE = 256  # pixels of pictures for people


def _no_potential(obs: Observation) -> np.ndarray:
    return np.zeros(len(obs.time))


class GymnasiumVectorEnv(VectorEnv[Any, Any, np.ndarray]):
    """An environment of ours as a Gymnasium vector environment: all rows are simulated together.

    observation  the public parts, see ``ObservationView``; with ``privileged`` also those that only critics may see
    action       scaled to [-1, 1], or in physical units with ``rescale_actions=False``; indices where they are discrete
    info         "is_success" bool [E] and "cause" [E] ("" while the episode runs), with Gymnasium's masks

    All three autoreset modes are offered, and ``reset(options={"reset_mask": ...})``.  The first episode of a row has
    the seed that ``reset`` is given (number, number + 1, ... for one number), so it is the episode that we play with
    that seed; later ones are drawn from a generator with that seed, as in a single environment.

    ``potential`` adds its increase to the reward: potential-based shaping (Ng, Harada, Russell 1999), which does not
    change what the best policy is as long as rewards are not discounted.
    """

    def __init__(
        self,
        env: VecEnv,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        privileged: bool = False,
        rescale_actions: bool = True,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        potential: Potential = _no_potential,
    ) -> None:
        """Owns ``env``; ``max_episode_steps`` truncates episodes earlier than its own time limit."""
        self.env, self.num_envs = env, env.num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.render_mode, self._limit = render_mode, max_episode_steps or env.spec.time_limit
        self.view, self.scale = ObservationView(env.spec, privileged), ActionScale(env.spec, rescale_actions)
        self.single_observation_space, self.single_action_space = self.view.space, self.scale.space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**metadata(env.spec), "autoreset_mode": self.autoreset_mode}
        self._generators = [np.random.default_rng() for _ in range(self.num_envs)]
        self._ended = np.zeros(self.num_envs, bool)  # rows that idle until their reset
        self._potential = potential
        self._obs: Observation | None = None

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start episodes in all rows, or in those of ``options["reset_mask"]`` bool [E].

        ``seed``: one number, one per row (None: the next one of the row's own generator), or None for all.
        """
        mask = np.asarray((options or {}).get("reset_mask", np.ones(self.num_envs, bool)), bool)
        if seed is None or isinstance(seed, int | np.integer):
            seed = [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        return self.view(self._begin(np.flatnonzero(mask), seed)), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, Info]:
        """One action in every row; see the class for what is returned."""
        idle = self._ended
        if self.autoreset_mode == AutoresetMode.DISABLED and idle.any():
            raise gymnasium.error.ResetNeeded(
                f"the episodes of rows {np.flatnonzero(idle).tolist()} have ended, so they cannot be stepped; reset "
                "them by reset(options={'reset_mask': mask}) or choose another autoreset_mode."
            )
        step = self.env.step(self.scale.to_env(np.asarray(actions))[:, None])
        assert self._obs is not None  # step refuses environments that were never reset
        shaped = step.reward[:, 0] + self._potential(step.obs) - self._potential(self._obs)
        late = (step.obs.time >= self._limit) & ~step.terminated
        self._obs, terminated, truncated = step.obs, step.terminated & ~idle, (step.truncated | late) & ~idle
        ended = terminated | truncated
        restarts = {
            AutoresetMode.NEXT_STEP: idle,  # instead of the step
            AutoresetMode.SAME_STEP: ended,  # after it
            AutoresetMode.DISABLED: np.zeros_like(ended),
        }[self.autoreset_mode]
        infos = _infos(step, ~restarts)
        if self.autoreset_mode == AutoresetMode.SAME_STEP and ended.any():
            infos |= self._final(step, ended)
        self._ended = ended.copy()
        obs = self._begin(np.flatnonzero(restarts), [None] * self.num_envs) if restarts.any() else step.obs
        return self.view(obs), np.where(idle, 0.0, shaped), terminated, truncated, infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        """A picture uint8 [h,w,3] of every row; None without ``render_mode``."""
        return None if self.render_mode is None else tuple(pictures(self.env, self._obs))

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()

    def _begin(self, env_ids: np.ndarray, seeds: Sequence[int | None]) -> Observation:
        """Reset ``env_ids`` with their entries of ``seeds`` (None: drawn); returns all observations."""
        chosen = []
        for env_id in env_ids.tolist():
            seed = seeds[env_id]
            if seed is not None:
                self._generators[env_id] = np.random.default_rng(seed)
            chosen.append(next_seed(self._generators[env_id]) if seed is None else seed)
        self._ended[env_ids] = False
        self._obs = self.env.reset(env_ids, np.array(chosen, np.int64))
        return self._obs

    def _final(self, step: Step, ended: np.ndarray) -> Info:
        """Gymnasium's "final_obs" and "final_info" of the rows that ``ended`` and restart in the same step."""
        final = np.full(self.num_envs, None, object)
        for env_id in np.flatnonzero(ended):
            final[env_id] = self.view.row(step.obs, int(env_id))
        masks = {"_final_obs": ended.copy(), "_final_info": ended.copy()}
        return {"final_obs": final, "final_info": _infos(step, ended), **masks}


class GymnasiumEnv(gymnasium.Env[Any, Any]):
    """One environment of ours as a Gymnasium environment; see ``GymnasiumVectorEnv`` for what is seen and done.

    ``reset(seed=s)`` plays the episode that we play with seed ``s``; without a seed the next one is drawn from
    ``np_random``.
    """

    def __init__(self, rows: GymnasiumVectorEnv) -> None:
        """Owns ``rows``, which has one row and the autoreset mode Disabled."""
        self._rows, self.render_mode = rows, rows.render_mode
        self.observation_space, self.action_space = rows.single_observation_space, rows.single_action_space
        self.metadata = metadata(rows.env.spec)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        obs, _ = self._rows.reset(seed=next_seed(self.np_random) if seed is None else seed)
        return _first(obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        obs, reward, terminated, truncated, infos = self._rows.step(np.asarray(action)[None])
        info = {"is_success": bool(infos["is_success"][0]), "cause": infos["cause"][0]}
        return _first(obs), float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self) -> Any:
        """A picture uint8 [h,w,3]; None without ``render_mode``."""
        found = self._rows.render()
        return None if found is None else found[0]

    def close(self) -> None:
        self._rows.close()


def _first(obs: Any) -> Any:
    """The observation of the first row of ``obs``."""
    return {name: part[0] for name, part in obs.items()} if isinstance(obs, dict) else obs[0]


def make(environment: str, **options: Any) -> GymnasiumEnv:
    """What ``gymnasium.make`` calls; ``options`` as of :func:`make_vec`."""
    return GymnasiumEnv(make_vec(environment, 1, autoreset_mode=AutoresetMode.DISABLED, **options))


def make_vec(environment: str, num_envs: int = 1, potential: str = "", **options: Any) -> GymnasiumVectorEnv:
    """What ``gymnasium.make_vec`` calls; ``environment`` is in the catalogue or "package.module:make".

    ``options`` are those of :class:`GymnasiumVectorEnv`, with ``potential`` as "module:name", and of the environment.
    """
    names = ("autoreset_mode", "privileged", "rescale_actions", "render_mode", "max_episode_steps")
    shown = {name: options.pop(name) for name in names if name in options}
    shaped: dict[str, Any] = {"potential": load(potential)} if potential else {}
    return GymnasiumVectorEnv(catalog.make(environment, num_envs=num_envs, **options), **shown, **shaped)


def next_seed(generator: np.random.Generator) -> int:
    """The seed of a row's next episode."""
    return int(generator.integers(_HIGHEST_SEED))


def metadata(spec: EnvSpec) -> dict[str, Any]:
    """Gymnasium's metadata: pictures are offered where the environment has a camera."""
    modes = ["rgb_array"] if spec.images else []
    return {"render_modes": modes, "render_fps": max(1, round(1 / spec.control_dt))}


def pictures(env: VecEnv, obs: Observation | None) -> np.ndarray:
    """uint8 [E,h,w,3]: rendered for people where the environment can, else the images of its first camera."""
    if obs is None:
        raise gymnasium.error.ResetNeeded("there is no episode, so there is nothing to render; call reset() first.")
    if hasattr(env, "render_rows"):
        return env.render_rows(np.arange(env.num_envs), _PICTURE)
    return next(iter(obs.images.values())).copy()


def _infos(step: Step, shown: np.ndarray) -> Info:
    """What is known of the rows in ``shown`` bool [E], as Gymnasium's arrays with masks."""
    if not shown.any():
        return {}
    cause = np.array(step.cause, object)
    cause[~shown] = None
    masks = {"_is_success": shown.copy(), "_cause": shown.copy()}
    return {"is_success": step.success & shown, "cause": cause, **masks}


def _register() -> None:
    """Register the catalogue; "gym" is left out, as its environments are Gymnasium's own."""
    one, several = f"{__name__}:make", f"{__name__}:make_vec"
    for name in catalog.CATALOG.keys() - {"gym"}:
        gymnasium.register(f"vla_rl/{name}-v0", one, vector_entry_point=several, kwargs={"environment": name})
    gymnasium.register("vla_rl/custom-v0", one, vector_entry_point=several)


_register()


class ObservationView:
    """Observations as Gymnasium's.

    Parts: "state", "images/CAMERA", "task" (the index of the instruction, where there are several) and the extras by
    their names; ``privileged/*`` only when asked for.  The space is a Dict of the parts, or the part itself when there
    is one only.  Single numbers have shape (1,), and numbers are clipped to the declared bounds, which they may miss by
    rounding.
    """

    def __init__(self, spec: EnvSpec, privileged: bool) -> None:
        """Raises UserError when nothing of the environment can be seen."""
        self._parts: dict[str, tuple[Space[Any], Callable[[Observation], np.ndarray]]] = {}
        if spec.state.shape[0]:
            self._parts["state"] = _box(spec.state), lambda obs: _within(obs.state, spec.state)
        for name, image in spec.images.items():
            self._parts[f"images/{name}"] = _box(image), partial(_image, name)
        if len(spec.tasks) > 1:
            self._parts["task"] = Discrete(len(spec.tasks)), lambda obs: obs.task.copy()
        for name, extra in spec.extras.items():
            if privileged or not name.startswith(PRIVILEGED):
                self._parts[name] = _box(extra), partial(_extra, name, extra)
        if not self._parts:
            raise UserError(
                f"{spec.name!r} has neither state nor images to show, so Gymnasium's learners would see nothing; ask "
                "for privileged=True or for images."
            )
        self._alone = len(self._parts) == 1
        spaces = {name: space for name, (space, _) in self._parts.items()}
        self.space: Space[Any] = next(iter(spaces.values())) if self._alone else Dict(spaces)

    def __call__(self, obs: Observation) -> Any:
        """The observations of all environments, [E,...]."""
        parts = {name: get(obs) for name, (_, get) in self._parts.items()}
        return next(iter(parts.values())) if self._alone else parts

    def row(self, obs: Observation, env_id: int) -> Any:
        whole = self(obs.select(np.array([env_id])))
        return whole[0] if self._alone else {name: part[0] for name, part in whole.items()}


class ActionScale:
    """Actions as Gymnasium's: a Box within [-1, 1], or in physical units; Discrete or MultiDiscrete for indices."""

    def __init__(self, spec: EnvSpec, rescale: bool) -> None:
        low, high = (np.broadcast_to(np.asarray(b), spec.action.shape) for b in (spec.action.low, spec.action.high))
        self._shape = spec.action.shape
        self._offset, self._scale = np.zeros_like(low), np.ones_like(high)
        if spec.discrete:
            self.space: Space[Any] = MultiDiscrete(high - low + 1, start=low)
            if spec.action_dim == 1:
                self.space = Discrete(int(high[0] - low[0] + 1), start=int(low[0]))
        elif rescale:
            self._offset, self._scale = (low + high) / 2, (high - low) / 2
            self.space = Box(-1.0, 1.0, spec.action.shape, np.float32)
        else:
            self.space = Box(low.astype(np.float32), high.astype(np.float32))

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Our actions [E,D] for Gymnasium's ``actions`` [E,...]."""
        return self._offset + self._scale * actions.reshape(len(actions), *self._shape)


def _box(spec: ArraySpec) -> Box:
    dtype = np.dtype(np.uint8 if spec.dtype == "bool" else spec.dtype)
    shape = spec.shape or (1,)
    low, high = (np.broadcast_to(np.asarray(bound, dtype), shape) for bound in (spec.low, spec.high))
    return Box(low, high, dtype=dtype.type)


def _within(values: np.ndarray, spec: ArraySpec) -> np.ndarray:
    """A copy of ``values`` [E,...] within the declared bounds; single numbers as [E,1]."""
    shaped = values.reshape(len(values), *(spec.shape or (1,)))
    if spec.dtype == "bool":
        return shaped.astype(np.uint8)
    return np.clip(shaped, np.asarray(spec.low, shaped.dtype), np.asarray(spec.high, shaped.dtype))


def _extra(name: str, spec: ArraySpec, obs: Observation) -> np.ndarray:
    return _within(obs.extras[name], spec)


def _image(name: str, obs: Observation) -> np.ndarray:
    return obs.images[name].copy()
