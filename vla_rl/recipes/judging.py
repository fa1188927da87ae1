"""The recipe that makes a reward of a vision-language model and says how often it is right."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vla_rl.contract.limits import check_limits
from vla_rl.evaluation import seed_ranges
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.label_frames import label_frames
from vla_rl.recipes.progress import bar
from vla_rl.recipes.train_rewards import rates
from vla_rl.rewards.calibration import Counts
from vla_rl.rewards.frames import LabelledFrames
from vla_rl.rewards.judge import VLMJudge, VLMJudgeConfig
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class MakeJudge:
    """Write a judge by the model ``judge.vlm.model``, a folder or a name on the Hub, as the checkpoint "judge".

    Nothing is trained.  The judge is asked about the frames of ``test`` episodes of the expert, on test seeds.
    """

    judge: VLMJudgeConfig = field(default_factory=VLMJudgeConfig)
    env: EnvConfig = NO_ENV
    seed: int = 1
    test: int = 32  # episodes that the result is reported for
    num_envs: int = 32
    random_action_prob: float = 0.4  # share of the expert's decisions that are random

    def __post_init__(self) -> None:
        """Raises UserError for numbers with which nothing could be measured."""
        check_limits(self, test=(1, math.inf), num_envs=(1, math.inf), random_action_prob=(0, 1))

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
        with bar("ask", len(tracks)) as update:
            found = []
            for count, track in enumerate(tracks):
                found.append(_done(judge, track))
                update(count + 1, "episodes and instructions")
        return Counts.from_decisions(np.concatenate(found), np.concatenate([track.label for track in tracks]))


def _done(judge: VLMJudge, track: LabelledFrames) -> np.ndarray:
    """What ``judge`` says about the frames of ``track``, bool [T]."""
    clip = {name: image[None] for name, image in track.images.items()}
    shown = np.ones((1, len(track)), bool)
    output, _ = judge.evaluate(clip, track.text[:1].tolist(), shown, judge.initial_state(1))
    return np.asarray(output.done)[0]
