"""pi0 (arXiv 2410.24164) as a policy: a folder of LeRobot or transformers as it was downloaded, or random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.pi0.network import Pi0Shape
from vla_rl.policies.pi0.public import shape_of
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.public import flow_from_public
from vla_rl.policies.vla.tokenizer import TokenizerPrompts


class Pi0(FlowVLA):
    """pi0: PaliGemma and a flow expert of 315M parameters; chunks of 50 x 32 numbers, padding included.

    The robot's state is a token behind the prefix, so the prefix depends on pictures and prompt alone.  pi0.5, whose
    state is written into the prompt as words, is not this class: transformers 5.23 has no model for it.
    """

    shape_class = Pi0Shape

    @classmethod
    def from_public(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions | None = None) -> Self:
        """A checkpoint of LeRobot (0.4 and later, type "pi0") or of transformers (model_type "pi0") for an environment.

        Pictures are fitted as that library does, the prompt is ``<bos>``, the instruction and a newline.  A missing
        camera has no tokens.  Raises UserError, naming the key and the cure, when files or tensors are missing and when
        cameras, state or action are not the environment's.
        """
        return flow_from_public(
            cls,
            folder,
            spec,
            options or VLAOptions(),
            lambda public: shape_of(public.folder, public.config),
            lambda public: TokenizerPrompts(
                str(public.folder),
                public.tokenizer,
                template="{}\n" if public.newline else "{}",
                start="<bos>",
                longest=public.longest,
            ),
        )
