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
from vla_rl.experience.traces import Traces, seen_at
from vla_rl.training.world_model import load_world


@dataclass(frozen=True)
class Dreamt:
    """One run: ``dream`` is its ``DreamConfig``, ``limits`` its ``Limits``, ``held_out`` what judges the model."""

    folder: Path
    dream: Any
    model: Any
    limits: Any
    held_out: Traces

    @classmethod
    def load(cls, run: str | Path) -> Dreamt:
        """Read the run folder ``run``.

        Raises UserError when there is no run, one without a world, or one that kept no episodes.
        """
        folder = Path(run)
        dream = _recipe(folder).dream
        world, episodes = folder / "checkpoints" / "world", folder / "episodes" / "held_out.npz"
        for path, what in ((world, "world model"), (episodes, "held-out episodes")):
            if not path.exists():
                raise UserError(
                    f"the run in {str(folder)!r} has no {what} ({path.relative_to(folder)} is missing), so there is "
                    "nothing to dream of; name a run of vla-rl imagine that got as far as reinforcement learning."
                )
        model, saved = load_world(world)
        limits = load("world_models.uncertainty:Limits")(tuple(saved["limits"]))
        return cls(folder, dream, model, limits, Traces.load(episodes))


def beginnings(model: Any, traces: Traces) -> Any:
    """The first moments of ``traces`` in their order: seed ``i`` dreams from episode ``i`` (``InOrder``)."""
    begins = np.array([begin for begin, _ in traces.spans()])
    seen = seen_at(traces, begins, model.config.frames, model.config.memory)
    return load("world_models.starts:InOrder")(load("world_models.starts:Start")(**seen))


def run_of(arguments: list[str], command: str) -> str:
    """The run folder that ``command`` was given; raises UserError without one."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError(
            f"imagine {command} needs a run folder, so it knows whose dream to show; write vla-rl imagine {command} "
            "RUN, for example runs/imagine."
        )
    return arguments[0]


def _recipe(folder: Path) -> Any:
    path = folder / "config.json"
    try:
        recipe = from_json(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{str(folder)!r} has no config.json, so there is no run to dream of; name a run folder of vla-rl imagine."
        ) from error
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}), so the run's dream is unknown; name a run of this version."
        ) from error
    if not hasattr(recipe, "dream"):
        raise UserError(
            f"the run in {str(folder)!r} is one of {type(recipe).__name__}, which learns no world model, so there is "
            "nothing to dream of; name a run of vla-rl imagine."
        )
    return recipe
