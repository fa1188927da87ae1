"""A checkpoint becomes a version in a fleet's registry, with its self-test: an observation and the expected action."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from vla_rl.contract import wire
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Policy
from vla_rl.fleet.manifest import SigningKey, spec_hash
from vla_rl.fleet.registry import Published, Registry
from vla_rl.policies.pretrained import load_policy
from vla_rl.pretrained import checkpoint_of
from vla_rl.recipes.fleet.serving import user
from vla_rl.serving import served
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.served import servable_spec


def publish(registry: Registry, key: SigningKey, checkpoint: str | Path, why: str, who: str = "") -> int:
    """Stage a checkpoint, or a run's best; returns its version.  Raises UserError for what no robot can use.

    ``who``: "" for the person at the keyboard.
    """
    folder = checkpoint_of(checkpoint)
    return registry.publish(folder, published(load_policy(folder)), key, who or user(), why)


def publish_first(registry: Registry, key: SigningKey, checkpoint: str) -> str:
    """Publish and promote what a fleet begins with, unless it has a policy; returns what a person should read."""
    if registry.releases.active is None:
        version = publish(registry, key, checkpoint, "the first")
        registry.promote(version, user(), "the first")
        return f"policy version {version} is active: {checkpoint}"
    return f"policy version {registry.releases.active} stays active; vla-rl fleet publish adds another"


SEED = 1  # of the pictures, and of the flow's starting noise
TOLERANCE = 1e-3  # of each dimension's range: processors round differently


def published(policy: Policy) -> Published:
    """What is published with the checkpoint of ``policy``; raises UserError for a policy that no robot can use."""
    spec = servable_spec(policy)
    observation = _observation(spec)
    action = answer(policy, observation, SEED)
    rows = tuple(tuple(float(x) for x in row) for row in action)
    return Published(spec_hash(spec), observation, SEED, rows, TOLERANCE)


def answer(policy: Policy, observation: bytes, seed: int) -> np.ndarray:
    """The chunk [H,D] of ``policy`` in mode "eval" for a golden observation; raises ContractError for other bytes."""
    message, spec = wire.unpack(observation), servable_spec(policy)
    if not isinstance(message, dict) or message.keys() != {"images", "state", "task", "time"}:
        raise ContractError("a golden observation has other fields than a policy reads, so it is not used; publish it.")
    seen = SingleObservation(message["images"], message["state"], message["task"]).checked(spec)
    state = policy.reset_state(policy.initial_state(1), np.zeros(1, np.int64))
    chunks, _ = served.answer(policy, [seen], message["time"], state, [torch.Generator().manual_seed(seed)])
    return chunks[0]


def _observation(spec: EnvSpec) -> bytes:
    random = np.random.default_rng(SEED)
    images = {name: random.integers(0, 256, item.shape, np.uint8) for name, item in spec.images.items()}
    state = np.clip(np.zeros(spec.state.shape), spec.state.low, spec.state.high).astype(np.float32)
    return wire.pack({"images": images, "state": state, "task": spec.tasks[0], "time": 0})
