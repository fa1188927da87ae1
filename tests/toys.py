"""Toys with known answers for tests of algorithms: a flow policy, an encoder, a bandit, two processes as threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import Chunks, demonstrated
from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.policies.diffusion import step_logprob
from vla_rl.policies.flow import (
    AllSteps,
    Chain,
    Field,
    FlowSampler,
    Ode,
    VelocityField,
    flow_matching_errors,
    gaussian_kl,
    imitation_losses,
)


def seeded(seed: int = 0) -> torch.Generator:
    """A generator on the host."""
    return torch.Generator().manual_seed(seed)


class Stateless:
    """The part of a policy that sees ``features["state"]`` and remembers nothing."""

    version = 0

    def encode(self, obs: Any) -> Features:
        return {"state": torch.as_tensor(obs.state)}

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Any) -> State:
        return state


class FlowToy(Stateless, nn.Module):
    """A flow policy over one action of ``dims`` entries given ``features["state"]`` [B,1] (``LikelihoodPolicy``)."""

    def __init__(self, dims: int = 2, sampler: FlowSampler | None = None, width: int = 64) -> None:
        super().__init__()
        self.dims, self.sampler = dims, sampler or FlowSampler(Ode(), AllSteps(), 4)
        last = nn.Linear(width, 2 * dims)
        nn.init.zeros_(last.weight[dims:])
        self.net = nn.Sequential(nn.Linear(dims + 2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)

    def field(self, features: Features) -> VelocityField:
        state = features["state"]

        def velocity(x: Tensor, t: Tensor) -> Field:
            condition = state[:, None].expand(-1, x.shape[1], -1)
            return Field(*self.net(torch.cat([condition, x, t.unsqueeze(-1)], -1)).chunk(2, -1))

        return velocity

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: torch.Generator) -> tuple[ActionOut, State]:
        count = len(features["state"])
        noise = torch.randn(count, self.dims, generator=generator)
        if mode == "eval":
            sample = self.sampler.deterministic(self.field(features), noise)
            return ActionOut(sample[:, None], sample[:, None], torch.zeros(count), {}, self.version), state
        chain, density = self.sampler.sample(self.field(features), noise, generator)
        aux = {"points": chain.points, "noisy_steps": chain.noisy_steps}
        sample = chain.sample[:, None]
        return ActionOut(sample, sample, density.logprob, aux, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        density = self.sampler.log_prob(self.field(features), Chain(aux["points"], aux["noisy_steps"]))
        return Likelihood(density.logprob, density.entropy, {"mean": density.mean, "std": density.std})

    kl = staticmethod(gaussian_kl)

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        return imitation_losses(self.field, features, chunks, draws, generator)

    def step_logprob(self, aux: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensor:
        ends = aux["points"].gather(1, 1 + aux["noisy_steps"].unsqueeze(-1).expand(-1, -1, self.dims))
        return step_logprob(ends, params["mean"], params["std"])

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def pretrain(self, steps: int = 300, std: float = 0.2) -> FlowToy:
        """Imitate actions around 0 in all states."""
        generator, adam = torch.Generator().manual_seed(0), torch.optim.Adam(self.parameters(), 3e-3)
        for _ in range(steps):
            state, x0, noise = (torch.randn(128, n, generator=generator) for n in (1, self.dims, self.dims))
            t = torch.rand(128, generator=generator)
            loss = flow_matching_errors(self.field({"state": state}), std * x0, noise, t).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        return self


@cache
def imitated(std: float = 0.2) -> dict[str, Tensor]:
    """Weights of a ``FlowToy`` that imitates actions of N(0, std^2) in all states."""
    torch.manual_seed(0)
    return FlowToy().pretrain(std=std).state_dict()


def all_shown(features: Mapping[str, Tensor], actions: Tensor, task: Tensor | None = None) -> Chunks:
    """Demonstrations whose ``actions`` [N,H,D] all count."""
    everything = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
    return demonstrated(
        features, actions, everything, torch.zeros(len(actions), dtype=torch.long) if task is None else task
    )


def endless(features: Mapping[str, Tensor], actions: Tensor) -> Iterator[tuple[Chunks, None]]:
    """These demonstrations again and again, for ``imitate``."""
    return repeat((all_shown(features, actions), None))


class ToyEncoder:
    """An ``ObservationEncoder`` of ``features["state"]`` [B,1], for policies over one action of two entries."""

    feature_sizes: ClassVar = {"state": 1}
    spec = EnvSpec(
        name="bandit",
        images={},
        state=ArraySpec((1,), "float32", -1.0, 1.0),
        action=ArraySpec((2,), "float32", -1.0, 1.0),
        tasks=("do the best",),
        control_dt=0.1,
        time_limit=1,
        max_chunk=1,
    )

    def encode(self, obs: Any) -> Features:
        return {"state": torch.as_tensor(obs.state)}

    def save_pretrained(self, folder: Any) -> None:
        raise NotImplementedError


def bandit_optimum(state: Tensor) -> Tensor:
    """The best action [B,2] in ``state`` [B,1]."""
    return torch.cat([0.6 * state, -0.3 + 0.0 * state], -1)


def bandit_reward(state: Tensor, action: Tensor) -> Tensor:
    """0 for the best action, minus the squared distance for others, [B]."""
    return -(action - bandit_optimum(state)).square().sum(-1)


def bandit(policy: Any, num_envs: int, generator: torch.Generator) -> Rollout:
    """One decision in each of ``num_envs`` random states within [-1, 1]; every episode terminates after it."""
    state = 2 * torch.rand(num_envs, 1, generator=generator) - 1
    out, _ = policy.act({"state": state}, {}, "sample", generator)
    reward = bandit_reward(state, out.action[:, 0])[None, :, None]
    version = torch.full((1, num_envs), policy.version)
    return rollout({"state": torch.stack([state, state])}, out, reward, version=version)


def deployed(policy: Any, mode: Mode = "eval") -> float:
    """Mean reward of ``policy`` in the bandit, over all states; 0 at best."""
    state = torch.linspace(-1, 1, 512)[:, None]
    out, _ = policy.act({"state": state}, {}, mode, seeded(9))
    return float(bandit_reward(state, out.action[:, 0]).mean())


def rollout(features: dict[str, Tensor], out: ActionOut, reward: Tensor, **changes: Any) -> Rollout:
    """One decision in ``E`` environments with ``reward`` [1,E,H], valid and terminated unless ``changes`` differ."""
    yes, num_envs = torch.ones_like(reward, dtype=torch.bool), reward.shape[1]
    parts: dict[str, Any] = {
        "features": features,
        "sample": out.sample[None],
        "executed": out.action[None],
        "aux": {name: item[None] for name, item in out.aux.items()},
        "logprob": out.logprob[None],
        "reward": reward,
        "valid": yes,
        "intervened": ~yes,
        "terminated": yes[..., 0],
        "truncated": ~yes[..., 0],
        "success": ~yes[..., 0],
        "version": torch.zeros(1, num_envs, dtype=torch.long),
        "final_index": torch.zeros(0, 2, dtype=torch.long),
        "final_features": {name: item[0, :0] for name, item in features.items()},
        "seeds": torch.zeros(1, num_envs, dtype=torch.long),
        "info": {"env/steps": float(num_envs)},
    }
    return Rollout(**{**parts, **changes})


def columns(whole: Rollout, part: slice) -> Rollout:
    """The environments ``part`` of a rollout; the observations after truncations stay as they are."""
    every, changes = whole.valid.shape[1], {}
    for name, item in vars(whole).items():
        if name in ("features", "aux"):
            changes[name] = {key: value[:, part] for key, value in item.items()}
        elif isinstance(item, Tensor) and name != "final_index":
            assert item.shape[1] == every
            changes[name] = item[:, part]
    return replace(whole, **changes)


def weights(module: nn.Module) -> list[Tensor]:
    """Copies of the parameters that learn, without the statistics of inputs."""
    return [p.detach().clone() for p in module.parameters() if p.requires_grad]


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class TwoProcesses:
    """A ``Reducer`` for one of two threads in place of two processes that share a batch."""

    size = 2

    def __init__(self, rank: int = 0, shared: TwoProcesses | None = None) -> None:
        self.rank = rank
        self.barrier = shared.barrier if shared else threading.Barrier(2, timeout=60)
        self.values: dict[int, Tensor] = shared.values if shared else {}

    @classmethod
    def pair(cls) -> tuple[TwoProcesses, TwoProcesses]:
        first = cls()
        return first, cls(1, first)

    def sum(self, values: Tensor) -> Tensor:
        assert values.dtype == torch.float64
        return self._sum(values)

    def sum_gradients(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self._sum(gradient)

    def passes(self, own: int) -> int:
        return own

    def _sum(self, values: Tensor) -> Tensor:
        self.values[self.rank] = values
        self.barrier.wait()
        total = self.values[0] + self.values[1]
        self.barrier.wait()
        return total
