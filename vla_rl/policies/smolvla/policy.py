"""SmolVLA (arXiv 2506.01844) as a policy: a LeRobot folder as it was downloaded, or random weights for a task."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.checkpoint import PublicCheckpoint
from vla_rl.policies.vla.files import read_json
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.public import flow_from_public
from vla_rl.policies.vla.tokenizer import TokenizerPrompts

# Settings under which LeRobot changes states or actions by the geometry of one robot.
_OF_ONE_ROBOT = ("adapt_to_pi_aloha", "use_delta_joint_actions_aloha")


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
    for name in _OF_ONE_ROBOT:
        if config.get(name, False):
            raise UserError(
                f"{str(checkpoint.folder / 'config.json')!r} sets {name}, which converts the joints of an Aloha robot "
                "and is not supported, so its actions would be wrong; use a checkpoint without it."
            )
    if config.get("n_obs_steps", 1) != 1:
        raise UserError(
            f"{str(checkpoint.folder / 'config.json')!r} sets n_obs_steps to {config['n_obs_steps']}, but a SmolVLA "
            "sees one observation, so it would decide on others than it was trained with; use a checkpoint with 1."
        )
    return SmolVLAShape.from_lerobot(config, read_json(path) if path.is_file() else None)


def _prompts(checkpoint: PublicCheckpoint) -> TokenizerPrompts:
    longest = checkpoint.config.get("tokenizer_max_length", 48)
    return TokenizerPrompts(str(checkpoint.folder), checkpoint.tokenizer, longest=longest)
