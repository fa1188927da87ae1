"""The recipes that train reward models and say how far these can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from vla_rl.contract.config import Checked, JsonObject, at_least, within
from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.intervals import wilson
from vla_rl.contract.load import load
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.collect import ExpertPolicy
from vla_rl.experience.driver import Driver
from vla_rl.recipes import sims
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.terminal import bar, clock, console
from vla_rl.recipes.trainers import generator
from vla_rl.rewards.frames import FramePairs, LabelledFrames, PairSampler
from vla_rl.rewards.judge import VLMJudge, VLMJudgeConfig
from vla_rl.rewards.progress import ProgressConfig, ProgressCritic, SuccessClassifier, SuccessConfig
from vla_rl.rewards.reward_model import Counts, RewardModel, RewardModelConfig, RewardOutput, value_order_correlation
from vla_rl.training.device import resolve_device
from vla_rl.training.fit import FitConfig, fit, shuffled
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class TrainReward(Checked):
    """Learn from labelled frames, choose the threshold of ``done`` on others, evaluate on still others.

    The frames come from the expert's episodes in ``env``, on training, validation and test seeds; or from the file
    ``frames`` (see ``LabelledFrames.load``), split by episodes in the shares of the three numbers of episodes.
    """

    name: ClassVar[str]  # of the checkpoint
    kind: ClassVar[type[RewardModel]]

    seed: int = 1
    frames: str = ""  # an .npz of labelled frames; without one, the simulator labels
    env: EnvConfig = NO_ENV
    claims: str = ""  # "module:function" that labels instead of what the task declares
    training: int = at_least(400, 1)  # episodes to learn from
    calibration: int = at_least(128, 1)  # episodes that the threshold is chosen on
    test: int = at_least(256, 1)  # episodes that the result is reported for
    num_envs: int = at_least(32, 1)
    random_action_prob: float = within(0.4, 0, 1)  # share of the expert's decisions that are random
    precision: float = within(0.95, 0, 1)  # wanted of the frames that are called a success
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=2000, batch=64, lr=6e-3))
    device: str = "cpu"  # where the model learns: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb"
    network: RewardModelConfig = field(default_factory=RewardModelConfig)

    def run(self, folder: RunFolder) -> JsonObject:
        """Leave the checkpoint ``name``."""
        seconds: dict[str, float] = {}
        with clock(seconds, "frames"):
            training, calibration, test = self.labelled()
        with clock(seconds, "training"):
            model = self.learn(training, folder)
        calibrated = model.calibrate(calibration, self.precision)
        model.save_pretrained(folder.checkpoint(self.name))
        with clock(seconds, "test"):
            found = self.evaluate(model, test)
        console.print(found_in_words(found))
        chosen = {"threshold": model.threshold, "on": rates(calibrated)}
        return {"test": found, "calibration": chosen, "seconds": seconds, "seed": self.seed}

    def learn(self, frames: LabelledFrames, folder: RunFolder | None = None) -> RewardModel:
        """A new model that has learnt from ``frames``."""

        def report(step: int, info: dict[str, float]) -> None:
            update(step + 1, f"loss {info['loss']:.4f}")
            if folder and (step + 1) % 25 == 0:
                folder.log(self.name, step, info)

        torch.manual_seed(self.seed)  # module initialisation has no generator argument
        model: Any = self.kind.for_frames(frames, self.network).to(resolve_device(self.device))
        with bar(f"see {self.name}", self.fit.steps) as update:
            fit(dict(model.named_parameters()), model.loss, self.batches(frames), self.fit, report)
        return model.eval()

    def batches(self, frames: LabelledFrames) -> Iterator[LabelledFrames] | Iterator[FramePairs]:
        """Endless minibatches for the loss of ``kind``."""
        raise NotImplementedError

    def evaluate(self, model: RewardModel, frames: LabelledFrames) -> JsonObject:
        return evaluate_model(model, frames)

    def labelled(self) -> list[LabelledFrames]:
        """Frames to learn from, to choose the threshold on, and to evaluate on."""
        counts = (self.training, self.calibration, self.test)
        if self.frames:
            return LabelledFrames.load(Path(self.frames).resolve()).split(counts, self.seed)
        self.env.required("labelling frames")
        seeds = seed_ranges.training_seeds(self.seed, "rewards"), seed_ranges.VALIDATION, seed_ranges.TEST
        return [self._play(list(part[:count]), i) for i, (part, count) in enumerate(zip(seeds, counts, strict=True))]

    def _play(self, seeds: list[int], part: int) -> LabelledFrames:
        claims, random = (
            load(self.claims) if self.claims else self.env.claims(),
            np.random.default_rng([self.seed, part]),
        )
        with bar(("frames", "to calibrate", "to test")[part], len(seeds)) as update:
            given = seeds, self.num_envs, self.random_action_prob, random
            return label_frames(self.env, claims, *given, lambda done: update(done, "episodes"))


@dataclass(frozen=True)
class TrainSuccess(TrainReward):
    """Learn from labelled frames to see success."""

    name: ClassVar[str] = "success"
    kind: ClassVar[type[RewardModel]] = SuccessClassifier
    network: SuccessConfig = field(default_factory=SuccessConfig)

    def batches(self, frames: LabelledFrames) -> Iterator[LabelledFrames]:
        return map(frames.select, balanced(frames.label, self.fit.batch, generator(self.seed, 8)))


@dataclass(frozen=True)
class TrainProgress(TrainReward):
    """Learn from pairs of labelled frames how much progress lies between them, and to see success."""

    name: ClassVar[str] = "progress"
    kind: ClassVar[type[RewardModel]] = ProgressCritic
    network: ProgressConfig = field(default_factory=ProgressConfig)

    def batches(self, frames: LabelledFrames) -> Iterator[FramePairs]:
        sampler = PairSampler(frames, self.network.stride, np.random.default_rng([self.seed, 9]))
        return sampler.batches(self.fit.batch)

    def evaluate(self, model: RewardModel, frames: LabelledFrames) -> JsonObject:
        return {**evaluate_model(model, frames), "progress": evaluate_progress(model, frames)}


def balanced(label: np.ndarray, batch: int, random: torch.Generator) -> Iterator[np.ndarray]:
    """Endless minibatches of indices, a third of each from those whose ``label`` [N] is True."""
    yes, no, third = np.flatnonzero(label), np.flatnonzero(~label), max(1, batch // 3)
    both = shuffled(len(yes), third, random), shuffled(len(no), batch - third, random)
    for successes, failures in zip(*both, strict=True):
        yield np.concatenate([yes[successes.numpy()], no[failures.numpy()]])


def evaluate_model(model: RewardModel, frames: LabelledFrames) -> JsonObject:
    """How well frames are classified, and episodes by ``done``; every share with its 95 % Wilson interval.

    ``frames``: precision and recall of single frames.  Their intervals take frames for independent, which those of one
    episode are not, so they are too narrow.  ``episodes``: of those in which success lasted for ``hold`` frames, how
    many had a ``done`` (``found``); of all others, how many (``false_alarms``); of the found, how many before their
    first successful frame (``early``).  Here the unit is an episode under one instruction.
    """
    counts = Counts.from_decisions(model.scores(frames) >= model.threshold, frames.label)
    outcomes = [_outcome(model, track) for track in frames.tracks()]
    found = [fired for lasted, fired, _ in outcomes if lasted]
    alarms = [fired for lasted, fired, _ in outcomes if not lasted]
    early = [early for lasted, fired, early in outcomes if lasted and fired]
    episodes = {"found": found, "false_alarms": alarms, "early": early}
    return {
        "frames": rates(counts),
        "episodes": {name: share(sum(flags), len(flags)) for name, flags in episodes.items()},
    }


def _outcome(model: RewardModel, track: LabelledFrames) -> tuple[bool, bool, bool]:
    """Whether success lasted in ``track``, whether there was a ``done``, and whether that came before any success."""
    done, hold = _watch(model, track).done[0], model.config.hold
    lasted = "1" * hold in "".join("1" if so else "0" for so in track.label)
    return lasted, bool(done.any()), bool(done.any() and done.argmax() < track.label.argmax())


def _watch(model: RewardModel | VLMJudge, track: LabelledFrames) -> RewardOutput:
    """What ``model`` says about ``track`` from its first frame to its last, [1,T]."""
    clip = {name: image[None] for name, image in track.images.items()}
    output, _ = model.evaluate(clip, track.text[:1].tolist(), np.ones((1, len(track)), bool), model.initial_state(1))
    return output


def evaluate_progress(model: RewardModel, frames: LabelledFrames) -> JsonObject:
    """``progress`` in episodes that end in success, and in the others: failures and wrong instructions.

    ``order``: the mean over successes of the rank correlation with time.  ``half``: the share of successes that end
    above one half, ``wrong_instruction_half``: that of the others; each with its 95 % Wilson interval.
    """
    tracks = [(bool(track.label[-1]), _watch(model, track).progress[0]) for track in frames.tracks()]
    good, others = ([progress for so, progress in tracks if so == wanted] for wanted in (True, False))
    return {
        "order": float(np.mean([value_order_correlation(progress) for progress in good])) if good else None,
        "half": share(sum(bool(progress[-1] > 0.5) for progress in good), len(good)),
        "wrong_instruction_half": share(sum(bool(progress[-1] > 0.5) for progress in others), len(others)),
    }


def rates(counts: Counts) -> JsonObject:
    """Precision and recall."""
    return {
        "precision": share(counts.true_positives, counts.predicted),
        "recall": share(counts.true_positives, counts.actual),
        "of": counts.total,
    }


def share(part: int, whole: int) -> JsonObject:
    """``part`` of ``whole`` with its 95 % Wilson interval; no value where there is no whole."""
    low, high = wilson(part, whole)
    return {"value": part / whole if whole else None, "low": low, "high": high, "of": whole}


def found_in_words(found: JsonObject) -> str:
    """Two lines for the terminal."""

    def percent(item: JsonObject) -> str:
        if item["value"] is None:
            return "none of 0"
        return f"{item['value']:.1%} [{100 * item['low']:.1f}, {100 * item['high']:.1f}] of {item['of']}"

    frames, episodes = found["frames"], found["episodes"]
    return (
        f"frames: right {percent(frames['precision'])} that it calls done, sees {percent(frames['recall'])} that are\n"
        f"episodes: finds {percent(episodes['found'])} successes, false alarms in {percent(episodes['false_alarms'])}"
    )


_HORIZON = 5


def label_frames(
    env_config: EnvConfig,
    claims: sims.Claims,
    seeds: list[int],
    num_envs: int,
    random_action_prob: float,
    random: np.random.Generator,
    report: Callable[[int], None] = lambda done: None,
) -> LabelledFrames:
    """Every frame of one episode per seed of ``seeds``, under every instruction that ``claims`` makes a claim about.

    The instruction names a distractor.  In a share ``random_action_prob`` of its decisions the expert moves at random,
    so that there are misses, drops and detours to learn from.  ``episode`` is the episode's seed.
    """
    env, expert = env_config.make_swapped(min(num_envs, len(seeds))), env_config.make_expert(_HORIZON)
    parts: list[LabelledFrames] = []
    for start in range(0, len(seeds), env.num_envs):
        batch = seeds[start : start + env.num_envs]
        parts += _play(env, expert.act, claims, batch, random_action_prob, random)
        report(start + len(batch))
    env.close()
    return LabelledFrames.concatenate(parts)


def _play(
    env: VecEnv,
    act: Callable[[Observation], np.ndarray],
    claims: sims.Claims,
    seeds: list[int],
    random_action_prob: float,
    random: np.random.Generator,
) -> list[LabelledFrames]:
    """One batch of episodes; environments beyond ``seeds`` replay the last seed and are not kept."""
    kept, texts = np.arange(env.num_envs) < len(seeds), np.array(env.spec.tasks)
    low, high = (np.asarray(bound, np.float32) for bound in (env.spec.action.low, env.spec.action.high))

    def act_epsilon_randomly(obs: Observation) -> np.ndarray:
        chunk = act(obs)
        lost = random.random(len(chunk)) < random_action_prob
        chunk[lost] = random.uniform(low, high, chunk[lost].shape)
        return chunk

    driver, parts = Driver(env, ExpertPolicy(act_epsilon_randomly), None, observe="all"), list[LabelledFrames]()
    driver.start(seeds)
    for decision in driver.until_done():
        for h, frame in enumerate(decision.step.frames):
            for task, label, known in claims(frame):
                chosen = decision.step.valid[:, h] & known & kept
                if chosen.any():
                    images = {name: image[chosen] for name, image in frame.images.items()}
                    parts.append(LabelledFrames(images, texts[task[chosen]], label[chosen], decision.seeds[chosen]))
    return parts


@dataclass(frozen=True)
class MakeJudge(Checked):
    """Write a judge by the model ``judge.vlm.model``, a folder or a name on the Hub, as the checkpoint "judge".

    Nothing is trained.  The judge is asked about the frames of ``test`` episodes of the expert, on test seeds.
    """

    judge: VLMJudgeConfig = field(default_factory=VLMJudgeConfig)
    env: EnvConfig = NO_ENV
    seed: int = 1
    test: int = at_least(32, 1)  # episodes that the result is reported for
    num_envs: int = at_least(32, 1)
    random_action_prob: float = within(0.4, 0, 1)  # share of the expert's decisions that are random

    def run(self, folder: RunFolder) -> JsonObject:
        """Leave the checkpoint; raises UserError for a model that cannot be asked."""
        model = Path(self.judge.vlm.model)
        vlm = replace(self.judge.vlm, model=str(model.resolve())) if model.is_dir() else self.judge.vlm
        judge = VLMJudge.from_config(replace(self.judge, vlm=vlm))
        judge.save_pretrained(folder.checkpoint("judge"))
        return {"test": {"frames": rates(self._asked(judge))}, "seed": self.seed}

    def _asked(self, judge: VLMJudge) -> Counts:
        """Frames that it calls done, that are, and both."""
        env = self.env.required("asking a judge")
        seeds, random = list(seed_ranges.TEST[: self.test]), np.random.default_rng(self.seed)
        frames = label_frames(env, env.claims(), seeds, self.num_envs, self.random_action_prob, random)
        tracks = frames.tracks()
        found = []
        with bar("ask", len(tracks)) as update:
            for count, track in enumerate(tracks, 1):
                found.append(np.asarray(_watch(judge, track).done)[0])
                update(count, "episodes and instructions")
        return Counts.from_decisions(np.concatenate(found), np.concatenate([track.label for track in tracks]))
