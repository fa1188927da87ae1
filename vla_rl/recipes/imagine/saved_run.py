"""What a run of ``Imagine`` left: its calibrated world model, and episodes that the model was not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.recipes.config_files import read_config
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel
from vla_rl.recipes.imagine.recipe import Imagine


@dataclass(frozen=True)
class SavedRun:
    """One run in ``folder``, finished or not."""

    folder: Path
    calibrated: CalibratedModel
    held_out: Trajectories

    @classmethod
    def load(cls, run: str | Path) -> SavedRun:
        """Read the run folder ``run``, or that of the comparison in ``run``.

        Raises UserError when there is no run, one without a world model, or one without held-out episodes.
        """
        folder = find_run(run)
        episodes = folder / "episodes" / "held_out.npz"
        for path, what in ((folder / "checkpoints" / "world", "world model"), (episodes, "held-out episodes")):
            if (folder / "config.json").exists() and not path.exists():
                raise UserError(
                    f"the run in {str(folder)!r} has no {what} ({path.relative_to(folder)} is missing), so there is "
                    "nothing to imagine; name a run of vla-rl imagine whose world model is trained."
                )
        check_folder(folder)
        return cls(folder, load_run(folder)[1], Trajectories.load(episodes))

    def not_learnt_from(self) -> Trajectories:
        """All episodes that the model was not trained on: held-out ones, then those of calibration."""
        calibration = Trajectories.load(self.folder / "episodes" / "calibration.npz")
        return Trajectories.joined([self.held_out, calibration])


def find_run(run: str | Path) -> Path:
    """The run with a world model: ``run`` itself, or the one in the comparison ``run``."""
    inner = Path(run) / "imagination"
    return inner if (inner / "config.json").exists() else Path(run)


def load_run(run: Path) -> tuple[Imagine, CalibratedModel]:
    """The recipe and the world model of a run, finished or not; raises UserError when there is none."""
    recipe = read_config(run)
    if not isinstance(recipe, Imagine):
        raise UserError(
            f"{str(run)!r} is a run of {type(recipe).__name__}, which has no world model, so there is none to use; "
            "name a folder that vla-rl imagine made."
        )
    return recipe, CalibratedModel.load(run / "checkpoints" / "world", recipe.plan.imagination)
