"""pi0.5 (arXiv 2504.16054) as a policy: a folder of LeRobot as it was downloaded, or random weights."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.policies.pi0.policy import shape_of as pi0_shape
from vla_rl.policies.pi05.network import Pi05Shape
from vla_rl.policies.pi05.prompts import StatePrompts, StateViews
from vla_rl.policies.vla.checkpoint import PublicCheckpoint
from vla_rl.policies.vla.features import Views
from vla_rl.policies.vla.flow_vla import FlowVLA, flow_from_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import Vocabulary


class Pi05(FlowVLA):
    """pi0.5: PaliGemma and a flow expert whose norms follow the time; chunks of 50 x 32 numbers, padding included.

    The robot's state is written into the prompt in 256 steps from -1 to 1, so the prefix depends on it, and what lies
    beyond is not told apart: ``state_scale`` maps its range, such as quantiles, to those.
    """

    shape_class = Pi05Shape
    prompts: StatePrompts

    @classmethod
    def from_public(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions | None = None) -> Self:
        """A checkpoint of LeRobot (type "pi05") for an environment.

        A missing camera has no tokens.  Raises UserError, naming the key and the cure, when files or tensors are
        missing, when cameras, state or action are not the environment's, and where a prompt may be too long.
        """

        def prompts(public: PublicCheckpoint) -> StatePrompts:
            made = StatePrompts.of_tokenizer(str(public.folder), public.tokenizer, public.longest)
            tokens, _ = made.encode(spec.tasks)
            if (most := tokens.shape[1] + made.longest(spec.state.shape[0])) > public.longest:
                raise UserError(
                    f"an instruction of {spec.name!r} and a state of {spec.state.shape[0]} numbers may take {most} "
                    f"tokens, but {str(folder)!r} was trained with at most {public.longest}, so the end would be lost; "
                    "use shorter instructions."
                )
            return made

        return flow_from_public(cls, folder, spec, options or VLAOptions(), shape_of, prompts)

    @classmethod
    def word_prompts(cls, vocabulary: Vocabulary) -> tuple[StatePrompts, int]:
        prompts = StatePrompts.of_words(vocabulary)
        return prompts, prompts.tail[-1] + 1

    @property
    def prompt_length(self) -> int:
        return super().prompt_length + self.prompts.longest(self.spec.state.shape[0])

    def _views(self) -> Views:
        views = super()._views()
        if self._known is None or self._known.tokens is not views.tokens:
            self._known = StateViews(views, self.prompts)
        self._known.mask, self._known.learnt = views.mask, views.learnt
        return self._known

    _known: StateViews | None = None


def shape_of(public: PublicCheckpoint) -> Pi05Shape:
    """The sizes of the network in a public folder."""
    found: Any = pi0_shape(public.folder, public.config)
    return Pi05Shape(**{item.name: getattr(found, item.name) for item in fields(found)})
