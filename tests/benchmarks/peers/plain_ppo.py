"""PPO in one file, with what CleanRL's ``ppo_continuous_action`` does, written anew.

Huang et al. 2022 (CleanRL, JMLR 23) and "The 37 implementation details of PPO": orthogonal layers, observations and
rewards normalised by running statistics and clipped at 10, clipped values, advantages normalised in every minibatch,
a learning rate that falls to 0 over the whole run, no bootstrap at a time limit.  ``Settings`` holds its published
numbers; ``num_envs`` and ``decisions`` are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

_CLIP = 10.0


@dataclass(frozen=True)
class Settings:
    """The defaults are those of ``ppo_continuous_action``."""

    lr: float = 3e-4
    total_steps: int = 1_000_000  # over which the learning rate falls to 0
    gamma: float = 0.99
    lam: float = 0.95
    minibatches: int = 32
    epochs: int = 10
    clip: float = 0.2
    value_weight: float = 0.5
    grad_norm: float = 0.5
    std: float = 1.0  # initial


class RunningMoments:
    """Mean and variance of everything seen, merged batch by batch."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.variance, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, batch: np.ndarray) -> None:
        """Merge ``batch`` [B,...]."""
        gap, total = batch.mean(0) - self.mean, self.count + len(batch)
        squares = self.variance * self.count + batch.var(0) * len(batch)
        self.variance = (squares + gap**2 * self.count * len(batch) / total) / total
        self.mean, self.count = self.mean + gap * len(batch) / total, total


class PlainPPO:
    """A learner over ``num_envs`` environments of Gymnasium, ``decisions`` steps of each per iteration."""

    def __init__(self, make: Any, num_envs: int, decisions: int, seed: int, settings: Settings | None = None) -> None:
        """``make()`` gives one environment."""
        torch.manual_seed(seed)
        self.settings, self.decisions, self.num_envs = settings or Settings(), decisions, num_envs
        self._envs = SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        space: Any = self._envs.single_action_space
        self._low, self._high = space.low, space.high
        inputs, outputs = self._envs.single_observation_space.shape[0], space.shape[0]  # type: ignore[index]
        self._actor, self._critic = _network(inputs, outputs, 0.01), _network(inputs, 1, 1.0)
        self._log_std = nn.Parameter(torch.full((outputs,), self.settings.std).log())
        self._weights = [*self._actor.parameters(), *self._critic.parameters(), self._log_std]
        self._optimizer = torch.optim.Adam(self._weights, lr=self.settings.lr, eps=1e-5)
        self._seen, self._earned = RunningMoments((inputs,)), RunningMoments(())
        self._discounted, self.steps = np.zeros(num_envs), 0
        obs, _ = self._envs.reset(seed=seed * 10_000_000)
        self._obs = self._normalized(obs)
        self._done = torch.zeros(num_envs)

    def advance(self, iterations: int) -> None:
        """Collect and learn."""
        for _ in range(iterations):
            done_share = self.steps / self.settings.total_steps
            self._optimizer.param_groups[0]["lr"] = max(0.0, 1.0 - done_share) * self.settings.lr
            self._learn(*self._collect())
            self.steps += self.num_envs * self.decisions

    def act(self, state: np.ndarray) -> np.ndarray:
        """The mean action [E,D] in ``state`` [E,S]."""
        with torch.no_grad():
            return self._actor(self._scaled(state)).numpy()

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()

    @torch.no_grad()
    def _collect(self) -> tuple[Tensor, ...]:
        """Observations, actions, log-probs, values, advantages and returns of one window, [T*E,...]."""
        kept: list[tuple[Tensor, ...]] = []
        for _ in range(self.decisions):
            law = self._law(self._obs)
            action, value = law.sample(), self._critic(self._obs)[:, 0]
            clipped = action.numpy().clip(self._low, self._high)
            obs, reward, terminated, truncated, _ = self._envs.step(clipped)
            kept.append(
                (self._obs, action, law.log_prob(action).sum(1), value, self._done, self._rewarded(reward, terminated))
            )
            self._obs, self._done = self._normalized(obs), torch.as_tensor(terminated | truncated).float()
        obs_, actions, logprobs, values, dones, rewards = map(torch.stack, zip(*kept, strict=True))
        advantages = self._advantages(rewards, values, torch.cat([dones[1:], self._done[None]]))
        parts = (obs_, actions, logprobs, values, advantages, advantages + values)
        return tuple(part.flatten(0, 1) for part in parts)

    def _advantages(self, rewards: Tensor, values: Tensor, ended: Tensor) -> Tensor:
        """GAE [T,E]; ``ended`` [T,E]: whether the episode ended at the step."""
        decay, ahead = self.settings.gamma * self.settings.lam, torch.zeros(self.num_envs)
        following = torch.cat([values[1:], self._critic(self._obs)[None, :, 0]])
        delta = rewards + self.settings.gamma * following * (1 - ended) - values
        found = []
        for t in reversed(range(len(rewards))):
            ahead = delta[t] + decay * (1 - ended[t]) * ahead
            found.append(ahead)
        return torch.stack(found[::-1])

    def _learn(self, *parts: Tensor) -> None:
        size = len(parts[0]) // self.settings.minibatches
        for _ in range(self.settings.epochs):
            for index in torch.randperm(len(parts[0])).split(size):
                self._optimizer.zero_grad()
                self._loss(*(part[index] for part in parts)).backward()
                nn.utils.clip_grad_norm_(self._weights, self.settings.grad_norm)
                self._optimizer.step()

    def _loss(
        self, obs: Tensor, action: Tensor, logprob: Tensor, value: Tensor, advantage: Tensor, returns: Tensor
    ) -> Tensor:
        clip = self.settings.clip
        ratio = (self._law(obs).log_prob(action).sum(1) - logprob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))
        found = self._critic(obs)[:, 0]
        near = value + (found - value).clamp(-clip, clip)
        errors = torch.maximum((found - returns).square(), (near - returns).square())
        return -surrogate.mean() + self.settings.value_weight * 0.5 * errors.mean()

    def _law(self, obs: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self._actor(obs), self._log_std.exp())

    def _normalized(self, obs: np.ndarray) -> Tensor:
        self._seen.update(obs)
        return self._scaled(obs)

    def _scaled(self, obs: np.ndarray) -> Tensor:
        scaled = (obs - self._seen.mean) / np.sqrt(self._seen.variance + 1e-8)
        return torch.as_tensor(scaled.clip(-_CLIP, _CLIP), dtype=torch.float32)

    def _rewarded(self, reward: np.ndarray, terminated: np.ndarray) -> Tensor:
        """Rewards divided by the standard deviation of discounted returns."""
        self._discounted = self._discounted * self.settings.gamma * (1 - terminated) + reward
        self._earned.update(self._discounted)
        scaled = reward / np.sqrt(self._earned.variance + 1e-8)
        return torch.as_tensor(scaled.clip(-_CLIP, _CLIP), dtype=torch.float32)


def _network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64 with tanh; orthogonal weights, the last ones with ``gain``."""
    network = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    for layer, scale in zip(network[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return network


def single(options: dict[str, Any]) -> Any:
    """A function that makes one environment of ``id``, with ``time_limit`` if it is given."""
    return partial(gymnasium.make, options["id"], max_episode_steps=options.get("time_limit"))
