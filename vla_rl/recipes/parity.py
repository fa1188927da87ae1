"""Our side of a comparison with another evaluator: a checkpoint and, if one is named, an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from vla_rl.contract.env import EnvSpec, on_host
from vla_rl.contract.policy import Policy, encode_observation
from vla_rl.evaluation.parity import Compared, Trace, replay_env, replay_policy
from vla_rl.evaluation.run import episode_generator
from vla_rl.policies.noise import RecordedNoise
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.recipes.env_config import EnvConfig


def replay_checkpoint(folder: Path, trace: Trace, tolerance: float) -> list[Compared]:
    """The policy in ``folder`` on the recorded decisions; raises UserError for instructions that it does not know."""
    policy: Policy = load_policy(folder)
    spec = EnvSpec.from_json(read_config(folder)["spec"])
    noise = noise_of(trace)
    if noise is not None:
        return replay_policy(policy, spec, trace, noise, tolerance)
    known = not draws_noise(policy, spec, trace)
    return replay_policy(policy, spec, trace, lambda step: [torch.Generator()], tolerance, known)


def replay_simulator(env: EnvConfig, trace: Trace, tolerance: float) -> list[Compared]:
    """The recorded actions in ``env``, from the recorded seed."""
    with closing(env.make(1)) as made:
        return replay_env(made, trace, tolerance)


def noise_of(trace: Trace) -> Callable[[int], Sequence[object]] | None:
    """The generators of the trace's decisions: its recorded noise, or that of its seeds; None when it has neither."""
    if "noise" in trace.arrays:
        return lambda step: [RecordedNoise(torch.from_numpy(np.array(trace.arrays["noise"][step])))]
    if {"seed", "noise_seed"} <= trace.scalars.keys():
        generator = episode_generator(trace.scalars["noise_seed"], trace.scalars["seed"])
        return lambda step: [generator]
    return None


def draws_noise(policy: Policy, spec: EnvSpec, trace: Trace) -> bool:
    """Whether the policy's first action depends on the generator."""
    samples = []
    for seed in (0, 1):
        noise = [torch.Generator().manual_seed(seed)]
        state = policy.reset_state(policy.initial_state(1), np.arange(1))
        features, state = encode_observation(policy, trace.observation(0, spec.tasks), state, noise)
        samples.append(on_host(policy.act(features, state, "eval", noise)[0].sample))
    return not np.array_equal(samples[0], samples[1])
