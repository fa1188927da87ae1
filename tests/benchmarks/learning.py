"""Learning: time saved by storing features or prefixes instead of pixels, and the time of an iteration's parts."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sims.catalog import make
from tests.benchmarks.measure import COMMAND, Contender, Row, interleave, time_row
from tests.benchmarks.vla_sizes import QUARTER, TINY, Scene, parameters_of, policy_of, rollout_of
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Reducer, Rollout
from vla_rl.contract.env import Observation
from vla_rl.contract.policy import Features, Likelihood
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde, LastStep, NoisePlacement
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.features import KeepPictures, KeepPrefix
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import Vocabulary

SAMPLERS: dict[str, NoisePlacement] = {"last_step": LastStep(), "all_steps": AllSteps()}
# Every epoch in full, from the first iteration on.
CONFIG = PPOConfig(critic_warmup=0, stop_kl=float("inf"))
VLA_CONFIG = PPOConfig(epochs=2, minibatch=4, critic_warmup=0, stop_kl=float("inf"))


def update_stored_vs_recomputed(quick: bool = False) -> list[Row]:
    """One PPO update from stored features, against one whose every minibatch runs the frozen backbone on pixels."""
    num_envs, decisions, repeats = (2, 2, 1) if quick else (64, 12, 3)
    found = []
    for name, noisy_steps in SAMPLERS.items():
        env = make("lift", num_envs=num_envs)
        with closing(env):
            policy = _policy(env, noisy_steps)
            rollout = _source(env, _Both(policy), decisions).next()
        features, pixels = _without(rollout, ("images", "task")), _without(rollout, ("image_features",))
        contenders, metrics = {}, {}
        for side, data in {"ours": features, "other": pixels}.items():
            contenders[side] = _update(partial(_learner, pixels=side == "other"), policy, data, side, metrics)
        seconds = interleave(contenders, repeats)
        gap = abs(metrics["ours"]["policy/kl"] - metrics["other"]["policy/kl"])
        assert gap <= 1e-3 * metrics["ours"]["policy/kl"], "the two updates differ"
        detail = {
            f"{side}_bytes_per_decision": _size(data) for side, data in {"ours": features, "other": pixels}.items()
        }
        pair = (seconds["ours"], seconds["other"])
        group = "update_stored_vs_recomputed"
        found.append(time_row(f"{group}_{name}", group, pair, num_envs=num_envs, decisions=decisions, **detail))
    return found


def iteration_parts(quick: bool = False) -> list[Row]:
    """Time of each part of one rollout and one update, in percent."""
    num_envs, decisions, iterations = (2, 2, 1) if quick else (64, 12, 4)
    env = make("lift", num_envs=num_envs)
    spent = dict.fromkeys(("simulation", "rendering", "perception", "acting", "learning"), 0.0)
    with closing(env):
        policy = _policy(env, LastStep())
        env._render = _timed(env._render, spent, "rendering")
        env.step, env.reset = (_timed(call, spent, "simulation") for call in (env.step, env.reset))
        policy.encode = _timed(policy.encode, spent, "perception")
        policy.act = _timed(policy.act, spent, "acting")
        source = _source(env, policy, decisions)
        learner = _learner(policy)
        update = _timed(learner.update, spent, "learning")
        update(source.next())
        spent.update(dict.fromkeys(spent, 0.0))
        start = time.perf_counter()
        for _ in range(iterations):
            update(source.next())
        total = time.perf_counter() - start
    spent["simulation"] -= spent["rendering"]  # measured inside it
    spent["rest"] = total - sum(spent.values())
    detail = {"num_envs": num_envs, "decisions": decisions, "iteration_s": round(total / iterations, 3)}
    detail["control_steps_per_s"] = round(iterations * num_envs * decisions * policy.config.horizon / total)
    command = f"{COMMAND} iteration_parts"
    return [
        Row(f"iteration_{name}", 100 * value / total, None, None, "percent", command, {} if i else detail)
        for i, (name, value) in enumerate(spent.items())
    ]


def prefix_stored_vs_recomputed(quick: bool = False) -> list[Row]:
    """A SmolVLA in the published proportions, chains of 4 steps, two cameras, the same decisions on both sides."""
    shape, scene, repeats = (TINY, Scene(side=32, words=4), 1) if quick else (QUARTER, Scene(), 2)
    decisions, num_envs = 2, 2
    found = []
    for name, placement in SAMPLERS.items():
        policy = policy_of(shape, scene, VLAOptions(sampler=FlowSampler(FlowSde(0.5), placement, 4)))
        contenders, metrics, sizes = {}, {}, {}
        for side, kept in {"ours": KeepPrefix(), "other": KeepPictures()}.items():
            policy.kept = kept
            rollout = rollout_of(policy, scene, decisions, num_envs)
            contenders[side] = _update(learner_of, copy.deepcopy(policy), rollout, side, metrics)
            sizes[f"{side}_bytes_per_decision"] = _size(rollout)
        seconds = interleave(contenders, repeats)
        gap = abs(metrics["ours"]["policy/kl"] - metrics["other"]["policy/kl"])
        assert gap <= 1e-3 * metrics["ours"]["policy/kl"], "the two updates differ"
        pair, millions = (seconds["ours"], seconds["other"]), round(parameters_of(policy) / 1e6, 1)
        passes = decisions * num_envs * VLA_CONFIG.epochs
        found.append(
            time_row(
                f"prefix_stored_vs_recomputed_{name}",
                "prefix_stored_vs_recomputed",
                pair,
                millions=millions,
                decisions_seen=passes,
                **sizes,
            )
        )
    return found


def learner_of(policy: FlowVLA, config: PPOConfig = VLA_CONFIG) -> PPO:
    """PPO with a critic of the pooled prefix and the state, on the policy's device."""
    torch.manual_seed(0)
    critic = ValueCritic(policy.feature_sizes).to(policy.action_low.device)
    return PPO(policy, policy.trainable(), critic, config, torch.Generator().manual_seed(0))


class _Both:
    """Acts as ``policy`` and stores pixels beside features, so that both updates get the same experience."""

    def __init__(self, policy: TinyVLA) -> None:
        self._policy = policy
        self.act, self.initial_state, self.reset_state = policy.act, policy.initial_state, policy.reset_state
        self.version = 0

    def encode(self, obs: Observation) -> Features:
        images = {"images": torch.as_tensor(obs.images["front"]), "task": torch.as_tensor(obs.task)}
        return {**self._policy.encode(obs), **images}


class _Perceiver:
    """Features from pixels, once per minibatch: actor and critic share them."""

    def __init__(self, policy: TinyVLA) -> None:
        self._policy = policy
        self._images: Tensor | None = None
        self._features = torch.empty(0)

    @torch.no_grad()
    def __call__(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        images = features["images"]
        if images is not self._images:
            lead = images.shape[:-3]
            tokens = self._policy.tokens[features["task"].flatten()]
            embedded = self._policy.run_backbone(images.flatten(0, len(lead) - 1), tokens).features
            self._images, self._features = images, embedded.unflatten(0, lead)
        return {**features, "image_features": self._features}


class _PixelPolicy:
    """``policy`` whose likelihood starts from pixels; the rest of the protocol is the policy's own."""

    def __init__(self, policy: TinyVLA, perceive: _Perceiver) -> None:
        self._policy, self._perceive, self.kl, self.version = policy, perceive, policy.kl, 0
        self.encode, self.act = policy.encode, policy.act
        self.initial_state, self.reset_state = policy.initial_state, policy.reset_state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        return self._policy.log_prob(self._perceive(features), sample, aux)


class _PixelCritic(nn.Module):
    """``critic`` that starts from pixels."""

    def __init__(self, critic: ValueCritic, perceive: _Perceiver) -> None:
        super().__init__()
        self.critic, self._perceive = critic, perceive

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        return self.critic(self._perceive(features))

    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        self.critic.calibrate(self._perceive(features), reducer)


def _update(
    learner: Callable[[Any], PPO], policy: Any, rollout: Rollout, side: str, metrics: dict[str, dict[str, float]]
) -> Contender:
    """A first update from the same weights each time."""
    fresh: list[PPO] = []

    def prepare() -> None:
        fresh[:] = [learner(copy.deepcopy(policy))]

    def run() -> None:
        metrics[side] = fresh[0].update(rollout)

    return Contender(run, prepare)


def _policy(env: Any, noisy_steps: NoisePlacement) -> TinyVLA:
    """An untrained policy for ``env``; speed does not depend on its weights."""
    torch.manual_seed(0)
    config = TinyConfig(sampler=FlowSampler(FlowSde(0.5), noisy_steps, 4))
    policy = TinyVLA(env.spec, Vocabulary.from_texts(env.spec.tasks), Affine.from_bounds(env.spec.state), config)
    policy.backbone.eval().requires_grad_(False)
    return policy


def _learner(policy: TinyVLA, pixels: bool = False) -> PPO:
    torch.manual_seed(0)
    critic: nn.Module = ValueCritic({"image_features": policy.backbone.features, "state": policy.spec.state.shape[0]})
    actor: Any = policy
    if pixels:
        perceive = _Perceiver(policy)
        actor, critic = _PixelPolicy(policy, perceive), _PixelCritic(critic, perceive)
    return PPO(actor, policy.trainable(), critic, CONFIG, torch.Generator().manual_seed(0))


def _source(env: Any, policy: Any, decisions: int) -> RolloutSource:
    return RolloutSource(env, policy, decisions, SeedStream(0, 1_000_000), torch.Generator().manual_seed(0))


def _without(rollout: Rollout, names: tuple[str, ...]) -> Rollout:
    features, final = (
        {name: item for name, item in part.items() if name not in names}
        for part in (rollout.features, rollout.final_features)
    )
    return replace(rollout, features=features, final_features=final)


def _size(rollout: Rollout) -> int:
    """Bytes of one stored observation."""
    return sum(item[0, 0].numel() * item.element_size() for item in rollout.features.values())


def _timed(call: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    """``call``, whose seconds are added to ``spent[name]``."""

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments, **options)
        spent[name] += time.perf_counter() - start
        return result

    return timed
