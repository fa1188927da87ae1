"""SmolVLA (arXiv 2506.01844) as a policy: a LeRobot folder as it was downloaded, or random weights for a task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.checkpoint import PublicCheckpoint
from vla_rl.policies.vla.flow_vla import FlowVLA, flow_from_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import FILE, TokenizerPrompts, open_tokenizer
from vla_rl.policies.vla.weights import read_json


class SmolVLA(FlowVLA):
    """A SmolVLA that RL improves.  Its prompt is the instruction and a newline, as in LeRobot."""

    shape_class = SmolVLAShape

    @classmethod
    def from_public(cls, folder: str | Path, spec: EnvSpec, options: VLAOptions | None = None) -> Self:
        """The policy of a LeRobot folder for an environment.

        A missing camera counts as LeRobot's ``empty_cameras``: it is masked.  Raises UserError, naming the key and the
        cure, when files or tensors are missing, when cameras, state or action are not the environment's, and for
        settings that are not supported.
        """
        return flow_from_public(cls, folder, spec, options or VLAOptions(), _shape, _prompts)


def _shape(checkpoint: PublicCheckpoint) -> SmolVLAShape:
    """The network that ``config.json`` describes, with the language model's config from ``vlm`` if it is there."""
    config, path = checkpoint.config, checkpoint.folder / "vlm" / "config.json"
    shape = SmolVLAShape.from_lerobot(config, read_json(path) if path.is_file() else None)
    if not shape.picture_start or not (checkpoint.folder / FILE).is_file():
        return shape
    tokenizer = open_tokenizer(str(checkpoint.folder), "")  # whose numbers of these tokens may be others
    fence, view = (tokenizer.token_to_id(token) for token in ("<fake_token_around_image>", "<global-img>"))
    if fence is None or view is None:
        raise UserError(
            f"config.json of {str(checkpoint.folder)!r} sets add_image_special_tokens, but its {FILE} has no such "
            f"tokens, so its pictures would be misread; copy the {FILE} of {checkpoint.tokenizer} into the folder."
        )
    return replace(shape, picture_start=(fence, view), picture_end=(fence,))


def _prompts(checkpoint: PublicCheckpoint) -> TokenizerPrompts:
    template = "{}\n" if checkpoint.newline else "{}"
    return TokenizerPrompts(str(checkpoint.folder), checkpoint.tokenizer, template, longest=checkpoint.longest)
