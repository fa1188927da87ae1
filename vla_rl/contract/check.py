"""Compare what environments and policies deliver with their specs: for tests, ``vla-rl inspect``, training and robots.

:func:`check_env` plays whole episodes.  :func:`check_env_quickly` takes a reset and a few steps of what a user wrote,
to say in one sentence what would end in a traceback in the middle of a rollout, or teach the policy something false.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from vla_rl.contract.env import ArraySpec, EnvSpec, Observation, Snapshots, Step, VecEnv, on_host
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut, Features, LikelihoodPolicy, Policy, State, encode_observation


@dataclass(frozen=True)
class Profile:
    """What is expected of an environment when one episode is played twice.

    tolerance  by how much two plays may differ: numbers relatively and absolutely, a picture on average and as a share
               of its range; indices and flags never
    moves      whether a check may start episodes and execute actions
    """

    tolerance: float
    moves: bool = True

    def alike(self, one: Any, other: Any) -> bool:
        """Whether two arrays [E,...] of two plays agree; raises nothing for different shapes, which do not."""
        a, b = on_host(one), on_host(other)
        if not self.tolerance or a.shape != b.shape or a.dtype.kind in "bi":
            return np.array_equal(a, b)
        if a.dtype == np.uint8:
            apart = np.abs(a.astype(float) - b.astype(float)).reshape(a.shape[0], -1)
            return not a.size or bool((apart.mean(1) <= self.tolerance * 255).all())
        return np.allclose(a, b, rtol=self.tolerance, atol=self.tolerance)

    def __str__(self) -> str:
        return f"within {self.tolerance:g}" if self.tolerance else "bit for bit"


PROFILES = {"bitwise": Profile(0.0), "tolerant": Profile(1e-3), "hardware": Profile(0.0, moves=False)}
"""From the strictest: simulators on a processor; physics on a GPU, whose sums have no fixed order; robots."""


def profile_of(spec: EnvSpec) -> Profile:
    """The profile that ``spec`` names; raises ContractError for an unknown one."""
    if spec.profile not in PROFILES:
        raise ContractError(
            f"the spec of {spec.name!r} names the profile {spec.profile!r}, so nobody knows whether a check may move "
            f"it; choose one of {', '.join(PROFILES)}."
        )
    return PROFILES[spec.profile]


def loosest(specs: Iterable[EnvSpec]) -> str:
    """The name of the least strict profile of ``specs``: that of an environment which consists of theirs."""
    order = list(PROFILES)
    return max((spec.profile for spec in specs), key=order.index)


_TOLERANCE = 1e-5
_EXACTLY = PROFILES["bitwise"]


@dataclass(frozen=True)
class Checked:
    """One line of a report: the name of a check and its result."""

    name: str
    result: str


def check_env(env: VecEnv, seed: int = 0) -> list[Checked]:
    """Run ``env`` for a few episodes and compare all it delivers with its spec and with the contract.

    Two plays of one episode have to agree as ``spec.profile`` says.  All environments are reset at the end.  One whose
    profile is "hardware" is looked at only: no episode starts and no action is executed.  Raises ContractError naming
    the first violation.
    """
    env_ids, seeds = np.arange(env.num_envs), seed + np.arange(env.num_envs)
    if not profile_of(env.spec).moves:
        return [Checked("observation", _check_at_rest(env))]
    parts = {
        "observation": _check_reset,
        "episode": _check_episode,
        "idle environments": _check_idle,
        "determinism": _check_repeats,
        "chunking": _check_chunking,
        "validation": _check_refuses,
        "snapshot": _check_snapshot,
    }
    found = [Checked(name, check(env, env_ids, seeds)) for name, check in parts.items()]
    env.reset(env_ids, seeds)
    return found


def observe_at_rest(env: VecEnv) -> Observation:
    """The observation of all environments at this moment; none is reset."""
    nobody = np.zeros(0, np.int64)
    return env.reset(nobody, nobody)


def check_observation(obs: Observation, spec: EnvSpec, num_envs: int) -> None:
    """Raise ContractError unless ``obs`` of ``num_envs`` environments fits ``spec``."""
    _same_names("images", obs.images, spec.images)
    _same_names("extras", obs.extras, spec.extras)
    for name, image in obs.images.items():
        check_array(f"images[{name!r}]", image, spec.images[name], (num_envs,))
    for name, extra in obs.extras.items():
        check_array(f"extras[{name!r}]", extra, spec.extras[name], (num_envs,))
    check_array("state", obs.state, spec.state, (num_envs,))
    check_array("task", obs.task, ArraySpec((), "int64", 0, len(spec.tasks) - 1), (num_envs,))
    check_array("time", obs.time, ArraySpec((), "int64", 0, spec.time_limit), (num_envs,))


def check_array(name: str, array: Any, spec: ArraySpec, lead: tuple[int, ...]) -> None:
    """Raise ContractError unless ``array`` has shape ``lead + spec.shape``, the declared dtype and range."""
    values = on_host(array)
    if values.shape != lead + spec.shape or str(values.dtype) != spec.dtype:
        raise ContractError(
            f"{name} is {values.dtype}{list(values.shape)} but {spec.dtype}{list(lead + spec.shape)} is declared, so "
            "it would be misread; correct the spec or the environment."
        )
    if values.size and values.dtype != np.bool_:
        low, high = np.asarray(spec.low, float), np.asarray(spec.high, float)
        numbers = values.astype(float)
        outside = ~((numbers >= low - _TOLERANCE) & (numbers <= high + _TOLERANCE))
        if outside.any():
            where = tuple(np.argwhere(outside)[0])
            low, high = (np.broadcast_to(bound, values.shape)[where] for bound in (low, high))
            raise ContractError(
                f"{name} holds {numbers.min():.6g}..{numbers.max():.6g}, outside its declared range {low:g}..{high:g} "
                f"in entry {where[-1]}, so normalisation would be wrong; correct the spec or the environment."
            )


def check_step(step: Step, spec: EnvSpec, num_envs: int, horizon: int) -> None:
    """Raise ContractError unless ``step`` fits ``spec`` and the contract's rules for ends and validity."""
    for obs in (step.obs, *step.frames):
        check_observation(obs, spec, num_envs)
    flag = ArraySpec((), "bool", 0, 1)
    for name in ("terminated", "truncated", "success"):
        check_array(name, getattr(step, name), flag, (num_envs,))
    for name in ("valid", "intervened"):
        check_array(name, getattr(step, name), flag, (num_envs, horizon))
    largest = float(np.finfo(np.float32).max)
    check_array("reward", step.reward, ArraySpec((), "float32", -largest, largest), (num_envs, horizon))
    low, high = np.minimum(spec.action.low, 0).tolist(), np.maximum(spec.action.high, 0).tolist()
    check_array("executed", step.executed, replace(spec.action, low=low, high=high), (num_envs, horizon))
    check_ends(step, spec, num_envs)


def check_ends(step: Step, spec: EnvSpec, num_envs: int) -> None:
    """Raise ContractError unless ``step`` follows the contract's rules for ends, causes and validity."""
    terminated, truncated, valid = on_host(step.terminated), on_host(step.truncated), on_host(step.valid)
    _require(not (terminated & truncated).any(), "an episode is terminated and truncated at once")
    _require(bool((np.diff(valid.astype(int), axis=1) <= 0).all()), "valid becomes True again inside a chunk")
    _require(bool(valid[~(terminated | truncated)].all()), "a running environment has an action that was not executed")
    _require(not on_host(step.reward)[~valid].any(), "an action that was not executed earned a reward")
    if spec.success is None:
        _require(not on_host(step.success).any(), "an episode succeeded although spec.success is None")
    _require(len(step.cause) == num_envs, f"cause has {len(step.cause)} entries for {num_envs} environments")
    for env, cause in enumerate(step.cause):
        ended = bool(terminated[env] or truncated[env])
        _require(bool(cause) == ended, f"environment {env} has the cause {cause!r} but ended={ended}")


def check_policy(policy: Policy, env: VecEnv, generator: Any, seed: int = 0) -> list[Checked]:
    """Let ``policy`` act in ``env`` and compare its outputs with the contract; raises ContractError.

    An environment whose profile is "hardware" is observed as it is, and the action is not executed.
    """
    env_ids = np.arange(env.num_envs)
    moves = profile_of(env.spec).moves
    obs = env.reset(env_ids, seed + env_ids) if moves else observe_at_rest(env)
    state = policy.reset_state(policy.initial_state(env.num_envs), env_ids)
    try:
        features, state = encode_observation(policy, obs, state, generator)
    except KeyError as error:
        raise ContractError(
            f"the policy reads {error}, which {env.spec.name!r} does not give to policies (privileged/* is for critics "
            "and rewards), so it could not be deployed; train it on public observations."
        ) from error
    _check_features(policy, features, env.num_envs)
    _check_out(_evaluated(policy, features, state, [generator] * env.num_envs), env)
    out, _ = policy.act(features, state, "sample", generator)
    _check_out(out, env)
    if moves:
        env.step(on_host(out.action))
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in features.items())
    found = [Checked("encode", shapes), Checked("act", "in bounds")]
    if isinstance(policy, LikelihoodPolicy):
        found.append(Checked("log-prob gap", _check_logprob_gap(policy, features, out)))
    return found


def _check_features(policy: Policy, features: Features, num_envs: int) -> None:
    """What critics and heads read: the entries of ``feature_sizes``, if the policy has it, and ``time``."""
    sizes = getattr(policy, "feature_sizes", None)
    name = type(policy).__name__
    for entry, size in {} if sizes is None else {**sizes, "time": 1}.items():
        if entry not in features:
            raise ContractError(
                f"encode of policy {name!r} gives {sorted(features)} but no {entry!r}, which critics read, so learning "
                f"would stop at the first update; add it, float [E,{size}] (see vla_rl.policies.heads)."
            )
        shape = list(features[entry].shape)
        if shape[:1] != [num_envs] or math.prod(shape[1:]) != size:
            raise ContractError(
                f"encode of policy {name!r} gives {entry!r} of shape {shape}, so critics cannot read it; make it "
                f"[{num_envs},{size}] for {num_envs} environments, or correct feature_sizes."
            )


def _evaluated(policy: Policy, features: Features, state: State, generators: list[Any]) -> ActionOut:
    """Decisions as an evaluation asks for them: with one generator per environment."""
    try:
        return policy.act(features, state, "eval", generators)[0]
    except TypeError as error:
        raise ContractError(
            f"act in mode 'eval' fails with a list of generators, one per environment ({error}), so the noise of an "
            "episode would depend on its neighbours; draw it by vla_rl.policies.noise.normal, or draw none."
        ) from error


def _check_logprob_gap(policy: LikelihoodPolicy, features: Features, out: ActionOut) -> str:
    """The largest gap; its bound is float32's for chains of up to 16 steps.  A flow without noise has no density."""
    try:
        recomputed = policy.log_prob(features, out.sample, out.aux).logprob
    except UserError as error:
        if isinstance(error, ContractError):
            raise
        return f"none: {error}"
    shapes = [list(on_host(item).shape) for item in (out.logprob, recomputed)]
    _require(shapes[0] == shapes[1], f"act gives log-probs {shapes[0]} but log_prob {shapes[1]}")
    gap = float(np.abs(on_host(recomputed) - on_host(out.logprob)).max())
    terms = float(np.prod(out.sample.shape[1:])) * 16.0
    _require(gap <= 1e-5 * terms**0.5, f"log_prob of a fresh sample is off by {gap:.2g}, so PPO's first ratio is not 1")
    return f"{gap:.2g}"


def _check_out(out: ActionOut, env: VecEnv) -> None:
    spec, action = env.spec, on_host(out.action)
    horizon = action.shape[1] if action.ndim == 3 else 0
    bounds = replace(spec.action, shape=(horizon, *spec.action.shape))
    check_array("action", action.astype(spec.action.dtype), bounds, (env.num_envs,))
    _require(1 <= horizon <= spec.max_chunk, f"the chunk has {horizon} actions but 1..{spec.max_chunk} are possible")
    parts = on_host(out.logprob).shape[1:]
    _require(on_host(out.logprob).shape[:1] == (env.num_envs,), "logprob needs one number per environment")
    _require(len(parts) < 2 and not sum(parts) % horizon, f"logprob has parts {list(parts)} for {horizon} actions")


def _check_at_rest(env: VecEnv) -> str:
    obs = observe_at_rest(env)
    check_observation(obs, env.spec, env.num_envs)
    later = observe_at_rest(env)
    _require(np.array_equal(on_host(obs.time), on_host(later.time)), "time counts although no action was executed")
    return f"{len(obs.images)} cameras, state {list(obs.state.shape)}; nothing was moved"


def _check_reset(env: VecEnv, env_ids: np.ndarray, seeds: np.ndarray) -> str:
    obs = env.reset(env_ids, seeds)
    check_observation(obs, env.spec, env.num_envs)
    _require(not on_host(obs.time).any(), "time is not 0 after a reset")
    copy = obs.select(env_ids)
    env.step(random_actions(env, 1, np.random.default_rng(5)))
    _require(_equal(obs, copy), "a returned observation is overwritten by the next step")
    return f"{len(obs.images)} cameras, state {list(obs.state.shape)}"


def _check_episode(env: VecEnv, env_ids: np.ndarray, seeds: np.ndarray) -> str:
    env.reset(env_ids, seeds)
    steps_taken, lengths = np.zeros(env.num_envs, int), np.unique([1, min(3, env.spec.max_chunk), env.spec.max_chunk])
    at_once = 0
    generator, before = np.random.default_rng(0), None
    for i in itertools.count():  # a clock that passes the time limit ends it too
        horizon, first = int(lengths[i % len(lengths)]), i < len(lengths)
        step = env.step(random_actions(env, horizon, generator), observe="all" if first else "last")
        check_step(step, env.spec, env.num_envs, horizon)
        steps_taken += on_host(step.valid).sum(1)
        _require(bool((steps_taken == on_host(step.obs.time)).all()), "time does not count the executed actions")
        if first:
            _require(len(step.frames) == horizon, f"observe='all' gave {len(step.frames)} frames for {horizon} actions")
            _require(_equal(step.frames[-1], step.obs), "the last frame differs from obs")
        _check_latched(before or step, step)
        at_once += int(on_host(step.success & step.done).sum()) if i == 0 else 0  # lengths[0] is 1
        before = step
        if on_host(step.done).all():
            break
    return f"{int(steps_taken.min())}..{int(steps_taken.max())} actions" + _oddities(step, at_once, env.spec)


def _oddities(step: Step, at_once: int, spec: EnvSpec) -> str:
    """What keeps the contract but can hardly be meant, after episodes of random actions."""
    diverged, found = list(step.cause).count("diverged"), ""
    if diverged:
        found += f"; {diverged} ended because something was not finite (diverged)"
    if at_once and spec.time_limit > 1:
        found += f"; {at_once} of {len(step.cause)} succeeded at their first action, a random one"
    return found


def _check_idle(env: VecEnv, env_ids: np.ndarray, seeds: np.ndarray) -> str:
    env.reset(env_ids, seeds)
    step, generator = env.step(random_actions(env, 1, np.random.default_rng(4))), np.random.default_rng(1)
    while not on_host(step.done).all():
        step = env.step(random_actions(env, env.spec.max_chunk, generator))
    later = env.step(random_actions(env, 1, generator))
    _require(not on_host(later.valid).any(), "an idle environment executed an action")
    _require(_equal(step.obs, later.obs), "an idle environment's observation changed")
    _check_latched(step, later)
    if env.num_envs > 1:
        obs, others = env.reset(env_ids[:1], seeds[:1]), env_ids[1:]
        same = _equal(obs.select(others), step.obs.select(others))
        _require(same, "resetting environment 0 changed another one")
    return "untouched"


def _check_latched(before: Step, after: Step) -> None:
    for env in map(int, np.flatnonzero(on_host(before.done))):
        one, other = ((bool(s.terminated[env]), bool(s.success[env]), s.cause[env]) for s in (before, after))
        _require(one == other, f"the end of environment {env} changed while it idled, from {one} to {other}")


def _check_repeats(env: VecEnv, env_ids: np.ndarray, seeds: np.ndarray) -> str:
    first = _play(env, env_ids, seeds, [2, 1])
    again = _same_episodes(first, _play(env, env_ids, seeds, [2, 1]), env_ids, profile_of(env.spec))
    _require(again, "the same seed and actions give another episode (does reset use its seed for all that it draws?)")
    reversed_ = _play(env, env_ids, seeds[::-1].copy(), [2, 1], reverse=True)
    profile, backwards = profile_of(env.spec), env_ids[::-1].copy()
    same = _same_episodes(first, reversed_, backwards, profile)
    _require(same, "an episode depends on its place or its neighbours")
    return f"same seed and actions, same episode in any place, {profile}"


def _check_chunking(env: VecEnv, env_ids: np.ndarray, seeds: np.ndarray) -> str:
    size = min(4, env.spec.max_chunk)
    whole, parts = _play(env, env_ids, seeds, [size]), _play(env, env_ids, seeds, [1] * size)
    profile = profile_of(env.spec)
    _require(_same_episodes(whole, parts, env_ids, profile), f"one chunk of {size} differs from {size} chunks of 1")
    return f"H={size} equals {size} x H=1"


def _check_refuses(env: VecEnv, env_ids: np.ndarray, seeds: np.ndarray) -> str:
    before = env.reset(env_ids, seeds)
    good = random_actions(env, 1, np.random.default_rng(2))
    with_nan, too_long = good.astype(np.float32), np.repeat(good, env.spec.max_chunk + 1, axis=1)
    with_nan[-1, 0, 0] = np.nan
    bad = {"a chunk without an action axis": good[:, 0], "a NaN": with_nan, "a chunk beyond max_chunk": too_long}
    for name, chunk in bad.items():
        try:
            env.step(chunk)
        except (ValueError, ArithmeticError):
            continue
        raise ContractError(
            f"{env.spec.name!r} executed {name}, which is unsafe on a robot; refuse it before anything moves."
        )
    _require(_equal(before, observe_at_rest(env)), "a refused chunk moved something")
    out_of_bounds = good + np.subtract(env.spec.action.high, env.spec.action.low).astype(good.dtype)
    check_step(env.step(out_of_bounds), env.spec, env.num_envs, 1)
    return "wrong shape and NaN refused"


def _check_snapshot(env: VecEnv, env_ids: np.ndarray, seeds: np.ndarray) -> str:
    _require(env.spec.can_snapshot == isinstance(env, Snapshots), "spec.can_snapshot is wrong")
    if not isinstance(env, Snapshots):
        return "not offered"
    profile = profile_of(env.spec)
    _play(env, env_ids, seeds, [1, 1])
    saved = env.snapshot(env_ids)
    obs = observe_at_rest(env)
    first = _continue(env, [1, 2])
    restored = env.restore(env_ids, saved)
    _require(_equal(obs, restored, profile), "restore does not return the observation of the snapshot")
    _require(_same_episodes(first, _continue(env, [1, 2]), env_ids, profile), "the continuation after restore differs")
    return f"continues {profile}"


def random_actions(env: VecEnv, horizon: int, generator: np.random.Generator) -> np.ndarray:
    """Uniform actions [E,H,D] within the bounds."""
    spec, shape = env.spec.action, (env.num_envs, horizon, env.spec.action_dim)
    if env.spec.discrete:
        low, high = np.asarray(spec.low, np.int64), np.asarray(spec.high, np.int64)
        return generator.integers(low, high, shape, endpoint=True)
    return generator.uniform(spec.low, spec.high, shape).astype(np.float32)


def _play(env: VecEnv, env_ids: np.ndarray, seeds: np.ndarray, chunks: list[int], reverse: bool = False) -> list[Step]:
    env.reset(env_ids, seeds)
    return _continue(env, chunks, reverse)


def _continue(env: VecEnv, chunks: list[int], reverse: bool = False) -> list[Step]:
    """The same actions at every call, cut into ``chunks``; ``reverse`` reverses the order of the environments."""
    actions = random_actions(env, sum(chunks), np.random.default_rng(3))[:: -1 if reverse else 1]
    starts = np.cumsum([0, *chunks[:-1]])
    return [env.step(actions[:, a : a + n].copy()) for a, n in zip(starts, chunks, strict=True)]


def _same_episodes(one: list[Step], other: list[Step], env_ids: np.ndarray, profile: Profile) -> bool:
    """Whether environment ``i`` of ``one`` is like ``env_ids[i]`` of ``other`` in rewards, ends and observations."""
    flags = all(on_host(getattr(one[-1], n) == getattr(other[-1], n)[env_ids]).all() for n in ("done", "success"))
    names = ("reward", "valid", "executed")
    per_action = (
        [np.concatenate([on_host(getattr(step, name)) for step in steps], 1) for name in names]
        for steps in (one, other)
    )
    same = all(profile.alike(a, b[env_ids]) for a, b in zip(*per_action, strict=True))
    return flags and same and _equal(one[-1].obs, other[-1].obs.select(env_ids), profile)


def _equal(a: Observation, b: Observation, profile: Profile = _EXACTLY) -> bool:
    left, right = _parts(a), _parts(b)
    return left.keys() == right.keys() and all(profile.alike(left[name], right[name]) for name in left)


def _parts(obs: Observation) -> dict[str, Any]:
    return {**obs.images, **obs.extras, "state": obs.state, "task": obs.task, "time": obs.time}


def _same_names(what: str, given: Any, declared: Any) -> None:
    _require(set(given) == set(declared), f"{what} are {sorted(given)} but {sorted(declared)} are declared")


def _require(holds: bool, violation: str) -> None:
    if not holds:
        raise ContractError(f"{violation}, so experience from it would be wrong; correct the environment or policy.")


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
        if i == 0 and len(step.frames) != horizon:
            raise ContractError(
                f'step of {name} returned {len(step.frames)} frames for {horizon} actions with observe="all", so '
                "datasets and videos would be incomplete; return the observation after every action."
            )
    env.reset(env_ids, seed + env_ids)


def is_user_defined(policy: object) -> bool:
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
        _spec_has(image.dtype == "uint8" and len(image.shape) == 3, f"images[{name!r}]", "uint8 with shape (h, w, c)")
    _spec_has(spec.state.dtype == "float32" and len(spec.state.shape) == 1, "state", "float32 with a shape of one axis")
    kinds = ("float32", "int64")
    _spec_has(spec.action.dtype in kinds and len(spec.action.shape) == 1, "action", "float32 or int64 with one axis")
    texts = isinstance(spec.tasks, tuple) and spec.tasks and all(isinstance(text, str) for text in spec.tasks)
    _spec_has(bool(texts), "tasks", "a tuple of at least one instruction")
    _spec_has(spec.control_dt > 0, "control_dt", "positive, in seconds")
    _spec_has(isinstance(spec.time_limit, int) and spec.time_limit >= 1, "time_limit", "an integer of at least 1")
    _spec_has(isinstance(spec.max_chunk, int) and spec.max_chunk >= 1, "max_chunk", "an integer of at least 1")
    _spec_has(spec.success in ("once", "at_end", None), "success", '"once", "at_end" or None')


def require_finite_step(env: VecEnv, step: Step, seeds: np.ndarray) -> None:
    """Raise ContractError as :func:`require_finite_observation`, also for a reward."""
    require_finite_observation(env, step.obs, seeds, reward=step.reward)


def require_finite_observation(env: VecEnv, obs: Observation, seeds: np.ndarray, **more: Any) -> None:
    """Raise ContractError, naming environment, id, seed and time step, if ``obs`` or ``more`` holds a NaN or infinity.

    The host waits for a device once for every array; ``read_step`` finds out in one transfer whether to ask.
    """
    extras = {f"extras[{key!r}]": item for key, item in obs.extras.items()}
    for name, array in {**more, "state": obs.state, **extras}.items():
        finite = array.isfinite() if hasattr(array, "isfinite") else np.isfinite(array)
        if not bool(finite.all()):
            env_id = int(np.argwhere(~on_host(finite))[0][0])
            raise ContractError(
                f"environment {env.spec.name!r} returned a {name} that is not finite in environment {env_id} (seed "
                f"{int(seeds[env_id])}, time step {int(obs.time[env_id])}), so nothing can be learnt from it; correct "
                "the environment, or truncate such an episode and return its last finite observation."
            )


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
    _spec_has(sizes, f"shape of {name}", "a tuple of positive integers, without the axis of environments")
    known = isinstance(array.dtype, str) and array.dtype in _DTYPES
    _spec_has(known, f"dtype of {name}", "the name of a number type of numpy, such as 'float32'")
    for end in ("low", "high"):
        bound = np.asarray(getattr(array, end))
        fits = bound.dtype.kind in "iuf" and bound.shape in ((), array.shape[-1:])
        _spec_has(fits, f"{end} of {name}", "one number, or one per entry of the last axis")
    _spec_has(bool(np.all(np.asarray(array.low) <= np.asarray(array.high))), f"low of {name}", "at most its high")
    labels = not array.names or len(array.names) == (array.shape[-1] if array.shape else 0)
    _spec_has(labels, f"names of {name}", "one per entry of the last axis, or empty")


def _spec_has(holds: bool, what: str, wanted: str) -> None:
    if not holds:
        raise ContractError(f"the spec's {what} is wrong, so the data would be misread; it has to be {wanted}.")
