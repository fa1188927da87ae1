"""A checkpoint becomes a version in a fleet's registry."""

from __future__ import annotations

from pathlib import Path

from vla_rl.fleet.registry import Registry
from vla_rl.fleet.signing import SigningKey
from vla_rl.policies.pretrained import load_policy
from vla_rl.pretrained import checkpoint_of
from vla_rl.recipes.fleet.golden import published
from vla_rl.recipes.fleet.policies import user


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
