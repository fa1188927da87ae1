"""A vision-language model as a judge: is the instruction fulfilled?  Zero-shot, one question about a single frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import State
from vla_rl.pretrained import read_config, save_folder
from vla_rl.rewards.reward import RewardOutput
from vla_rl.rewards.reward_model import reset_rows, to_bool
from vla_rl.rewards.vlm import VLMConfig, YesNo

BASELINE_PROMPT = (
    'A robot was told: "{task}". The picture shows the scene at this moment. Look only at what is visible. Has the '
    "robot completed the task? Answer with one word, yes or no."
)


class YesNoModel(Protocol):
    """Answers questions about images; :class:`YesNo` does so with models of transformers."""

    def probability(self, images: Mapping[str, Array], question: Sequence[str]) -> np.ndarray:
        """P(yes) float32 [N] of ``question`` [N] about ``images`` {camera: uint8 [N,h,w,3]}."""


@dataclass(frozen=True)
class VLMJudgeConfig:
    """The question, how often it is asked, and the threshold."""

    vlm: VLMConfig = field(default_factory=VLMConfig)
    cameras: tuple[str, ...] = ()  # in the order in which the model gets them; () for all, sorted by name
    prompt: str = BASELINE_PROMPT  # {task} is replaced by the instruction
    stride: int = 5  # frames from one question to the next; an episode's first frame is always evaluated
    threshold: float = 0.5  # of P(yes)


class VLMJudge:
    """A vision-language model as a ``Reward``.

    ``progress`` is P(yes); ``done`` is P(yes) >= ``config.threshold``.  Between two questions the last answer is kept.
    This is a baseline: an untrained model, one prompt, single frames, an untuned threshold; for a threshold of given
    precision see :func:`vla_rl.rewards.calibration.choose_threshold`.
    """

    def __init__(self, config: VLMJudgeConfig, model: YesNoModel) -> None:
        """Raises UserError for a prompt without {task}."""
        if "{task}" not in config.prompt:
            raise UserError(
                f"the prompt {config.prompt!r} does not contain {{task}}, so the instruction would be ignored; put "
                "{task} where the instruction belongs."
            )
        self.config, self._model = config, model

    @classmethod
    def from_config(cls, config: VLMJudgeConfig) -> VLMJudge:
        """A judge with the model of ``config.vlm``; raises what :class:`YesNo` raises."""
        return cls(config, YesNo(config.vlm))

    def initial_state(self, num_envs: int) -> State:
        """The number of frames so far, and the last answer."""
        return {"frames": np.zeros(num_envs, np.int64), "answer": np.zeros(num_envs, np.float32)}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return reset_rows(state, self.initial_state(len(state["frames"])), env_ids)

    def evaluate(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[RewardOutput, State]:
        images, valid = self._select_cameras(frames), to_bool(valid)
        before = state["frames"][:, None] + valid.cumsum(1) - valid
        env_id, time = np.nonzero(valid & (before % self.config.stride == 0))
        answers = np.full(valid.shape, np.nan, np.float32)
        if env_id.size:
            questions = [self.config.prompt.replace("{task}", str(text[i])) for i in env_id.tolist()]
            selected = {name: image[env_id, time] for name, image in images.items()}
            answers[env_id, time] = self._model.probability(selected, questions)
        progress, answer = np.zeros(valid.shape, np.float32), state["answer"]
        for t in range(valid.shape[1]):
            answer = np.where(np.isnan(answers[:, t]), answer, answers[:, t])
            progress[:, t] = answer
        done = (progress >= self.config.threshold) & (before + valid > 0)
        return RewardOutput(progress, done), {"frames": state["frames"] + valid.sum(1), "answer": answer}

    def _select_cameras(self, frames: Mapping[str, Array]) -> dict[str, Array]:
        names = self.config.cameras or tuple(sorted(frames))
        missing = [name for name in names if name not in frames]
        if missing or not names:
            raise ContractError(
                f"the judge needs {missing or 'a camera'} but the frames are of {sorted(frames)}, so it cannot "
                "evaluate them; name cameras of the environment."
            )
        return {name: frames[name] for name in names}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the settings to ``config.json``; the model itself stays where ``config.vlm`` says."""
        kind = name_of(type(self))
        save_folder(Path(folder), {"reward": kind, "config": to_json(self.config)}, {})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> VLMJudge:
        """Load the judge and its model."""
        return cls.from_config(from_json(read_config(Path(folder), "reward")["config"]))
