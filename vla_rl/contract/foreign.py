"""Cheap checks of an environment and a policy that somebody else wrote: one sentence for each mistake, before training.

``check.py`` compares everything over whole episodes; here a reset and a few steps show what would otherwise end in a
traceback in the middle of a rollout, or teach the policy something false.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from vla_rl.contract.check import check_env, check_observation, check_policy, check_step, profile_of, random_actions
from vla_rl.contract.env import Observation, Step, VecEnv, on_host
from vla_rl.contract.errors import ContractError
from vla_rl.contract.spec import ArraySpec, EnvSpec

_ENV_METHODS = {"reset": ("env_ids", "seeds"), "step": ("chunk", "observe"), "close": ()}
_POLICY_METHODS = {
    "encode": ("obs",),
    "initial_state": ("num_envs",),
    "reset_state": ("state", "env_ids"),
    "act": ("features", "state", "mode", "generator"),
}
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_STEPS = 3
T = TypeVar("T")


def check_env_quickly(env: Any, seed: int = 0) -> None:
    """Check the methods and the spec of ``env``, then reset it and execute a few random actions.

    One whose profile is "hardware" is looked at only.  Raises ContractError with one sentence about the first mistake.
    """
    name = f"environment {type(env).__name__!r}"
    for attribute in ("spec", "num_envs"):
        if not hasattr(env, attribute):
            raise _lacks(name, attribute, "see vla_rl.contract.env.VecEnv")
    _check_methods(name, env, _ENV_METHODS, "VecEnv")
    check_spec(env.spec)
    if not profile_of(env.spec).moves:
        check_env(env)
        return
    env_ids = np.arange(env.num_envs)
    obs = _returned(f"reset of {name}", env.reset(env_ids, seed + env_ids), Observation)
    require_finite_observation(env, obs, seed + env_ids)
    check_observation(obs, env.spec, env.num_envs)
    horizon, rng = min(2, env.spec.max_chunk), np.random.default_rng(seed)
    for i in range(_STEPS):
        chunk = random_actions(env, horizon, rng)
        step = _returned(f"step of {name}", env.step(chunk, observe="all" if i == 0 else "last"), Step)
        require_finite_step(env, step, seed + env_ids)
        check_step(step, env.spec, env.num_envs, horizon)
        for frame in step.frames:
            check_observation(frame, env.spec, env.num_envs)
        if i == 0 and len(step.frames) != horizon:
            raise ContractError(
                f'step of {name} returned {len(step.frames)} frames for {horizon} actions with observe="all", so '
                "datasets and videos would be incomplete; return the observation after every action."
            )
    env.reset(env_ids, seed + env_ids)


def check_policy_quickly(
    policy: Any, env: VecEnv, generator: Any, needs: Sequence[str] = ("save_pretrained", "trainable", "feature_sizes")
) -> None:
    """Check the methods of ``policy`` and what is in ``needs``, then let it act in ``env``, which is reset.

    Raises ContractError with one sentence about the first mistake.
    """
    check_policy_methods(policy, needs)
    check_policy(policy, env, generator)


def is_foreign(policy: object) -> bool:
    """Whether somebody else wrote the class of ``policy``; ours are checked by the tests."""
    return not type(policy).__module__.startswith("vla_rl.")


def check_policy_methods(policy: Any, needs: Sequence[str]) -> None:
    """Raise ContractError unless ``policy`` has the methods of a policy, and what is in ``needs``."""
    name = f"policy {type(policy).__name__!r}"
    if not hasattr(policy, "version"):
        raise _lacks(name, "version", "set it to 0 (it counts the published weights)")
    _check_methods(name, policy, _POLICY_METHODS, "Policy")
    for needed in needs:
        if getattr(policy, needed, None) is None:
            raise _lacks(name, needed, "training uses it; see docs on bringing a policy")


def check_spec(spec: Any) -> None:
    """Raise ContractError unless ``spec`` is an EnvSpec whose parts fit together."""
    _returned("spec", spec, EnvSpec)
    for name, array in {**spec.images, **spec.extras, "state": spec.state, "action": spec.action}.items():
        _check_array_spec(name, array)
    for name, image in spec.images.items():
        _require(image.dtype == "uint8" and len(image.shape) == 3, f"images[{name!r}]", "uint8 with shape (h, w, c)")
    _require(spec.state.dtype == "float32" and len(spec.state.shape) == 1, "state", "float32 with a shape of one axis")
    kinds = ("float32", "int64")
    _require(spec.action.dtype in kinds and len(spec.action.shape) == 1, "action", "float32 or int64 with one axis")
    texts = isinstance(spec.tasks, tuple) and spec.tasks and all(isinstance(text, str) for text in spec.tasks)
    _require(bool(texts), "tasks", "a tuple of at least one instruction")
    _require(spec.control_dt > 0, "control_dt", "positive, in seconds")
    _require(isinstance(spec.time_limit, int) and spec.time_limit >= 1, "time_limit", "an integer of at least 1")
    _require(isinstance(spec.max_chunk, int) and spec.max_chunk >= 1, "max_chunk", "an integer of at least 1")
    _require(spec.success in ("once", "at_end", None), "success", '"once", "at_end" or None')


def require_finite_observation(env: VecEnv, obs: Observation, seeds: np.ndarray) -> None:
    """Raise ContractError, naming environment, id, seed and time step, if an observation holds a NaN or infinity."""
    for name, array in {"state": obs.state, **{f"extras[{key!r}]": item for key, item in obs.extras.items()}}.items():
        _require_finite(env, name, array, obs, seeds)


def require_finite_step(env: VecEnv, step: Step, seeds: np.ndarray) -> None:
    """Raise ContractError, naming environment, id, seed and time step, if a reward or observation is not finite.

    The host waits for a device once for every array; ``read_step`` finds out in one transfer whether to ask.
    """
    _require_finite(env, "reward", step.reward, step.obs, seeds)
    require_finite_observation(env, step.obs, seeds)


def _require_finite(env: VecEnv, name: str, array: Any, obs: Observation, seeds: np.ndarray) -> None:
    finite = _finite(array)
    if bool(finite.all()):
        return
    env_id = int(np.argwhere(~on_host(finite))[0][0])
    raise ContractError(
        f"environment {env.spec.name!r} returned a {name} that is not finite in environment {env_id} (seed "
        f"{int(seeds[env_id])}, time step {int(obs.time[env_id])}), so nothing can be learnt from it; correct the "
        "environment, or truncate such an episode and return its last finite observation."
    )


def _finite(array: Any) -> Any:
    """bool like ``array``; of a tensor where the tensor is."""
    if hasattr(array, "isfinite"):
        return array.isfinite()
    values = np.asarray(array)
    return np.isfinite(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)


def _check_methods(name: str, subject: Any, methods: dict[str, tuple[str, ...]], protocol: str) -> None:
    """Raise ContractError unless ``subject`` has ``methods`` and each takes its arguments."""
    where = "env" if protocol == "VecEnv" else "policy"
    for method, arguments in methods.items():
        call = f"{method}({', '.join(arguments)})"
        found: Callable[..., Any] | None = getattr(subject, method, None)
        if not callable(found):
            raise _lacks(name, method, f"implement {call}, see vla_rl.contract.{where}.{protocol}")
        keywords = {argument: argument for argument in arguments if argument == "observe"}  # always passed by name
        try:
            inspect.signature(found).bind(*(name for name in arguments if name not in keywords), **keywords)
        except TypeError as error:
            raise ContractError(
                f"{method} of {name} cannot be called as {call} ({error}), so nothing can run; give it these "
                f"arguments, see vla_rl.contract.{where}.{protocol}."
            ) from error


def _lacks(name: str, attribute: str, cure: str) -> ContractError:
    return ContractError(f"{name} has no {attribute!r}, so it cannot be trained with; {cure}.")


def _returned(what: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise ContractError(
            f"{what} is a {type(value).__name__}, not a {kind.__module__}.{kind.__name__}, so nothing can be read from "
            f"it; return a {kind.__name__}."
        )
    return value


def _check_array_spec(name: str, array: Any) -> None:
    _returned(f"the spec of {name}", array, ArraySpec)
    sizes = isinstance(array.shape, tuple) and all(isinstance(size, int) and size > 0 for size in array.shape)
    _require(sizes, f"shape of {name}", "a tuple of positive integers, without the axis of environments")
    known = isinstance(array.dtype, str) and array.dtype in _DTYPES
    _require(known, f"dtype of {name}", "the name of a number type of numpy, such as 'float32'")
    for end in ("low", "high"):
        bound = np.asarray(getattr(array, end))
        fits = bound.dtype.kind in "iuf" and bound.shape in ((), array.shape[-1:])
        _require(fits, f"{end} of {name}", "one number, or one per entry of the last axis")
    _require(bool(np.all(np.asarray(array.low) <= np.asarray(array.high))), f"low of {name}", "at most its high")
    labels = not array.names or len(array.names) == (array.shape[-1] if array.shape else 0)
    _require(labels, f"names of {name}", "one per entry of the last axis, or empty")


def _require(holds: bool, what: str, wanted: str) -> None:
    if not holds:
        raise ContractError(f"the spec's {what} is wrong, so the data would be misread; it has to be {wanted}.")
