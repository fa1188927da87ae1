"""Another evaluator's decisions, replayed: the first step and key that differ, and why."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.commands import save_untrained
from tests.visual_point_mass import VisualPointMass, tiny_vla
from vla_rl.cli import main
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.run import episode_generator, evaluate
from vla_rl.recipes.parity import (
    Compared,
    TraceRecorder,
    explain,
    first_difference,
    read_traces,
    replay_checkpoint,
    replay_env,
)

SEEDS = [100, 101, 102]
CHOSEN = ["sample", "action"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(checkpoint, folder with the traces of three episodes)"""
    folder = tmp_path_factory.mktemp("parity")
    env = VisualPointMass(2)
    policy = tiny_vla(env.spec)
    policy.save_pretrained(folder / "policy")
    recorder = TraceRecorder(folder / "trace", env.spec.tasks, noise_seed=5)
    outcomes = evaluate(env, policy, SEEDS, 5, watch=recorder.watch)
    assert outcomes.length.tolist() == [16, 16, 16]
    return folder / "policy", folder / "trace"


def changed(recorded, tmp_path, **arrays):
    """The first trace with other arrays (None: without), ``__`` for ``/``; the comparison with our policy."""
    with np.load(recorded[1] / "episode-100.npz") as data:
        found = dict(data) | {name.replace("__", "/"): item for name, item in arrays.items()}
    found = {name: item for name, item in found.items() if item is not None}
    np.savez(tmp_path / "other.npz", **found)
    return replay_checkpoint(recorded[0], read_traces(tmp_path / "other.npz")[0], 1e-4)


def arrays(recorded):
    with np.load(recorded[1] / "episode-100.npz") as data:
        return dict(data)


def test_our_own_trace_does_not_differ(recorded):
    traces = read_traces(recorded[1])
    assert [trace.scalars["seed"] for trace in traces] == SEEDS
    assert all(len(trace) == 8 for trace in traces)  # chunks of two
    for trace in traces:
        found = {one.key: one for one in replay_checkpoint(recorded[0], trace, 1e-4)}
        observed = ["observation/images/top", "observation/state"]
        assert list(found) == [
            *observed,
            *(f"features/{name}" for name in ("image_features", "state", "time")),
            *CHOSEN,
        ]
        assert first_difference(list(found.values())) is None and all(one.steps == 8 for one in found.values())
        compared = replay_env(VisualPointMass(1), trace, 1e-4)
        assert first_difference(compared) is None
        assert {one.key for one in compared} == {"observation/images/top", "observation/state", "observation/time"}


def test_the_first_step_and_key_that_differ_are_named(recorded, tmp_path):
    state, sample = (arrays(recorded)[name].copy() for name in ("features/state", "sample"))
    state[5:, 1] += 0.01
    sample[3:] += 1.0
    found = changed(recorded, tmp_path, features__state=state, sample=sample)
    first = first_difference(found)
    assert first is not None and (first.key, first.first) == ("sample", 3)
    assert {one.key: one.first for one in found if one.first is not None} == {"features/state": 5, "sample": 3}
    sample[2] += 1.0
    state[2] += 1.0  # in one decision, features come before samples
    first = first_difference(changed(recorded, tmp_path, features__state=state, sample=sample))
    assert first is not None and (first.key, first.first) == ("features/state", 2)


def test_other_normalization_is_explained(recorded, tmp_path):
    state, action = (arrays(recorded)[name].copy() for name in ("features/state", "action"))
    state[:, 1] = 2 * state[:, 1] + 0.5
    action[..., 0] *= -1
    found = {one.key: one.reason for one in changed(recorded, tmp_path, features__state=state, action=action)}
    assert found["features/state"] == "entry 1 of theirs is ours * 2 +0.5"
    assert found["action"] == "entry 0 of theirs is ours * -1"


def test_a_nan_is_a_difference_and_equals_a_nan_alone(recorded, tmp_path):
    action = arrays(recorded)["action"].copy()
    action[4, 1, 0] = np.nan
    first = first_difference(changed(recorded, tmp_path, action=action))
    assert first is not None and (first.key, first.first, first.largest) == ("action", 4, np.inf)
    assert first.reason == "theirs has numbers that are not finite"
    one = Compared("executed")
    one.add(0, np.array([1.0, np.nan, np.inf]), np.array([1.0, np.nan, np.inf]), 1e-4)
    assert one.first is None and one.largest == 0
    one.add(1, np.array([1.0, np.nan, np.inf]), np.array([1.0, np.nan, -np.inf]), 1e-4)
    assert one.first == 1
    one.add(2, np.array(3), np.array(3), 1e-4)  # single numbers have no axes


def test_what_the_policy_cannot_read_is_said(recorded, tmp_path):
    pictures, state = (arrays(recorded)[f"observation/{name}"] for name in ("images/top", "state"))
    first = first_difference(changed(recorded, tmp_path, observation__images__top=pictures / np.float32(255)))
    assert first is not None and first.first == 0 and "float32[1, 8, 8, 3] but uint8" in first.reason
    found = changed(recorded, tmp_path, observation__images__top=None, observation__images__front=pictures)
    assert "no such camera but ['front']" in found[0].reason and len(found) == 1
    found = changed(recorded, tmp_path, observation__state=np.where(np.arange(8)[:, None] < 4, state, 30 * state + 2))
    first = first_difference(found)
    assert first is not None and (first.key, first.first) == ("observation/state", 4)
    assert "outside its declared range" in first.reason


def test_noise_is_replayed_or_samples_are_not_compared(recorded, tmp_path):
    """A flow's sample means nothing without the noise that it started from."""
    keys = [one.key for one in changed(recorded, tmp_path, seed=None, noise_seed=None)]
    assert "features/state" in keys and not {"sample", "action"} & set(keys)
    generator = episode_generator(5, 100)
    noise = np.stack([torch.randn(4, generator=generator).numpy().reshape(2, 2) for _ in range(8)])
    found = changed(recorded, tmp_path, seed=None, noise_seed=None, noise=noise)
    assert {"sample", "action"} <= {one.key for one in found} and first_difference(found) is None
    other = first_difference(changed(recorded, tmp_path, seed=None, noise_seed=None, noise=noise + 0.1))
    assert other is not None and other.key == "sample"
    with pytest.raises(ContractError, match="draws 4 normal numbers for a decision and 2 were recorded"):
        changed(recorded, tmp_path, seed=None, noise_seed=None, noise=noise[:, :1])


def test_an_environment_whose_pictures_are_turned_is_explained(recorded, tmp_path):
    pictures = arrays(recorded)["observation/images/top"]
    changed(recorded, tmp_path, observation__images__top=pictures[:, ::-1, ::-1])
    trace = read_traces(tmp_path / "other.npz")[0]
    first = first_difference(replay_env(VisualPointMass(1), trace, 1e-4))
    assert first is None  # one white pixel of 64 is within the tolerance of pictures
    bright = np.broadcast_to(np.arange(8, dtype=np.uint8)[:, None, None] * 30, (8, 8, 8, 3)).copy()
    one = Compared("observation/images/top")
    for step in range(4):
        one.add(step, bright[0], bright[0][::-1], 1e-4)
    assert one.explained().reason == "theirs is upside down" and one.first == 0
    changed(recorded, tmp_path, seed=None)
    with pytest.raises(ContractError, match="has no seed or no executed actions"):
        replay_env(VisualPointMass(1), read_traces(tmp_path / "other.npz")[0], 1e-4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x[:, ::-1], "theirs is upside down"),
        (lambda x: x[:, :, ::-1], "theirs is mirrored"),
        (lambda x: x[:, ::-1, ::-1], "theirs is rotated by 180 degrees"),
        (lambda x: x[..., ::-1], "theirs is BGR"),
        (lambda x: 255 - x, ""),
    ],
)
def test_pictures_are_explained(change, sentence):
    pictures = np.random.default_rng(0).integers(0, 255, (3, 6, 6, 3), dtype=np.uint8)
    assert explain(pictures, change(pictures)) == sentence


def test_vectors_are_explained():
    ours = np.random.default_rng(0).normal(size=(20, 4))
    assert explain(ours, ours[:, [3, 0, 1, 2]]) == "theirs has our entries in the order [3, 0, 1, 2]"
    degrees = ours.copy()
    degrees[:, 2] = np.rad2deg(ours[:, 2])
    assert explain(ours, degrees) == "entry 2 of theirs is ours * 57.3"
    assert explain(ours, np.random.default_rng(1).normal(size=(20, 4))) == ""
    assert explain(ours[:2], ours[:2] + 1) == ""  # two points lie on any line


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"state": np.zeros((3, 2))}, "has no 'observation/state'"),
        ({"observation/state": np.array([{}], object)}, "cannot be read"),
        ({"observation/state": np.zeros((3, 2)), "action": np.zeros((2, 1, 2))}, "2 decisions"),
    ],
)
def test_a_trace_that_cannot_be_used_is_named(recorded, tmp_path, arrays, sentence):
    with pytest.raises(UserError, match=r"has no .npz file"):
        read_traces(tmp_path)
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=sentence):
        read_traces(tmp_path / "x.npz")
    with pytest.raises(UserError, match="has the instruction 'fly', which the policy does not know"):
        changed(recorded, tmp_path, instruction=np.array("fly"))


def test_the_commands_record_and_compare(capsys, tmp_path, complaint):
    policy = str(save_untrained(tmp_path / "policy"))
    given = ["--env", "lift", "--episodes", "2", "--num-envs", "2", "--env.options", '{"deadline": 10}']
    main(["eval", policy, *given, "--trace", str(tmp_path / "trace")])
    capsys.readouterr()
    lift = ["--env", "lift", "--env.options", '{"deadline": 10}']
    main(["eval", policy, "--parity", str(tmp_path / "trace"), *lift])
    said = capsys.readouterr().err
    assert said.count("no difference in 2 decisions.") == 4  # two episodes, the policy and the environment
    assert "observation/images/front" in said
    main(["eval", policy, "--parity", str(tmp_path / "trace"), "--env", "place"])
    assert "first difference: decision 0, observation/" in capsys.readouterr().err
    assert "--parity needs a checkpoint" in complaint("eval", "--parity", tmp_path / "trace")
