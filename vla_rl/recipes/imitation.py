"""Imitation of demonstrations by any policy that has a loss for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from vla_rl.algorithms.chunks import Chunks, demonstrated
from vla_rl.contract.env import Observation
from vla_rl.contract.policy import Features, Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.normalization import Affine
from vla_rl.recipes.context import generator
from vla_rl.recipes.progress import bar
from vla_rl.training.imitation import ImitationConfig, ImitationPolicy, PixelImitationPolicy, imitate
from vla_rl.training.imitation import imitate_from_pixels as fit_from_pixels
from vla_rl.training.threads import alone
from vla_rl.training.tracking import RunFolder

_LOG_EVERY = 25  # steps


class ImitatingPolicy(Policy, ImitationPolicy, Protocol):
    """A policy that learns chunks of recorded actions, normalised by ``action_scale``."""

    spec: EnvSpec
    action_scale: Affine

    @property
    def horizon(self) -> int:
        """``H``: actions in a chunk."""

    def save_pretrained(self, folder: str | Path) -> None: ...


@runtime_checkable
class OwnImitationFeatures(Protocol):
    """A policy whose imitation loss reads other features than its decisions."""

    def imitation_features(self, obs: Observation) -> Features:
        """{name: [N,...]} of all recorded observations, on the host."""

    @property
    def chunk_length(self) -> int:
        """Actions of a chunk to imitate, of which the first ``horizon`` are executed."""


class PixelPolicy(ImitatingPolicy, PixelImitationPolicy, Protocol):
    """A policy whose perception learns as well."""


def imitate_policy(
    policy: ImitatingPolicy,
    episodes: Demonstrations,
    config: ImitationConfig,
    seed: int,
    folder: RunFolder | None = None,
) -> None:
    """Train ``policy.trainable()`` on the demonstrations, in place; the observations are encoded once.

    A policy whose features are too large for that, or are learnt themselves, names others: ``imitation_features``.
    """
    if isinstance(policy, OwnImitationFeatures):
        features = policy.imitation_features(episodes.observation())
    else:
        features = encode_episodes(policy, episodes)
    length = policy.chunk_length if isinstance(policy, OwnImitationFeatures) else policy.horizon
    chunks = demonstrated_chunks(policy, episodes, features, length)
    chunks = chunks.select(torch.as_tensor(episodes.time % config.stride == 0))
    with bar("imitate", config.fit.steps) as update:
        report = every(_LOG_EVERY, config.fit.steps, _report(update, folder))
        with alone():
            imitate(policy, chunks, config, generator(seed, 2), report)


def imitate_from_pixels(
    policy: PixelPolicy, episodes: Demonstrations, config: ImitationConfig, seed: int, folder: RunFolder
) -> None:
    """Train all of ``policy`` on the demonstrations, perception included, in place."""
    chunks = demonstrated_chunks(policy, episodes, {}, policy.horizon)
    with bar("imitate", config.fit.steps) as update:
        report = every(_LOG_EVERY, config.fit.steps, _report(update, folder))
        fit_from_pixels(policy, episodes.observation(), chunks, config, generator(seed, 2), report)


def encode_episodes(policy: Policy, episodes: Demonstrations, part: int = 256) -> dict[str, Tensor]:
    """The policy's features {name: [N,...]} of all recorded observations."""
    obs, count = episodes.observation(), len(episodes.state)
    parts = [policy.encode(obs.select(slice(i, i + part))) for i in range(0, count, part)]
    return {name: torch.cat([item[name] for item in parts]) for name in parts[0]}


def every(
    steps: int, last: int, report: Callable[[int, dict[str, float]], None]
) -> Callable[[int, dict[str, float]], None]:
    """Call ``report`` after every so many steps, and after the ``last`` one."""
    return lambda step, info: report(step, info) if (step + 1) % steps == 0 or step + 1 == last else None


def demonstrated_chunks(
    policy: ImitatingPolicy, episodes: Demonstrations, features: Mapping[str, Tensor], length: int
) -> Chunks:
    """The ``length`` recorded actions from every step on, with the policy's ``features`` {name: [N,...]} before them.

    They are where the policy's weights are.
    """
    weights = next(iter(policy.trainable().values()))
    actions, counts, task = (
        torch.as_tensor(it, device=weights.device) for it in (*episodes.chunks(length), episodes.task)
    )
    return demonstrated(features, policy.action_scale.normalize(actions), counts, task)


def _report(update: Callable[[int, str], None], folder: RunFolder | None) -> Callable[[int, dict[str, float]], None]:
    """Metrics to the progress bar and, if there is one, to the run folder."""

    def report(step: int, info: dict[str, float]) -> None:
        update(step + 1, f"loss {info['loss']:.4f}")
        if folder:
            folder.log("imitation", step, info)

    return report
