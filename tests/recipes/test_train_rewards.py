"""Reward models from frames of lift: labels, training, the report; a vision-language model that pays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.mujoco.tasks.lift import claims
from sims.mujoco.tasks.place import claims as claims_about_place
from tests.commands import save_untrained
from tests.recipes.imagine.test_grpo import imagined_lift
from tests.recipes.test_rewarded import PPO
from tests.rewards.test_judge import PROMPT, llava
from vla_rl.cli import main
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.env import Observation
from vla_rl.contract.intervals import wilson
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import build, improve
from vla_rl.recipes.train_rewards import TrainSuccess, balanced, evaluate_model, evaluate_progress, label_frames, share
from vla_rl.recipes.trainers import LearnedReward, RunContext
from vla_rl.rewards.env import RewardWeights
from vla_rl.rewards.frames import LabelledFrames
from vla_rl.rewards.judge import VLMJudge
from vla_rl.rewards.progress import ProgressCritic
from vla_rl.rewards.reward_model import load_reward
from vla_rl.training.tracking import RunFolder

LITTLE = EnvConfig("lift", options={"image_size": 24})


# -- labels ------------------------------------------------------------------------------------------------------------
def test_claims_about_lift_by_hand():
    """Rows: nothing up; the named cube up; another one up; both up; named is the one that the seed chose."""
    heights = np.array([[0.02, 0.02], [0.07, 0.02], [0.02, 0.07], [0.07, 0.06], [0.06, 0.02]], np.float32)
    cubes = np.zeros((5, 2, 3), np.float32)
    cubes[..., 2] = heights
    extras = {"cubes": cubes.reshape(5, 6), "target": cubes[:, 0], "seeded": np.array([2, 2, 2, 2, 1])}
    extras = {f"privileged/{name}": value for name, value in extras.items()}
    task = np.full(5, 1)
    (named, lifted, known), (other, other_lifted, other_known) = claims(
        Observation({}, np.zeros((5, 1)), task, task, extras)
    )
    assert named.tolist() == task.tolist() and lifted.tolist() == [False, True, False, True, True] and known.all()
    assert other.tolist() == [2, 2, 2, 2, 1] and not other_lifted.any()
    assert other_known.tolist() == [True, True, False, False, False]


def place(spots: list[tuple[float, float]], height: float = 0.018, opening: float = 0.06) -> Observation:
    """A row for each pair: cubes, the named one first, at ``spots``; the named plate at 0, the other one at 0.1."""
    cubes = np.zeros((3, 2, 3), np.float32)
    cubes[:, :, 0], cubes[:, :, 2] = spots, height
    plates = np.zeros((2, 3, 3), np.float32)
    plates[1, :, 0] = 0.1
    extras = {"target": cubes[:, 0], "other_cube": cubes[:, 1], "goal": plates[0], "other_goal": plates[1]}
    extras["other_tasks"] = np.array([[0, 1, 2], [1, 1, 2], [1, 2, 2]])  # their sums choose the pairs in turn
    state = np.full((3, 8), opening, np.float32)
    task = np.full(3, 9)
    return Observation({}, state, task, task, {f"privileged/{name}": value for name, value in extras.items()})


def test_claims_about_place_by_hand():
    """The other claim is about the other cube, the other plate, or both: the same throughout an episode."""
    for named, other, done in (
        (0.024, 0.2, [True, False, False, False]),  # named cube on named plate; then of each of ``OTHERS``
        (0.2, 0.024, [False, True, False, False]),
        (0.1, 0.2, [False, False, True, False]),
        (0.2, 0.1, [False, False, False, True]),
        (0.026, 0.074, [False] * 4),
    ):
        obs = place([(named, other)] * 3)
        (task, label, known), (others, other_label, other_known) = claims_about_place(obs)
        assert (task == 9).all() and others.tolist() == [0, 1, 2] and known.all() and other_known.all()
        assert (label == done[0]).all() and other_label.tolist() == done[1:]
    for held in (place([(0.0, 0.1)] * 3, height=0.03), place([(0.0, 0.1)] * 3, opening=0.04)):
        assert not any(label.any() for _, label, _ in claims_about_place(held)), "in the air, or not let go"


def frames_of(
    seeds: list[int], random_action_prob: float, env: EnvConfig = LITTLE, num_envs: int = 5
) -> LabelledFrames:
    return label_frames(env, env.claims(), seeds, num_envs, random_action_prob, np.random.default_rng(0))


def test_frames_show_what_the_environment_calls_done():
    """Without random actions, episodes end with five frames of success, under the other instruction with none."""
    seeds = [11, 12, 13, 14, 15, 16, 17]  # two batches, the second filled up
    frames = frames_of(seeds, random_action_prob=0.0)
    tracks = frames.tracks()
    assert set(frames.episode.tolist()) == set(seeds) and len(tracks) == 14
    shown = {(int(track.episode[0]), bool(track.label.any())) for track in tracks}
    assert shown == {(seed, said) for seed in seeds for said in (True, False)}
    for track in tracks:
        if track.label.any():
            # The fifth consecutive frame with a lifted cube ends the episode; later frames are not labelled.
            assert track.label[-5:].all() and track.label.sum() == 5 and 10 < len(track) < 40
            (other,) = (t for t in tracks if t.episode[0] == track.episode[0] and t is not track)
            assert np.array_equal(other.images["front"], track.images["front"]) and other.text[0] != track.text[0]


def test_frames_with_random_actions_follow_from_the_seeds():
    seeds = list(range(20, 25))
    clean, noisy, repeated = frames_of(seeds, 0.0), frames_of(seeds, 0.6), frames_of(seeds, 0.6)
    assert np.array_equal(noisy.images["front"], repeated.images["front"])
    assert np.array_equal(noisy.label, repeated.label)
    assert noisy.label.mean() < 0.6 * clean.label.mean()


def test_a_third_of_every_minibatch_shows_success():
    label = np.random.default_rng(0).random(200) < 0.08
    batches = balanced(label, 30, torch.Generator().manual_seed(0))
    drawn = [next(batches) for _ in range(40)]
    assert all(label[index].sum() == 10 and len(set(index.tolist())) == 30 for index in drawn)
    assert len(set(np.concatenate(drawn).tolist())) == 200


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_shipped_critic_follows_lift_and_reads(tmp_path):
    """`vla-rl train configs/rewards.py:progress` as it is."""
    main(["train", "configs/rewards.py:progress", "--out", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    print(json.dumps(found))
    progress = found["progress"]
    assert progress["order"] > 0.8
    assert progress["half"]["low"] > 0.8 and progress["wrong_instruction_half"]["high"] < 0.2


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_shipped_recipe_reaches_its_stated_precision(tmp_path):
    """`vla-rl train configs/rewards.py:success` as it is."""
    main(["train", "configs/rewards.py:success", "--out", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    print(json.dumps(found))
    assert found["frames"]["precision"]["value"] > 0.9 and found["frames"]["recall"]["value"] > 0.85
    assert found["episodes"]["found"]["low"] > 0.93 and found["episodes"]["false_alarms"]["high"] < 0.05


# -- what is reported --------------------------------------------------------------------------------------------------
class Oracle:
    """Scores by the picture's first pixel and waits for two frames in a row."""

    threshold = 100.0

    def __init__(self) -> None:
        self.config = replace(TrainSuccess().network, hold=2)

    def scores(self, frames):
        return frames.images["front"][:, 0, 0, 0].astype(float)

    def initial_state(self, num_envs):
        return {}

    def evaluate(self, frames, text, valid, state):
        high = frames["front"][..., 0, 0, 0] >= self.threshold
        done = high & np.roll(high, 1, axis=1)
        done[:, 0] = False
        return type("RewardOutput", (), {"done": done}), state


def track(episode: int, predicted: str, success: str) -> LabelledFrames:
    """One episode in which the frames of ``predicted`` with a "1" score high and those of ``success`` are successes."""
    picture = np.zeros((len(predicted), 1, 1, 3), np.uint8)
    picture[:, 0, 0, 0] = [100 * int(c) for c in predicted]
    label, text = np.array([c == "1" for c in success]), np.array(["it"] * len(success))
    return LabelledFrames({"front": picture}, text, label, np.full(len(success), episode))


def test_the_report_by_hand():
    frames = LabelledFrames.concatenate(
        [
            track(0, predicted="00111", success="00111"),  # found
            track(1, predicted="01111", success="00011"),  # found, too early
            track(2, predicted="00101", success="00111"),  # missed: never twice in a row
            track(3, predicted="00000", success="00010"),  # success did not last, no prediction
            track(4, predicted="00110", success="00000"),  # false alarm
            track(5, predicted="10101", success="00000"),  # not twice in a row
        ]
    )
    found = evaluate_model(Oracle(), frames)  # type: ignore[arg-type]
    assert found["frames"]["of"] == 30
    assert found["frames"]["precision"] == share(7, 14) and found["frames"]["recall"] == share(7, 9)
    assert found["episodes"]["found"] == share(2, 3)
    assert found["episodes"]["false_alarms"] == share(1, 3)
    assert found["episodes"]["early"] == share(1, 2)
    assert (share(7, 9)["low"], share(7, 9)["high"]) == wilson(7, 9) and share(0, 0)["value"] is None


class Scale(Oracle):
    """Progress is the picture's first pixel as a percentage."""

    def evaluate(self, frames, text, valid, state):
        return type("RewardOutput", (), {"progress": frames["front"][..., 0, 0, 0] / 100}), state


def test_the_report_on_progress_by_hand():
    def ending(episode: int, percent: list[int], success: bool) -> LabelledFrames:
        frames = track(episode, "0" * len(percent), "0" * (len(percent) - 1) + "01"[success])
        frames.images["front"][:, 0, 0, 0] = percent
        return frames

    frames = LabelledFrames.concatenate(
        [
            ending(0, [0, 10, 60], True),
            ending(1, [0, 40, 30], True),  # ranks 1, 3, 2
            ending(2, [0, 90, 50], False),
            ending(3, [0, 10, 51], False),
            ending(4, [0, 0, 0], False),
        ]
    )
    found = evaluate_progress(Scale(), frames)  # type: ignore[arg-type]
    assert found["order"] == pytest.approx(0.75)
    assert found["half"] == share(1, 2) and found["wrong_instruction_half"] == share(1, 3)


# -- the command -------------------------------------------------------------------------------------------------------
QUICK = "--fit.steps 30 --network.width 8 --network.stem 4 --precision 0.05 --num-envs 4 --random-action-prob 0"


def test_the_command_leaves_a_classifier_and_says_how_good_it_is(tmp_path, capsys):
    numbers = "--training 6 --calibration 4 --test 4"
    out, size = tmp_path / "run", '{"image_size": 24}'
    given = ["train", "configs/rewards.py:success", "--out", str(out), "--env.options", size]
    main([*given, *f"{QUICK} {numbers}".split()])
    summary = json.loads((out / "summary.json").read_text())
    assert {"low", "high", "of", "value"} == set(summary["test"]["frames"]["precision"])
    assert summary["test"]["episodes"]["found"]["of"] == 4
    model = load_reward(out / "checkpoints" / "success")
    assert model.threshold == summary["calibration"]["threshold"] and "red" in model.encoder.words
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [24]
    assert "of 4" in capsys.readouterr().err
    main(["inspect", str(out / "checkpoints" / "success")])
    shown = capsys.readouterr().out
    assert "SuccessClassifier" in shown and "front" in shown and "purple" not in shown and "yellow" in shown


def test_the_command_leaves_a_progress_critic(tmp_path):
    frames_of(list(range(9)), random_action_prob=0.0).save(tmp_path / "mine.npz")
    command = ["train", "rewards.py:progress", "--frames", str(tmp_path / "mine.npz"), "--out", str(tmp_path / "run")]
    main([*command, *f"{QUICK} --training 5 --calibration 2 --test 2 --fit.batch 8".split()])
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    progress = found["progress"]
    shares = (progress["half"], progress["wrong_instruction_half"], found["episodes"]["found"])
    assert [one["of"] for one in shares] == [2] * 3
    assert isinstance(load_reward(tmp_path / "run" / "checkpoints" / "progress"), ProgressCritic)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [24]


# -- a judge, and what it pays PPO, real or imagined -------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """What ``rewards.py:judge`` leaves, by a small untrained model that never calls anything done."""
    folder = tmp_path_factory.mktemp("judge")
    model = llava(folder / "model")
    given = ["--judge.vlm.model", str(model), "--judge.prompt", PROMPT, "--judge.threshold", "0.999"]
    main(["train", "configs/rewards.py:judge", *given, "--test", "2", "--num-envs", "2", "--out", str(folder / "run")])
    return folder / "run"


def test_a_judge_is_made_from_a_models_folder_and_asked(run):
    judge = load_reward(run / "checkpoints/judge")
    assert isinstance(judge, VLMJudge) and judge.config.prompt == PROMPT and judge.config.threshold == 0.999
    frames = json.loads((run / "summary.json").read_text())["test"]["frames"]
    assert frames["precision"]["of"] == 0 and frames["recall"]["value"] == 0 and frames["of"] > 2 * 2 * 20


@pytest.mark.full
def test_ppo_in_imagination_is_paid_by_it_and_validated_by_true_success(run, tmp_path):
    policy = TinyVLA.from_pretrained(save_untrained(tmp_path / "policy"))
    reward = LearnedReward(str(run / "checkpoints/judge"), RewardWeights(progress=3.0))
    context = RunContext(imagined_lift(), policy, 1, OneProcess(), reward=reward)
    setup = build(PPO, context)
    paid = setup.source.next().reward.numpy()
    setup.env.close()
    assert (paid != 0).any() and (np.abs(paid) <= 3).all(), "differences of the model's answers"
    folder = RunFolder(tmp_path / "run", {})
    improve(PPO, context, EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4), folder)
    lines = folder.metrics("rl")
    assert len(lines) == 3 and max(line.get("policy/grad_norm", 0.0) for line in lines) > 0
    assert lines[0]["eval/score"] in (0.0, 0.25, 0.5, 0.75, 1.0)
