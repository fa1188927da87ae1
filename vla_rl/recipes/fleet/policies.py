"""Who changes which policy a fleet's robots run, and by which key: a registry, beside its server or without one."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from vla_rl.contract import wire
from vla_rl.contract.env import on_host
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.intervals import wilson
from vla_rl.contract.keys import write_whole
from vla_rl.contract.policy import Policy, encode_observation
from vla_rl.contract.spec import EnvSpec
from vla_rl.contract.trust import check_folder
from vla_rl.fleet.canary import Outcomes
from vla_rl.fleet.manifest import spec_hash
from vla_rl.fleet.registry import Published, Registry
from vla_rl.fleet.releases import EVERY_ROBOT
from vla_rl.fleet.server import REGISTRY
from vla_rl.fleet.signing import SigningKey
from vla_rl.policies.pretrained import load_policy
from vla_rl.pretrained import checkpoint_of
from vla_rl.serving.episode import servable_spec
from vla_rl.serving.observation import SingleObservation, batch_of

KEY, PUBLIC_KEY = "signing.key", "signing.pub"


def open_registry(folder: Path) -> Registry:
    """The registry of a fleet's folder; raises UserError where there is none."""
    if not (folder / REGISTRY).is_dir():
        raise UserError(f"{str(folder)!r} is no fleet's folder: it has no {REGISTRY}; give the one of vla-rl serve.")
    check_folder(folder)
    return Registry(folder / REGISTRY)


def signing_key(folder: Path, credentials: str) -> SigningKey:
    """The key in the folder ``credentials``, or of ``folder`` itself where that is "", made when it is first needed.

    Robots trust its public half: ``signing.pub``, of their own certificate's folder or of ``folder``.
    """
    path = key_file(folder, credentials)
    if credentials:
        return SigningKey.load(path)
    try:
        key = SigningKey.load(path) if path.exists() else SigningKey.create(path)
    except UserError:
        if not path.exists():
            raise
        key = SigningKey.load(path)  # another process was quicker
    public = folder / PUBLIC_KEY
    if not public.exists() or public.read_bytes() != key.public_pem():
        write_whole(public, key.public_pem(), 0o644)
    return key


def key_file(folder: Path, credentials: str) -> Path:
    """Where :func:`signing_key` finds or makes it."""
    return (Path(credentials) if credentials else folder) / KEY


def user() -> str:
    """Who is at the keyboard, for the registry's history."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # this number has no name
        return f"user {os.getuid()}"


def table(registry: Registry) -> Table:
    """Versions, their stage, and how they did on the robots: success with its interval (Wilson, 95 %)."""
    made, played = Table("version", "stage", "episodes", "success"), registry.outcomes()
    for version, stage in sorted(registry.releases.stages.items()):
        total = sum(played.get(version, {}).values(), Outcomes())
        low, high = wilson(total.successes, total.episodes)
        rate = f"{total.successes / total.episodes:.0%} [{low:.0%}, {high:.0%}]" if total.episodes else ""
        made.add_row(str(version), stage, str(total.episodes), rate)
    return made


def for_each(folder: Path, robots: Sequence[str], do: Callable[[Registry, str], None]) -> str:
    """``do`` with every one of ``robots``, or once for all when none is named; returns what a person should read."""
    registry = open_registry(folder)
    for robot in robots or (EVERY_ROBOT,):
        do(registry, robot)
    return f"{', '.join(robots) or 'every robot'}: done"


def number(text: str) -> int:
    """A version; raises UserError."""
    if not text.isdigit():
        raise UserError(f"{text!r} is no version of a policy, so nothing changes; vla-rl fleet versions lists them.")
    return int(text)


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
    generators = [torch.Generator().manual_seed(seed)]
    with torch.no_grad():
        state = policy.reset_state(policy.initial_state(1), np.zeros(1, np.int64))
        batch = batch_of([seen], message["time"], spec)
        features, state = encode_observation(policy, batch, state, generators)
        out, _ = policy.act(features, state, "eval", generators)
    chunk: np.ndarray = on_host(out.action)[0]
    return chunk


def _observation(spec: EnvSpec) -> bytes:
    random = np.random.default_rng(SEED)
    images = {name: random.integers(0, 256, item.shape, np.uint8) for name, item in spec.images.items()}
    state = np.clip(np.zeros(spec.state.shape), spec.state.low, spec.state.high).astype(np.float32)
    return wire.pack({"images": images, "state": state, "task": spec.tasks[0], "time": 0})
