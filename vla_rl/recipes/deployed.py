"""The policy that is evaluated, by the text of ``--policy``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.expert import ExpertPolicy
from vla_rl.policies.function import Renumbered
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.policies.vla.checkpoint import is_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.saving import fingerprint as base_fingerprint
from vla_rl.pretrained import checkpoint_of
from vla_rl.recipes.context import placed
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.policies import check_if_foreign, names_class, new_policy, remote_policy
from vla_rl.serving.access import names_server
from vla_rl.training.device import resolve_device

EXPERT = "expert"


def deployed_policy(
    name: str, env: EnvConfig, device: str = "cpu", seed: int = 0, options: VLAOptions | None = None
) -> Policy:
    """The policy that ``name`` means in ``env``, with its weights on ``device`` (see ``resolve_device``).

    ``name`` is a checkpoint folder; a public folder, opened by ``options``; a run folder (its best checkpoint);
    "module:Class", called with the environment's spec after torch was seeded with ``seed``; "expert", the task's
    scripted expert; or the address of a policy server (``vla_rl/serving/access.py``).  Raises UserError when it or the
    device does not exist, and ContractError when it does not fit the environment.
    """
    if name == EXPERT:
        return ExpertPolicy(env.make_expert().act, horizon=1)
    spec = env.spec()
    if names_server(name):
        return remote_policy(name, spec)
    where = resolve_device(device)
    policy: Policy
    if names_class(name):
        policy = placed(new_policy(name, spec, {}, seed), where)
    elif is_public(Path(name)):
        policy = placed(load_policy(name, spec, options), where)
    else:
        policy = _checkpoint(Path(name), spec, where)
    check_if_foreign(policy, env, seed, needs=())
    return policy


@contextmanager
def deployed(
    name: str, env: EnvConfig, device: str = "cpu", seed: int = 0, options: VLAOptions | None = None
) -> Iterator[Policy]:
    """:func:`deployed_policy` for a block, after which the connections of one behind a server are closed."""
    policy = deployed_policy(name, env, device, seed, options)
    try:
        yield policy
    finally:
        if hasattr(policy, "close"):
            policy.close()


def check_instructions(name: str, tasks: Mapping[str, EnvConfig]) -> None:
    """Raise UserError when the checkpoint that ``name`` means cannot read the instructions of one of ``tasks``.

    ``tasks`` {name: environment}.  Environments that would have to be built for it are checked when they are played.
    """
    if name == EXPERT or names_server(name) or names_class(name) or is_public(Path(name)):
        return  # a public one reads any instruction
    saved = read_config(Path(name)).get("spec")
    specs = {task: env.declared_spec() for task, env in tasks.items()} if isinstance(saved, dict) else {}
    readable = {task: spec is None or _reads(EnvSpec.from_json(saved or {}), spec) for task, spec in specs.items()}
    if not all(readable.values()):
        others = [task for task, fits in readable.items() if not fits]
        fitting = [task for task, fits in readable.items() if fits]
        cure = f"choose from its own: --tasks {' '.join(fitting)}" if fitting else "evaluate it on its own tasks"
        raise UserError(
            f"{name!r} was not trained for the instructions of {', '.join(others)}, so it cannot play them; {cure}."
        )


def _reads(trained: EnvSpec, spec: EnvSpec) -> bool:
    """Whether a policy for ``trained`` knows the instructions of ``spec``, whose table may have grown."""
    return spec.tasks[: len(trained.tasks)] == trained.tasks or set(spec.tasks) <= set(trained.tasks)


def fingerprint(name: str) -> str:
    """SHA-256 of the files of the checkpoint that ``name`` means; "" for what is no folder."""
    if not Path(name).is_dir():
        return ""
    if is_public(Path(name)):
        return base_fingerprint(Path(name))  # all bytes of 14 GB would take minutes
    digest, folder = hashlib.sha256(), checkpoint_of(name)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _checkpoint(folder: Path, spec: EnvSpec, device: torch.device) -> Policy:
    """The policy in ``folder``; its own task table is used where it holds the environment's instructions."""
    saved = read_config(folder).get("spec")
    trained = EnvSpec.from_json(saved) if isinstance(saved, dict) else spec
    if spec.tasks[: len(trained.tasks)] == trained.tasks or not set(spec.tasks) <= set(trained.tasks):
        policy: Policy = placed(load_policy(folder, spec), device)
        return policy
    policy = placed(load_policy(folder, replace(spec, tasks=trained.tasks, families=trained.families)), device)
    return Renumbered(policy, [trained.tasks.index(text) for text in spec.tasks])
