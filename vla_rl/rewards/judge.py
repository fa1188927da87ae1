"""A vision-language model as a judge: is the instruction fulfilled?  Zero-shot, one question about a single frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import installed, name_of
from vla_rl.contract.policy import State
from vla_rl.pretrained import read_config, save_folder
from vla_rl.rewards.reward_model import RewardOutput, reset_rows, to_bool

_YES, _NO = ("yes", "Yes", "YES"), ("no", "No", "NO")


@dataclass(frozen=True)
class VLMConfig:
    """Which model, and where it runs."""

    model: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"  # a folder, or a name on the Hugging Face Hub
    revision: str = "main"  # branch, tag or commit on the Hub; a commit makes results repeatable
    batch: int = 8  # questions per forward pass
    device: str = "cpu"
    dtype: str = "auto"  # that of the weights; or "float32", "bfloat16"


class YesNo:
    """The probability of "yes" against "no" as the model's next token.  Nothing is sampled or generated.

    ``P(yes) = sum p(y) / (sum p(y) + sum p(n))`` over the tokens ``y`` and ``n`` that spell yes and no, with or without
    capitals and a leading space, if a single token does.
    """

    def __init__(self, config: VLMConfig) -> None:
        """Raises UserError when transformers is not installed, or the model cannot be loaded or has no chat template.

        Weights are read from safetensors only, and code that comes with a model is never run.
        """
        self.config = config
        package = installed("transformers", "no vision-language model can be used", "vla")
        origin: dict[str, Any] = {"revision": config.revision, "trust_remote_code": False}
        try:
            self._processor = package.AutoProcessor.from_pretrained(config.model, **origin)
            self._model = package.AutoModelForImageTextToText.from_pretrained(
                config.model, use_safetensors=True, dtype=config.dtype, **origin
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"the model {config.model!r} cannot be loaded ({reason[:300]}), so it cannot evaluate anything; give "
                "an image-text model that this version of transformers knows, as safetensors, or download it first."
            ) from error
        self._model = self._model.eval().requires_grad_(False).to(config.device)
        if not getattr(self._processor, "chat_template", None):
            raise UserError(
                f"the model {config.model!r} has no chat template, so it takes no questions; choose one that was "
                "tuned to follow instructions."
            )
        self._yes, self._no = self._spellings(_YES), self._spellings(_NO)

    @torch.no_grad()
    def probability(self, images: Mapping[str, Array], question: Sequence[str]) -> np.ndarray:
        """P(yes) float32 [N] of ``question`` [N] about ``images`` {camera: uint8 [N,h,w,3]}, in their order.

        A batch holds equal questions only: their prompts have the same length, so that nothing is padded and no answer
        depends on the rest of the batch.
        """
        questions, found = np.asarray(question, dtype=str), np.zeros(len(question), np.float32)
        for text in np.unique(questions):
            index = np.flatnonzero(questions == text)
            for part in np.split(index, range(self.config.batch, len(index), self.config.batch)):
                pictures = [[np.asarray(torch.as_tensor(i[k]).cpu()) for i in images.values()] for k in part]
                found[part] = self._ask(pictures, str(text)).float().cpu().numpy()
        return found

    def _ask(self, pictures: Sequence[Sequence[np.ndarray]], text: str) -> Tensor:
        """P(yes) [n] of one question about each of ``pictures``."""
        content = [*({"type": "image"} for _ in pictures[0]), {"type": "text", "text": text}]
        prompt = self._processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self._processor(text=[prompt] * len(pictures), images=list(map(list, pictures)), return_tensors="pt")
        inputs = inputs.to(self._model.device)
        for name, item in inputs.items():  # images in the precision of the weights
            inputs[name] = item.to(self._model.dtype) if item.is_floating_point() else item
        logprob = self._model(**inputs).logits[:, -1].float().log_softmax(-1)
        yes, no = (logprob[:, ids].logsumexp(-1) for ids in (self._yes, self._no))
        return (yes - no).sigmoid()

    def _spellings(self, words: Sequence[str]) -> list[int]:
        tokenizer, found = self._processor.tokenizer, set[int]()
        for text in (*words, *(f" {word}" for word in words)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            found |= set(ids) if len(ids) == 1 else set()
        found -= {tokenizer.unk_token_id}
        if not found:
            raise UserError(
                f"the model {self.config.model!r} has no single token for {words[0]!r}, so its answer cannot be read; "
                "choose another model."
            )
        return sorted(found)


BASELINE_PROMPT = (
    'A robot was told: "{task}". The picture shows the scene at this moment. Look only at what is visible. Has the '
    "robot completed the task? Answer with one word, yes or no."
)


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
    precision see :func:`vla_rl.rewards.reward_model.choose_threshold`.
    """

    def __init__(self, config: VLMJudgeConfig, model: Any) -> None:
        """``model`` answers as :class:`YesNo` does.  Raises UserError for a prompt without {task}."""
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
        return cls.from_config(from_json(read_config(Path(folder), "reward")["config"]))
