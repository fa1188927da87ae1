"""Policies that are conditioned on whether a decision was good, and act as if the next one were (RECAP).

A small flow policy is conditioned by a learnt vector, a vision-language-action model by its prompt, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.contract.config import Checked, at_least, from_json, to_json
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import ActionOut, Features, Mode, State, require
from vla_rl.policies.flow import Field, FlowSampler, VelocityField, imitation_losses
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.history import ObservationPolicy
from vla_rl.policies.noise import Generators
from vla_rl.policies.normalization import origin_of
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.policies.vla.features import KeepPictures
from vla_rl.policies.vla.saving import SavedVLA
from vla_rl.policies.vla.tokenizer import WordPrompts
from vla_rl.pretrained import load_weights, save_folder

INDICATOR = "indicator"  # among the features that are imitated, int [B]
NEGATIVE, POSITIVE, UNKNOWN = range(3)


@dataclass(frozen=True)
class AdvantageConfig(Checked):
    """How strongly the policy prefers good decisions when it acts.

    guidance  beta: 0 is the policy of all data, 1 the one of good decisions; above 1 it sharpens further (SOP acts with
              1 while it collects and with 1.5 to 2.5 in evaluation)
    """

    horizon: int
    sampler: FlowSampler
    guidance: float = at_least(1.0, 0)


def advantage_conditioned(base: Any, guidance: float, spread: float = 0.0) -> Any:
    """``base`` conditioned in the way of its kind; one that is conditioned already, with this ``guidance``.

    ``spread``: the standard deviation that the vectors for "bad" and "not said" begin with, if it gets such; prompts
    differ from the beginning.

    Raises UserError for a policy that can be conditioned neither by a vector nor by a prompt.
    """
    policy: Any = base
    if not isinstance(base, AdvantageConditioned | AdvantagePrompted):
        policy = AdvantagePrompted(base) if isinstance(base, SavedVLA) else AdvantageConditioned(base, spread=spread)
    policy.guide(guidance)
    return policy


def guided(beta: float, field_of: Callable[[int], VelocityField]) -> VelocityField:
    """``v_unknown + beta (v_good - v_unknown)``, of the fields that ``field_of`` makes of an indicator."""
    if beta in (0.0, 1.0):
        return field_of(POSITIVE if beta else UNKNOWN)
    good, unknown = field_of(POSITIVE), field_of(UNKNOWN)

    def field(x: Tensor, t: Tensor) -> Field:
        free, wanted = unknown(x, t), good(x, t)
        return Field(free.velocity + beta * (wanted.velocity - free.velocity), wanted.log_std)

    return field


class AdvantageConditioned(FlowPolicy):
    """``base`` with a learnt vector for "good", "bad" or "not said" added to what conditions it.

    It acts by classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598), as RECAP does (Physical Intelligence
    2025, pi*0.6, arXiv 2511.14759):

        v = v_unknown + beta (v_good - v_unknown)

    which aims at ``p(a|o) p(good|a,o)^beta``: exactly for beta 0 and 1, up to the difference between the noise levels
    otherwise.  beta = 1 and 0 need one pass of the network, others two.  The vector for "good" is 0 at first, so with
    beta = 1 the policy begins as its base, which is trained with the vectors.  If the others are 0 as well, they grow
    slowly, and until they have grown all data pull at one field: from few good decisions among many, begin with a
    ``spread``.

    Deviation: the paper writes the indicator into the prompt, as ``AdvantagePrompted`` does; a small policy whose words
    are those of its tasks has a vector instead.
    """

    config: AdvantageConfig

    def __init__(self, base: Any, config: AdvantageConfig | None = None, spread: float = 0.0) -> None:
        """``config`` None: the base's chunks and sampler, guidance 1; ``spread``: see ``advantage_conditioned``.

        ``base``: a flow policy such as ``TinyVLA`` whose field depends on the observation through one vector,
        ``condition(features)`` [B,condition_size], as ``conditioned_field(condition)`` says.

        Raises UserError for a policy without one vector that conditions its field.
        """
        cure = "so it cannot be conditioned on how good a decision was; use a TinyVLA, or add them."
        require(base, "RECAP", ("condition", "conditioned_field", "condition_size"), cure)
        config = config or AdvantageConfig(base.config.horizon, base.config.sampler)
        super().__init__(base.spec, base.action_scale, config)
        self.base, self.history = base, getattr(base, "history", None)
        self.indicators = nn.Embedding(3, base.condition_size)
        nn.init.normal_(self.indicators.weight, std=spread)
        nn.init.zeros_(self.indicators.weight[POSITIVE])

    def guide(self, guidance: float) -> None:
        """Act with another ``guidance``."""
        self.config = replace(self.config, guidance=guidance)

    @property
    def feature_sizes(self) -> dict[str, int]:
        return self.base.feature_sizes

    def encode(self, obs: Observation) -> Features:
        return self.base.encode(obs)

    # -- acting -----------------------------------------------------------------------------------------------------

    def field(self, features: Features) -> VelocityField:
        condition = self.base.condition(features)
        return guided(self.config.guidance, lambda indicator: self._indicated(condition, indicator))

    def _indicated(self, condition: Tensor, indicator: int | Tensor) -> VelocityField:
        return self.base.conditioned_field(condition + self.indicators.weight[indicator])

    # -- learning ---------------------------------------------------------------------------------------------------

    def indicated_field(self, features: Features) -> VelocityField:
        """The field given ``features["indicator"]`` int [B]; demonstrations, which have none, are good decisions."""
        return self._indicated(self.base.condition(features), features.get(INDICATOR, POSITIVE))

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Flow matching of every action of ``chunks`` given their indicators, [B,H]."""
        return imitation_losses(self.indicated_field, features, chunks, draws, generator)

    def trainable(self) -> dict[str, nn.Parameter]:
        base = {f"base.{name}": parameter for name, parameter in self.base.trainable().items()}
        return {**base, **dict(self.indicators.named_parameters("indicators"))}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, the vectors, and the base with its present weights in ``base``."""
        kind = name_of(type(self))
        config = {"policy": kind, "config": to_json(self.config), "spec": self.spec.to_json()}
        save_folder(Path(folder), config, {"weight": self.indicators.weight}, {"base": self.base})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> AdvantageConditioned:
        """Load a checkpoint; with ``spec``, the base checks that it was trained for such an environment."""
        saved: dict[str, Any] = read_config(Path(folder))
        policy = cls(load_policy(Path(folder) / "base", spec), from_json(saved["config"]))
        load_weights(policy.indicators, Path(folder))
        return policy.eval()


@dataclass(frozen=True)
class PromptedConfig(Checked):
    """As of ``AdvantageConfig``; what is no flow acts with 0 or 1."""

    guidance: float = at_least(1.0, 0)


_SAID = {UNKNOWN: "", POSITIVE: ". Advantage: positive", NEGATIVE: ". Advantage: negative"}


class AdvantagePrompted(ObservationPolicy):
    """A vision-language-action model of any family whose prompts say "Advantage: positive" or "negative", or nothing.

    It acts on good prompts; a flow is guided as ``AdvantageConditioned`` is, with two passes of the whole model.  The
    prompt is part of what is encoded, so pictures are kept of an observation and no prefix.  ``base``: its prompts are
    those of its ``M`` tasks, then as many good and bad ones.

    Deviations: the words follow the instruction, for no subtask is predicted here; a model from nothing, which has a
    token for every word of its tasks and no other, reads its padding once for good and twice for bad.
    """

    def __init__(self, base: Any, config: PromptedConfig | None = None) -> None:
        super().__init__()
        self.base, self.config, self.version = base, config or PromptedConfig(), 0
        self.spec, self.action_scale = base.spec, base.action_scale
        tokens, mask = _said_in_prompts(base)
        device = base.action_low.device
        base.register_buffer("tokens", tokens.to(device), persistent=False)
        base.register_buffer("token_mask", mask.to(device), persistent=False)
        base.kept = KeepPictures()

    def guide(self, guidance: float) -> None:
        """Act with another ``guidance``.  Raises UserError for one that only a flow can have."""
        if guidance not in (0.0, 1.0) and not isinstance(self.base, FlowPolicy):
            raise UserError(
                f"{type(self.base).__name__} has no velocity that guidance {guidance:g} could extrapolate; act as if "
                "the next decision were good: guidance 1."
            )
        self.config = PromptedConfig(guidance)

    @property
    def horizon(self) -> int:
        return int(self.base.horizon)

    @property
    def chunk_length(self) -> int:
        """``C``: actions of a chunk that imitation learns."""
        return int(self.base.chunk_length)

    @property
    def feature_sizes(self) -> dict[str, int]:
        return dict(self.base.feature_sizes)

    def encode(self, obs: Observation) -> Features:
        task = torch.as_tensor(obs.task).long()
        found: Features = self.base.encode(replace(obs, task=self._row(task, self._acts_on)))
        return found

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """A guided flow follows its ODE in any mode."""
        if self.config.guidance in (0.0, 1.0):
            out, state = self.base.act(features, state, mode, generator)
            return replace(out, policy_version=self.version), state
        noise = self.base.initial_noise(len(features["state"]), generator)
        field = guided(
            self.config.guidance, lambda indicator: self.base.acting_field(self._prompted(features, indicator))
        )
        found = self.base.ended(field, {"noise": noise, **origin_of(features)})
        return ActionOut(found["action"], found["sample"], noise.new_zeros(len(noise)), {}, self.version), state

    @property
    def _acts_on(self) -> int:
        return POSITIVE if self.config.guidance else UNKNOWN

    def _prompted(self, features: Features, indicator: int | Tensor) -> Features:
        """``features`` under the prompts of ``indicator``: the very same where they are those that it acts on."""
        if isinstance(indicator, int) and indicator == self._acts_on:
            return features
        return {**features, "task": self._row(features["task"], indicator)}

    def _row(self, task: Tensor, indicator: int | Tensor) -> Tensor:
        count = len(self.spec.tasks)
        return task % count + count * (UNKNOWN - indicator)  # good ones behind those that say nothing, then bad ones

    def imitation_features(self, obs: Observation) -> Features:
        """See the base: pictures, task and state."""
        found: Features = self.base.imitation_features(obs)
        return found

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """The base's, under the prompts of ``features["indicator"]`` int [B]; demonstrations are good decisions."""
        rest = {name: item for name, item in features.items() if name != INDICATOR}
        prompted = {**rest, "task": self._row(features["task"], features.get(INDICATOR, POSITIVE))}
        losses: Tensor = self.base.imitation_losses(prompted, chunks, draws, generator)
        return losses

    def trainable(self) -> dict[str, nn.Parameter]:
        return {f"base.{name}": parameter for name, parameter in self.base.trainable().items()}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, and the base with its present weights in ``base``."""
        config = {"policy": name_of(type(self)), "config": to_json(self.config), "spec": self.spec.to_json()}
        save_folder(Path(folder), config, {}, {"base": self.base})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> AdvantagePrompted:
        """Load a checkpoint; with ``spec``, the base checks that it was trained for such an environment."""
        saved: dict[str, Any] = read_config(Path(folder))
        return cls(load_policy(Path(folder) / "base", spec), from_json(saved["config"])).eval()


def _said_in_prompts(base: Any) -> tuple[Tensor, Tensor]:
    """Tokens [3M,L] and their mask: of the ``M`` tasks with nothing said, with good and with bad."""
    tasks, prompts = base.spec.tasks, base.prompts
    if not isinstance(getattr(prompts, "texts", prompts), WordPrompts):
        texts = [f"{text}{said}" for said in _SAID.values() for text in tasks]
        base.prompts = prompts.learn(texts)  # so that a saved policy acts without a tokenizer
        found: tuple[Tensor, Tensor] = base.prompts.encode(texts)
        return found
    tokens, mask = (nn.functional.pad(item, (0, 2)).repeat(3, 1) for item in prompts.encode(tasks))
    longer = torch.arange(3).repeat_interleave(len(tasks))[:, None]
    return tokens, torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True) + longer
