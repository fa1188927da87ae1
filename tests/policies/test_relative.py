"""Relative actions: LeRobot 0.6.1's numbers, the same chains and densities, and what continues, learns and corrects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.policies.test_real_time_chunking import GUIDANCES, Straight, states
from tests.policies.test_tiny import SPEC, made, observations
from tests.policies.vla import tiny_folders
from tests.policies.vla.public_folders import write
from tests.policies.vla.tiny_vlas import tiny_vla
from tests.toys import seeded
from vla_rl.algorithms.chunks import normalized
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import Features
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.latent_noise import GaussianLatent
from vla_rl.policies.normalization import ORIGIN, Affine, Relative, made_absolute, origin
from vla_rl.policies.openvla.decoding import own_options
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.real_time_chunking import RealTimeChunking, RealTimeConfig
from vla_rl.policies.residual import DeterministicResidual
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.tiny import TinyVLA
from vla_rl.policies.vla.checkpoint import read_public
from vla_rl.policies.vla.dataset_statistics import read_statistics
from vla_rl.policies.vla.lerobot_folder import save_lerobot
from vla_rl.policies.vla.normalization_formulas import Modes
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.imitate import demonstrated_chunks, demonstrated_scale

GOLDEN = Path(__file__).parents[1] / "golden" / "vla" / "relative"
ROBOTS = ("so101", "bimanual")
MASK = (True, False)
WIDE = replace(SPEC, action=replace(SPEC.action, low=-9.0, high=9.0))
SAMPLER = FlowSampler(FlowSde(0.5), AllSteps(), 4)


def tiny(relative: Relative, spec: Any = WIDE) -> TinyVLA:
    absolute = made(SAMPLER, spec)
    policy = TinyVLA(
        spec, absolute.vocabulary, absolute.proprioception, replace(absolute.config, relative=relative), SCALE
    )
    policy.load_state_dict(absolute.state_dict())
    return policy.eval()


SCALE = Affine((0.1, 0.2), (0.5, 2.0))


def smolvla(relative: Relative) -> SmolVLA:
    return tiny_vla(SmolVLA, VLAOptions(horizon=2, sampler=SAMPLER, relative=relative))


def golden(robot: str, folder: Path) -> tuple[Relative, Affine, dict[str, Tensor]]:
    """What we read of LeRobot's folder, and what LeRobot makes of it."""
    saved = json.loads((GOLDEN / robot / "expected.json").read_text(encoding="utf-8"))
    expected = {name: torch.tensor(item) for name, item in saved.items()}
    state, action = expected["states"].shape[-1], expected["actions"].shape[-1]
    for path in (GOLDEN / robot).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    features = {"input_features": {"observation.state": {"type": "STATE", "shape": [state]}}}
    features["output_features"] = {"action": {"type": "ACTION", "shape": [action]}}
    write(folder / "config.json", {"type": "pi0", **features, "chunk_size": 3, "n_action_steps": 3})
    return read_public(folder).relative, read_statistics(folder, Modes()).action, expected


class Played(FlowPolicy):
    """A flow that ends in what it is told, for actions of any size."""

    def __init__(self, size: int, scale: Affine) -> None:
        vector = replace(SPEC.action, shape=(size,), low=-99.0, high=99.0)
        super().__init__(replace(SPEC, action=vector), scale, Straight().config)
        self.config = replace(self.config, horizon=3)


@pytest.mark.parametrize("robot", ROBOTS)
def test_lerobots_own_numbers(robot, tmp_path):
    relative, scale, expected = golden(robot, tmp_path)
    assert sum(relative) == len(relative) - 1  # LeRobot was told to leave one gripper out
    features = origin(relative, expected["states"])
    policy: Any = Played(len(relative), scale)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        normalized(policy, features, expected["actions"]), expected["normalized_actions"], **close
    )
    absolute = made_absolute(features, scale.unnormalize(expected["outputs"]))
    torch.testing.assert_close(absolute, expected["absolute_outputs"], **close)


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_rest_of_a_chunk_is_expressed_anew_as_lerobot_does(robot, tmp_path):
    """What is left of the last chunk, kept as absolute, relative to the state that the robot has moved to."""
    relative, scale, expected = golden(robot, tmp_path)
    policy = RealTimeChunking(Played(len(relative), scale))
    rest = expected["absolute_outputs"][:1].numpy()
    told = policy.continue_actions(policy.initial_state(1), np.zeros(1, np.int64), rest, np.array([1]))
    here = policy._origin(origin(relative, expected["moved"]))
    target = policy.guided({**told, "chunk": told["chunk"] - here}).target.unflatten(-1, (3, -1))[0]
    torch.testing.assert_close(target, expected["prefix"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("guidance", GUIDANCES)
def test_a_chunk_continues_the_commands_though_the_robot_has_moved(guidance):
    """Of ``d = 2`` late actions the commands stay; guided to the old offsets they would go along with the state."""
    policy = RealTimeChunking(Straight(), RealTimeConfig(guidance))
    spot = torch.tensor([[0.01, 0.0]]), torch.tensor([[0.03, 0.0]])
    first, state = policy.act({**states(1, 1), ORIGIN: spot[0]}, policy.initial_state(1), "eval", seeded(1))
    told = policy.continue_chunk(state, [0], [3], [2])
    moved: Features = {**states(1, 2), ORIGIN: spot[1]}
    second, _ = policy.act(moved, told, "eval", seeded(2))
    free, _ = policy.act(moved, policy.initial_state(1), "eval", seeded(2))
    commands = [
        made_absolute({ORIGIN: at}, policy.base.action_scale.unnormalize(one.sample))
        for at, one in zip((*spot, spot[1]), (first, second, free), strict=True)
    ]
    gap = (commands[1][:, :2] - commands[0][:, 3:5]).abs()
    apart = (commands[2][:, :2] - commands[0][:, 3:5]).abs()
    assert (gap < 0.02 * apart).all() and apart.min() > 1e-3


@pytest.mark.parametrize("make", [tiny, smolvla])
def test_only_what_is_executed_differs(make):
    """Chain and density are those of the network; the state is added to the entries that are relative."""
    obs, here, there = observations(), make(()), make(MASK)
    out, moved = (policy.act(policy.encode(obs), {}, "sample", seeded())[0] for policy in (here, there))
    for one, other in (
        (out.sample, moved.sample),
        (out.logprob, moved.logprob),
        (out.aux["points"], moved.aux["points"]),
    ):
        assert torch.equal(one, other)
    assert torch.equal(*(p.log_prob(p.encode(obs), out.sample, out.aux).logprob for p in (here, there)))
    state = torch.as_tensor(obs.state)
    raw = there.action_scale.unnormalize(moved.sample) + state[:, None, :2] * torch.tensor([1.0, 0.0])
    torch.testing.assert_close(moved.action, raw.clamp(there.action_low, there.action_high))
    assert not torch.equal(out.action[..., 0], moved.action[..., 0])


def test_limits_are_those_of_absolute_commands():
    out, _ = (policy := tiny(MASK, SPEC)).act(policy.encode(obs := observations()), {}, "eval", seeded())
    low, high = policy.action_low, policy.action_high
    assert ((out.action >= low) & (out.action <= high)).all() and (out.action[..., 0] == 0.1).any()
    assert np.abs(obs.state).max() > 0.5


@pytest.mark.parametrize("make", [tiny, smolvla])
def test_a_checkpoint_acts_the_same(make, tmp_path):
    policy = make(MASK)
    policy.save_pretrained(tmp_path)
    again: Any = load_policy(tmp_path)
    one, other = (p.act(p.encode(observations()), {}, "eval", seeded())[0].action for p in (policy, again))
    assert again.relative == MASK and torch.equal(one, other)


def episodes() -> Demonstrations:
    """Two episodes of steps in which the action is 0.5 and 3 further than the state."""
    obs, episode = observations(8), np.repeat([0, 1], 4)
    action = (obs.state[:, :2] + np.array([0.5, 3.0])).astype(np.float32)
    time, task = np.tile(np.arange(4), 2), np.zeros(8, np.int64)
    return Demonstrations(
        images=dict(obs.images),
        state=obs.state,
        action=action,
        episode=episode,
        seed=episode,
        time=time,
        task=task,
        tasks=SPEC.tasks,
        fps=10.0,
    )


def test_what_is_imitated_is_relative_to_the_state_before_the_chunk():
    shown = episodes()
    scale = demonstrated_scale(shown, (True, True), 1)
    torch.testing.assert_close(torch.tensor(scale.offset), torch.tensor([0.5, 3.0]), atol=1e-6, rtol=1e-6)
    for policy in (tiny(MASK), smolvla(MASK)):
        features = policy.encode(shown.observation())
        chunks = demonstrated_chunks(policy, shown, features, 2)
        back = policy.action_scale.unnormalize(chunks.actions)
        first = torch.as_tensor(shown.action[:-1] - shown.state[:-1, :2] * np.array([1.0, 0.0], np.float32))
        torch.testing.assert_close(back[:-1, 0], first)
        late = shown.action[1] - shown.state[0, :2] * np.array([1.0, 0.0], np.float32)
        torch.testing.assert_close(back[0, 1], torch.as_tensor(late))
        kept = policy.imitation_features(shown.observation()) if isinstance(policy, SmolVLA) else features
        assert torch.equal(kept[ORIGIN], features[ORIGIN])


def test_corrections_and_chosen_noise_are_of_absolute_commands():
    obs = observations()
    base = tiny(MASK)
    features = base.encode(obs)
    chosen, _ = (policy := GaussianLatent(base)).act(policy.encode(obs), {}, "eval", seeded())
    noise = torch.zeros(len(obs.state), base.horizon * 2)
    torch.testing.assert_close(chosen.action, base.integrated(features, noise).action, atol=1e-5, rtol=1e-5)
    residual = DeterministicResidual(base)
    inputs, _ = residual.context(residual.encode(obs), residual.initial_state(len(obs.state)), seeded())
    played = base.act(features, {}, "eval", seeded())[0].action
    torch.testing.assert_close(residual.action_scale.unnormalize(inputs["base_action"]), played[:, 0])


def test_what_cannot_be_relative_is_refused():
    with pytest.raises(ContractError, match=r"1 entries are said .* actions of 2 numbers and states of 3"):
        tiny((True,))
    named = replace(
        WIDE, state=replace(WIDE.state, names=("y", "x", "z")), action=replace(WIDE.action, names=("x", "y"))
    )
    with pytest.raises(ContractError, match="entry 0 of an action of 'made up' is 'x' but that of its state 'y'"):
        tiny(MASK, named)
    with pytest.raises(UserError, match=r"an OpenVLA's actions .* leave it out"):
        own_options(VLAOptions(relative=MASK))


def test_a_folder_for_lerobot_reads_back(tmp_path):
    """The mask too, where LeRobot's parts of names could not tell the entries apart: "arm" is in "arm2"."""
    named = replace(WIDE, action=replace(WIDE.action, names=("arm", "arm2")))
    base = tiny_folders.smolvla(tmp_path / "base", named)
    policy: Any = load_policy(base, named, VLAOptions(relative=(False, True), horizon=2))
    policy.action_scale = SCALE
    torch.nn.init.normal_(next(iter(policy.trainable().values())), std=0.3)
    save_lerobot(policy, tmp_path / "made")
    again: Any = load_policy(tmp_path / "made", named)
    one, other = (p.act(p.encode(observations()), {}, "eval", seeded())[0].action for p in (policy, again))
    assert again.relative == (False, True) and again.horizon == 2
    torch.testing.assert_close(one, other)
    with pytest.raises(UserError, match="holds a policy, which would be lost"):
        save_lerobot(policy, tmp_path / "made")
    with pytest.raises(UserError, match="LeRobot has no config and tokenizer for a TinyVLA"):
        save_lerobot(tiny(MASK), tmp_path / "other")
