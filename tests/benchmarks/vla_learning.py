"""One PPO update of a vision-language-action policy from kept prefixes, against one that sees the pictures again."""

from __future__ import annotations

import copy

import torch

from tests.benchmarks.measure import Contender, Row, interleave, time_row
from tests.benchmarks.vla_sizes import QUARTER, TINY, Scene, parameters_of, policy_of, rollout_of
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Rollout
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde, LastStep, NoisePlacement
from vla_rl.policies.vla.features import KeepPictures, KeepPrefix
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions

PLACEMENTS: dict[str, NoisePlacement] = {"last_step": LastStep(), "all_steps": AllSteps()}
# Every epoch in full, from the first iteration on.
CONFIG = PPOConfig(epochs=2, minibatch=4, critic_warmup=0, stop_kl=float("inf"))
GROUP = "prefix_stored_vs_recomputed"


def prefix_stored_vs_recomputed(quick: bool = False) -> list[Row]:
    """A SmolVLA in the published proportions, chains of 4 steps, two cameras, the same decisions on both sides."""
    shape, scene, repeats = (TINY, Scene(side=32, words=4), 1) if quick else (QUARTER, Scene(), 2)
    decisions, num_envs = 2, 2
    found = []
    for name, placement in PLACEMENTS.items():
        policy = policy_of(shape, scene, VLAOptions(sampler=FlowSampler(FlowSde(0.5), placement, 4)))
        contenders, metrics, sizes = {}, {}, {}
        for side, kept in {"ours": KeepPrefix(), "other": KeepPictures()}.items():
            policy.kept = kept
            rollout = rollout_of(policy, scene, decisions, num_envs)
            contenders[side] = _update(policy, rollout, side, metrics)
            sizes[f"{side}_bytes_per_decision"] = _size(rollout)
        seconds = interleave(contenders, repeats)
        gap = abs(metrics["ours"]["policy/kl"] - metrics["other"]["policy/kl"])
        assert gap <= 1e-3 * metrics["ours"]["policy/kl"], "the two updates differ"
        pair, millions = (seconds["ours"], seconds["other"]), round(parameters_of(policy) / 1e6, 1)
        passes = decisions * num_envs * CONFIG.epochs
        found.append(time_row(f"{GROUP}_{name}", GROUP, pair, millions=millions, decisions_seen=passes, **sizes))
    return found


def learner_of(policy: FlowVLA, config: PPOConfig = CONFIG) -> PPO:
    """PPO with a critic of the pooled prefix and the state, on the policy's device."""
    torch.manual_seed(0)
    critic = ValueCritic(policy.feature_sizes).to(policy.action_low.device)
    return PPO(policy, policy.trainable(), critic, config, torch.Generator().manual_seed(0))


def _update(policy: FlowVLA, rollout: Rollout, side: str, metrics: dict[str, dict[str, float]]) -> Contender:
    """A first update from the same weights each time."""
    own = copy.deepcopy(policy)
    fresh: list[PPO] = []

    def prepare() -> None:
        fresh[:] = [learner_of(copy.deepcopy(own))]

    def run() -> None:
        metrics[side] = fresh[0].update(rollout)

    return Contender(run, prepare)


def _size(rollout: Rollout) -> int:
    """Bytes of one stored observation."""
    return sum(item[0, 0].numel() * item.element_size() for item in rollout.features.values())
