"""Recorded episodes as rollouts: each decision gets the features and context that a policy would have had.

So a replay buffer can be filled from demonstrations or from any LeRobot folder; in residual mode they are relabelled
with the base policy's actions (Ankile et al. 2025, ResFiT, arXiv 2509.19301).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Features, Policy, recorded
from vla_rl.experience.demonstrations import Demonstrations

Encode = Callable[[list[int]], list[Features]]
"""A policy's features at steps of one episode, in their order, each with a leading axis 1."""
_REWARD, DONE, _SUCCESS = "next.reward", "next.done", "next.success"
INTERVENTION = "complementary_info.is_intervention"  # bool: a person acted, as lerobot records it


def relabelled(
    episodes: Demonstrations,
    policy: Policy,
    spec: EnvSpec,
    horizon: int,
    generator: Any,
    offsets: int = 1,
    anew: np.ndarray | None = None,
) -> Iterator[Rollout]:
    """Every episode as a rollout with E = 1 and one decision every ``horizon`` actions.

    With ``offsets`` > 1 every episode is yielded so many times, with its first decision at step 0, 1, ...; with
    ``offsets = horizon`` a chunk begins at every step.  An episode that ends with "next.success", or with "next.done"
    where success was not recorded, is terminated; any other is truncated at its last recorded observation, and the
    action after that one is left out.  Samples are zeros and versions -1: only the executed actions are known.  Actions
    of a person (column ``INTERVENTION``) stay marked as interventions.

    ``anew`` bool [N]: the actions after which the policy's state begins anew; None: it does where episodes begin.

    Raises ContractError when rewards are missing or an action lies outside the bounds of ``spec``.
    """
    _require_rewards(episodes)
    _require_bounds(episodes, spec)
    episodes = replace(episodes.with_tasks(spec.tasks), robot=episodes.robot or spec.name)
    after = np.zeros(len(episodes.action), bool) if anew is None else anew
    return as_decisions(episodes, lambda steps: _encode(episodes, steps, policy, generator, after), horizon, offsets)


def as_decisions(episodes: Demonstrations, encode: Encode, horizon: int, offsets: int = 1) -> Iterator[Rollout]:
    """As :func:`relabelled`, of episodes with any actions and tasks; reward 0 where none was recorded."""
    for begin, end in episodes.spans():
        for offset in range(min(offsets, end - begin)):
            rollout = _episode(episodes, begin + offset, end, encode, horizon)
            if rollout is not None:
                yield rollout


def _episode(episodes: Demonstrations, begin: int, end: int, encode: Encode, horizon: int) -> Rollout | None:
    """The steps from ``begin`` to before ``end``; None when they hold no decision."""
    terminated = _terminated(episodes, end - 1)
    last = end if terminated else end - 1  # the outcome of actions before this step is known
    starts = list(range(begin, last, horizon))
    if not starts:
        return None
    features = encode([*starts, min(last, end - 1)])
    index = np.array(starts)[:, None] + np.arange(horizon)
    valid = torch.from_numpy(index < last)[:, None]
    index = np.minimum(index, last - 1)
    executed = torch.from_numpy(episodes.action[index])[:, None]
    rewards = episodes.extras.get(_REWARD, np.zeros(len(episodes.action)))
    reward = torch.from_numpy(np.asarray(rewards, np.float32).reshape(-1)[index])[:, None]
    over = torch.zeros(len(starts), 1, dtype=torch.bool)
    over[-1] = True
    return Rollout(
        features={name: torch.stack([item[name] for item in features]) for name in features[0]},
        sample=torch.zeros_like(executed),
        executed=executed,
        aux={},
        logprob=torch.zeros(len(starts), 1),
        reward=torch.where(valid, reward, 0.0),
        valid=valid,
        intervened=valid & _intervened(episodes, index),
        terminated=over & terminated,
        truncated=over & (not terminated),
        success=over & terminated,
        version=torch.full((len(starts), 1), -1),
        final_index=torch.tensor([[len(starts) - 1, 0]])[: int(not terminated)],
        final_features={name: item[: int(not terminated)] for name, item in features[-1].items()},
        seeds=torch.full((len(starts), 1), int(episodes.seed[begin])),
        info={"env/steps": float(valid.sum())},
        task=torch.from_numpy(episodes.task[starts])[:, None],
        robot=episodes.robot,
    )


def _encode(
    episodes: Demonstrations, steps: list[int], policy: Policy, generator: Any, anew: np.ndarray
) -> list[Features]:
    """The policy's features at ``steps`` of one episode, in their order, each with a leading axis 1."""
    batch = policy.encode(episodes.observation().select(np.array(steps)))
    found = [{name: item[i : i + 1] for name, item in batch.items()} for i in range(len(steps))]
    if hasattr(policy, "context"):
        everyone, before = np.zeros(1, np.intp), steps[0]
        state = policy.reset_state(policy.initial_state(1), everyone)
        for i, (step, features) in enumerate(zip(steps, found, strict=True)):
            if anew[before:step].any():
                state = policy.reset_state(state, everyone)
            before = step
            found[i], state = policy.context(features, state, generator)
    return [recorded(policy, features) for features in found]


def _terminated(episodes: Demonstrations, step: int) -> bool:
    flags = episodes.extras.get(_SUCCESS, episodes.extras.get(DONE))
    return bool(np.asarray(flags).reshape(-1)[step]) if flags is not None else False


def _intervened(episodes: Demonstrations, index: np.ndarray) -> torch.Tensor:
    """bool [T,1,H]: whether a person chose the actions ``index`` [T,H]; nobody did where that was not recorded."""
    flags = np.asarray(episodes.extras.get(INTERVENTION, np.zeros(len(episodes.action), bool))).reshape(-1)
    return torch.from_numpy(flags.astype(bool)[index])[:, None]


def _require_rewards(episodes: Demonstrations) -> None:
    if _REWARD not in episodes.extras:
        raise ContractError(
            f"the episodes have no {_REWARD!r} but {sorted(episodes.extras)}, so no value can be learnt from them; "
            "record them with 'vla-rl collect', or label them with a reward first."
        )


def _require_bounds(episodes: Demonstrations, spec: EnvSpec) -> None:
    dims = episodes.action.shape[-1]
    if dims != spec.action_dim:
        raise ContractError(
            f"the episodes' actions have {dims} entries but {spec.name!r} has {spec.action_dim}, so their "
            "meaning differs; use episodes of this environment."
        )
    low, high = np.broadcast_to(spec.action.low, dims), np.broadcast_to(spec.action.high, dims)
    outside = (episodes.action < low - 1e-4) | (episodes.action > high + 1e-4)
    if outside.any():
        step, entry = np.argwhere(outside)[0]
        raise ContractError(
            f"entry {entry} of the episodes' action is {episodes.action[step, entry]:.6g} at step {step}, outside the "
            f"bounds [{low[entry]:.6g}, {high[entry]:.6g}] of {spec.name!r}, so critics would evaluate actions that "
            "no policy can choose; use episodes with the same bounds, or convert them."
        )
