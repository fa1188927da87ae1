"""Where metrics go besides ``metrics.jsonl``: TensorBoard and Weights & Biases, by name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vla_rl.contract.errors import UserError, did_you_mean


class Tracker(Protocol):
    """Receives the metrics of one run, for display; ``metrics.jsonl`` is the record."""

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record ``metrics`` of ``stage`` ("imitation", "rl") at ``step``; every stage counts its own steps."""

    def close(self) -> None:
        """Write out what is not written yet; safe to call twice."""


class TensorBoardTracker:
    """Scalars ``stage/name`` in ``RUN/tensorboard``; look at them with ``tensorboard --logdir runs``.

    They are on the disk ten seconds later at most.  A resumed run writes another file beside the first; steps that it
    repeats are there twice.
    """

    package = "tensorboard"

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), flush_secs=10)

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of the project "vla-rl" in ``RUN/wandb``, with the run's config; every stage has its own step axis.

    It is offline unless this machine is logged in (see :func:`wandb_mode`); ``wandb sync`` sends it later.  A resumed
    run continues the one that is in the folder.
    """

    package = "wandb"

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        import wandb

        run.mkdir(parents=True, exist_ok=True)
        before = sorted((run / "wandb").glob("*run-*-*"))
        try:
            self._run = wandb.init(
                project="vla-rl",
                name="/".join(run.resolve().parts[-2:]),
                dir=str(run),
                config=dict(config),
                mode=(mode := wandb_mode()),
                id=before[-1].name.rpartition("-")[2] if before else None,
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases could not begin a run ({error}), so nothing was started; set WANDB_MODE=offline and "
                "send the run later with 'wandb sync', or log in again with 'wandb login'."
            ) from error
        if mode == "offline":
            print(
                f"Weights & Biases is not logged in, so the run stays here; send it: wandb sync {run}/wandb/offline-*"
            )
        self._stages: set[str] = set()

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        self._run.finish()


def wandb_mode() -> Any:
    """None, which leaves it to ``WANDB_MODE``, when that is set; else "online" where logged in, "offline" elsewhere.

    Nobody is asked, and nothing is sent to find out.
    """
    import wandb

    if os.environ.get("WANDB_MODE"):
        return None
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


TRACKERS: dict[str, type[TensorBoardTracker] | type[WandbTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a name that is none of ``TRACKERS``, and for a tracker whose library is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"there is no tracker {name!r}, so nothing was started; {did_you_mean(name, TRACKERS)}")
        if importlib.util.find_spec(package := TRACKERS[name].package) is None:
            raise UserError(
                f"the tracker {name!r} needs {package}, which is not installed, so nothing was started; "
                "pip install 'vla-rl[tracking]'."
            )


def open_trackers(names: Sequence[str], run: Path, config: Mapping[str, Any]) -> tuple[Tracker, ...]:
    """The trackers of the run in ``run``, each once; raises UserError like :func:`check_trackers`."""
    check_trackers(names)
    return tuple(TRACKERS[name](run, config) for name in dict.fromkeys(names))
