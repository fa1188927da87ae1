"""A linear Gaussian policy."""

import torch
from torch.distributions import Independent, Normal, kl_divergence

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.policy import ActionOut, Likelihood
from vla_rl.policies.pretrained import read_config
from vla_rl.pretrained import load_weights, save_folder


class Straight(torch.nn.Module):
    def __init__(self, spec, std=0.5):
        super().__init__()
        self.spec, self.version, self.feature_sizes = spec, 0, {"state": spec.state.shape[0]}
        self.linear = torch.nn.Linear(spec.state.shape[0], spec.action_dim)
        self.log_std = torch.nn.Parameter(torch.full((spec.action_dim,), std).log())

    def encode(self, obs):
        return {"state": torch.as_tensor(obs.state), "time": torch.as_tensor(obs.time)[:, None] / self.spec.time_limit}

    def initial_state(self, num_envs):
        return {}

    def reset_state(self, state, env_ids):
        return state

    def distribution(self, features):
        mean = self.linear(features["state"])
        return Independent(Normal(mean, self.log_std.exp().expand_as(mean)), 1)

    @torch.no_grad()
    def act(self, features, state, mode, generator):
        chosen = self.distribution(features)
        noise = torch.randn(chosen.mean.shape, generator=generator) if mode == "sample" else torch.zeros(())
        sample = chosen.mean + chosen.stddev * noise
        logprob = chosen.log_prob(sample) if mode == "sample" else torch.zeros(len(sample))
        action = (sample * self.spec.action.high).clamp(self.spec.action.low, self.spec.action.high)
        return ActionOut(action[:, None], sample[:, None], logprob, {}, self.version), state

    def log_prob(self, features, sample, aux):
        chosen = self.distribution(features)
        params = {"mean": chosen.mean, "std": chosen.stddev}
        return Likelihood(chosen.log_prob(sample[:, 0]), chosen.entropy(), params)

    def kl(self, old, new):
        before, after = (Independent(Normal(item["mean"], item["std"]), 1) for item in (old, new))
        return kl_divergence(before, after)

    def trainable(self):
        return dict(self.named_parameters())

    def save_pretrained(self, folder):
        save_folder(folder, {"policy": "straight:Straight", "spec": self.spec.to_json()}, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder, spec=None):
        policy = cls(spec or EnvSpec.from_json(read_config(folder)["spec"]))
        load_weights(policy, folder)
        return policy
