"""check_policy finds every fault: each policy here breaks one rule of the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sims.catalog import make
from tests.auditing import PrivilegedEnv
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Likelihood
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy


class Unclipped(GaussianPolicy):
    def act(self, features, state, mode, generator):
        out, state = super().act(features, state, mode, generator)
        return replace(out, action=out.action + 5), state


class NanInEvalMode(GaussianPolicy):
    def act(self, features, state, mode, generator):
        out, state = super().act(features, state, mode, generator)
        return (replace(out, action=out.action * float("nan")) if mode == "eval" else out), state


class NoChunkAxis(GaussianPolicy):
    def act(self, features, state, mode, generator):
        out, state = super().act(features, state, mode, generator)
        return replace(out, action=out.action[:, 0]), state


class PartsOfNoAction(GaussianPolicy):
    parts = 2

    def act(self, features, state, mode, generator):
        out, state = super().act(features, state, mode, generator)
        return replace(out, logprob=out.logprob[:, None].expand(-1, self.parts) / self.parts), state


class ActsPerActionAndLearnsPerChunk(PartsOfNoAction):
    parts = 3


class OneLogprobForAll(GaussianPolicy):
    def act(self, features, state, mode, generator):
        out, state = super().act(features, state, mode, generator)
        return replace(out, logprob=out.logprob.sum()), state


class MeanLikelihood(GaussianPolicy):
    def log_prob(self, features, sample, aux):
        found = super().log_prob(features, sample, aux)
        scale = 0.5 if torch.is_grad_enabled() else 1.0
        return Likelihood(scale * found.logprob, found.entropy, found.params)


class ScoresClippedActions(GaussianPolicy):
    def log_prob(self, features, sample, aux):
        return super().log_prob(features, sample.clamp(-1, 1) if torch.is_grad_enabled() else sample, aux)


class ReadsPrivileged(GaussianPolicy):
    def encode(self, obs):
        return {**super().encode(obs), "secret": torch.as_tensor(obs.extras["privileged/seed"])}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unclipped, "action holds"),
        (NanInEvalMode, "action holds"),
        (NoChunkAxis, "action is"),
        (OneLogprobForAll, "one number per environment"),
        (PartsOfNoAction, r"logprob has parts \[2\] for 3 actions"),
        (ActsPerActionAndLearnsPerChunk, r"act gives log-probs \[8, 3\] but log_prob \[8\]"),
        (MeanLikelihood, "PPO's first ratio is not 1"),
        (ScoresClippedActions, "PPO's first ratio is not 1"),
        (ReadsPrivileged, "reads 'privileged/seed'.*could not be deployed"),
    ],
)
def test_a_broken_policy_is_found(kind, message):
    env = PrivilegedEnv(8) if kind is ReadsPrivileged else make("point_mass", num_envs=8)
    with pytest.raises(ContractError, match=message):
        check_policy(kind(env.spec, config=GaussianConfig(3, std=2.0)), env, torch.Generator().manual_seed(0))


def test_a_chunk_longer_than_max_chunk_is_found():
    env = make("point_mass", num_envs=2)
    with pytest.raises(ContractError, match=r"17 actions but 1\.\.16"):
        check_policy(GaussianPolicy(env.spec, config=GaussianConfig(17)), env, torch.Generator())


def test_a_sound_policy_passes():
    env = make("point_mass", num_envs=8)
    found = check_policy(GaussianPolicy(env.spec, config=GaussianConfig(3)), env, torch.Generator().manual_seed(0))
    assert [item.name for item in found] == ["encode", "act", "log-prob gap"]
