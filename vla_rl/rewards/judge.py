"""A vision-language model as a judge: is what was asked for done?  Zero-shot, by one question about single frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import State
from vla_rl.pretrained import read_config, save_folder
from vla_rl.rewards.reward import Judgement
from vla_rl.rewards.trained import as_bool, reset
from vla_rl.rewards.vlm import VLMConfig, YesNo

BASELINE_PROMPT = (
    'A robot was told: "{task}". The picture shows the scene at this moment. Look only at what is visible. Has the '
    "robot completed the task? Answer with one word, yes or no."
)


class Answers(Protocol):
    """Whoever can be asked about pictures; :class:`YesNo` is the one for models of transformers."""

    def probability(self, images: Mapping[str, Array], question: Sequence[str]) -> np.ndarray:
        """P(yes) float32 [N] of ``question`` [N] about ``images`` {camera: uint8 [N,h,w,3]}."""


@dataclass(frozen=True)
class VLMJudgeConfig:
    """What is asked, how often, and when an answer is a yes."""

    vlm: VLMConfig = field(default_factory=VLMConfig)
    cameras: tuple[str, ...] = ()  # in the order in which they are shown; () for all, by name
    prompt: str = BASELINE_PROMPT  # {task} stands for the instruction
    stride: int = 5  # frames from one question to the next; a row's first frame is always asked about
    threshold: float = 0.5  # of P(yes)


class VLMJudge:
    """Asks a vision-language model (a ``Reward``).

    ``progress`` is P(yes) and ``done`` that it reaches ``config.threshold``.  Between two questions the last answer
    stands.  This is the baseline: a model that was not trained for it, one prompt, single frames, an untuned threshold;
    for a threshold that keeps a promise see :func:`vla_rl.rewards.calibration.choose_threshold`.
    """

    def __init__(self, config: VLMJudgeConfig, model: Answers) -> None:
        """Raises UserError for a prompt without {task}."""
        if "{task}" not in config.prompt:
            raise UserError(
                f"the prompt {config.prompt!r} does not hold {{task}}, so every instruction would be judged alike; put "
                "{task} where the instruction belongs."
            )
        self.config, self._model = config, model

    @classmethod
    def of(cls, config: VLMJudgeConfig) -> VLMJudge:
        """With the model that ``config.vlm`` names; raises what :class:`YesNo` raises."""
        return cls(config, YesNo(config.vlm))

    def initial_state(self, rows: int) -> State:
        """How many frames were seen, and the last answer."""
        return {"seen": np.zeros(rows, np.int64), "answer": np.zeros(rows, np.float32)}

    def reset_state(self, state: State, rows: Array) -> State:
        return reset(state, self.initial_state(len(state["seen"])), rows)

    def judge(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[Judgement, State]:
        shown, valid = self._shown(frames), as_bool(valid)
        before = state["seen"][:, None] + valid.cumsum(1) - valid
        row, time = np.nonzero(valid & (before % self.config.stride == 0))
        asked = np.full(valid.shape, np.nan, np.float32)
        if row.size:
            questions = [self.config.prompt.replace("{task}", str(text[i])) for i in row.tolist()]
            asked[row, time] = self._model.probability({name: i[row, time] for name, i in shown.items()}, questions)
        progress, answer = np.zeros(valid.shape, np.float32), state["answer"]
        for t in range(valid.shape[1]):
            answer = np.where(np.isnan(asked[:, t]), answer, asked[:, t])
            progress[:, t] = answer
        done = (progress >= self.config.threshold) & (before + valid > 0)
        return Judgement(progress, done), {"seen": state["seen"] + valid.sum(1), "answer": answer}

    def _shown(self, frames: Mapping[str, Array]) -> dict[str, Array]:
        names = self.config.cameras or tuple(sorted(frames))
        missing = [name for name in names if name not in frames]
        if missing or not names:
            raise ContractError(
                f"the judge is to see {missing or 'a camera'} but the frames are of {sorted(frames)}, so it has "
                "nothing to judge by; name cameras that are there."
            )
        return {name: frames[name] for name in names}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what was settled into ``config.json``; the model itself stays where ``config.vlm`` says it is."""
        kind = f"{type(self).__module__}:{type(self).__qualname__}"
        save_folder(Path(folder), {"reward": kind, "config": to_json(self.config)}, {})

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> VLMJudge:
        """Load the judge and its model."""
        return cls.of(from_json(read_config(Path(folder), "reward")["config"]))
