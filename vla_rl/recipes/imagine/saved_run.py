"""What a run of ``Imagine`` left to dream with: its world model, limits of doubt, and episodes that it never learnt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.config import from_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.experience.trajectories import Trajectories
from vla_rl.experience.windows import context_at
from vla_rl.recipes.imagine.coevolution import Trained
from vla_rl.recipes.imagine.recipe import Imagine


@dataclass(frozen=True)
class DreamRun:
    """One run: its world model with limits and ``DreamConfig``, and the episodes that judge it."""

    folder: Path
    trained: Trained
    held_out: Trajectories

    @classmethod
    def load(cls, run: str | Path) -> DreamRun:
        """Read the run folder ``run``, finished or not, or that of the story in ``run``.

        Raises UserError when there is no run, one without a world, or one that kept no episodes.
        """
        folder = located(run)
        episodes = folder / "episodes" / "held_out.npz"
        for path, what in ((folder / "checkpoints" / "world", "world model"), (episodes, "held-out episodes")):
            if (folder / "config.json").exists() and not path.exists():
                raise UserError(
                    f"the run in {str(folder)!r} has no {what} ({path.relative_to(folder)} is missing), so there is "
                    "nothing to dream of; name a run of vla-rl imagine whose world model is learnt."
                )
        return cls(folder, opened(folder)[1], Trajectories.load(episodes))


def located(run: str | Path) -> Path:
    """The run with a world model that ``run`` is, or that the story in ``run`` holds."""
    inner = Path(run) / "dreams"
    return inner if (inner / "config.json").exists() else Path(run)


def opened(run: Path) -> tuple[Imagine, Trained]:
    """The recipe and the world model of a run, finished or not; raises UserError when there is none."""
    try:
        recipe = from_json(json.loads((run / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(run)!r} holds no run that could be read ({error}), so there is nothing to dream with; name a folder "
            "that vla-rl imagine made."
        ) from error
    if not isinstance(recipe, Imagine):
        raise UserError(
            f"{str(run)!r} is a run of {type(recipe).__name__}, which has no world model, so there is nothing to dream "
            "with; name a folder that vla-rl imagine made."
        )
    return recipe, Trained.load(run / "checkpoints" / "world", recipe.plan.dream)


def beginnings(model: Any, trajectories: Trajectories) -> Any:
    """The first moments of ``trajectories`` in their order: seed ``i`` dreams from episode ``i`` (``InOrder``)."""
    begins = np.array([begin for begin, _ in trajectories.spans()])
    seen = context_at(trajectories, begins, model.config.frames, model.config.memory)
    return load("world_models.initial_states:InOrder")(load("world_models.initial_states:Start")(**seen))
