"""``vla-rl collect [--env.name NAME] [--count N] [--seed S] [--out FOLDER] [--video auto|always|never]``"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_rl.cli.override import override
from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.collect import iter_demonstrations
from vla_rl.experience.datasets import Recording, move_aside, repair
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.terminal import bar, console


@dataclass(frozen=True)
class Collect:
    """Record demonstrations of the scripted expert as a LeRobotDataset v3.0; failures are left out.

    Every episode is on the disk when the next ones begin: ``--repair FOLDER`` finishes a Recording that was killed.
    """

    env: EnvConfig = NO_ENV
    expert: str = ""  # "module:Class" instead of the expert that the task declares
    count: int = 30
    seed: int = 1  # of the training run that they are for
    num_envs: int = 16  # episodes played side by side
    out: str = "runs/demonstrations"
    video: Literal["auto", "always", "never"] = "auto"  # cameras as video: where it pays, all, or none (PNG)
    repair: str = ""  # record nothing: finish what is in this folder

    def __post_init__(self) -> None:
        """Raises UserError for counts with which nothing would be recorded."""
        check_limits(self, count=(1, math.inf), num_envs=(1, math.inf))


def collect(arguments: Sequence[str]) -> None:
    """Record episode by episode, then finish the dataset."""
    config: Collect = override(Collect(), arguments, "vla-rl collect")
    if config.repair:
        _repair(Path(config.repair))
        return
    env_config, out = config.env.required("collect"), Path(config.out)
    env_config.check()
    expert = load(config.expert)(horizon=1) if config.expert else env_config.make_expert()
    env = env_config.make(min(config.num_envs, config.count))
    aside = move_aside(out)
    if aside:
        console.print(f"an earlier dataset was in {out}; it is now {aside}")
    seeds = list(seed_ranges.training_seeds(config.seed, "demonstrations")[: config.count])
    episodes = steps = 0
    try:
        with Recording(out, config.video) as kept, bar("collect", config.count) as update:
            for episode in iter_demonstrations(env, expert.act, seeds, lambda done: update(done, "demonstrations")):
                kept.add(episode)
                episodes, steps = episodes + 1, steps + len(episode.state)
    except KeyboardInterrupt as stop:
        if not episodes:
            raise
        raise KeyboardInterrupt(
            f"stopped with {episodes} episodes recorded; finish them with: vla-rl collect --repair {out}"
        ) from stop
    finally:
        env.close()
    console.print(f"{episodes} episodes, {steps} control steps: {config.out}")


def _repair(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"there is no folder {str(path)!r}, so nothing can be repaired; check its name.")
    lost = repair(path)
    for problem in lost:
        console.print(f"put aside, it is damaged: {problem}")
    console.print(f"finished, {len(lost)} episodes put aside: {path}")
