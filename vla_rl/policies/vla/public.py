"""Opening a public folder for an environment: what every model family does alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.policies.normalization import Affine
from vla_rl.policies.vla.checkpoint import PublicCheckpoint, match_cameras, read_public
from vla_rl.policies.vla.dataset_statistics import read_statistics
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.network import NetworkShape
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.saving import Base, filled
from vla_rl.policies.vla.tokenizer import TokenizerPrompts

F = TypeVar("F", bound=FlowVLA)


@dataclass(frozen=True)
class OpenedFolder:
    """A public folder for one environment; its weights are not read yet.

    state    None where the statistics have none
    cameras  the environment's for each of the checkpoint's, None where one is missing
    options  with the horizon that is executed
    """

    checkpoint: PublicCheckpoint
    state: Affine | None
    action: Affine
    cameras: tuple[str | None, ...]
    options: VLAOptions


def open_public(folder: Path, spec: EnvSpec, options: VLAOptions) -> OpenedFolder:
    """Read all of ``folder`` but weights and tokenizer; raises UserError where it does not fit ``spec``."""
    checkpoint = read_public(folder)
    cameras = match_cameras(checkpoint, spec, options.cameras)
    place = Path(options.statistics) if options.statistics else folder
    statistics = read_statistics(place, checkpoint.modes, options.statistics_key)
    cut = statistics.cut(spec.state.shape[-1], spec.action_dim)
    horizon = options.horizon or min(checkpoint.executed, spec.max_chunk)
    sampler = options.sampler
    if checkpoint.steps and sampler == VLAOptions().sampler:
        sampler = replace(sampler, steps=checkpoint.steps)
    return OpenedFolder(checkpoint, cut.state, cut.action, cameras, replace(options, horizon=horizon, sampler=sampler))


def flow_from_public(
    kind: Callable[..., F],
    folder: str | Path,
    spec: EnvSpec,
    options: VLAOptions,
    shape: Callable[[PublicCheckpoint], NetworkShape],
    prompts: Callable[[PublicCheckpoint], TokenizerPrompts],
) -> F:
    """The policy of class ``kind`` in a public folder, for ``spec``.

    ``shape`` and ``prompts`` say what a family's folder describes.  Raises UserError for what is missing, damaged or
    does not fit the environment; the tokenizer is read before the weights, which take longest.
    """
    opened = open_public(Path(folder), spec, options)
    sizes = shape(opened.checkpoint)
    if opened.state is None:
        raise UserError(
            f"the statistics for {str(folder)!r} have none of a state, which the model reads, so it would be misread; "
            "name others with --vla.statistics FOLDER."
        )
    known = prompts(opened.checkpoint).learn(spec.tasks)
    network = filled(sizes, Path(folder))
    base = Base.of(Path(folder))
    made = kind(spec, network, known, opened.state, opened.action, opened.cameras, opened.options, base)
    made.eval()
    return made
