"""``python -m tests.simulators.metaworld_experts [SEEDS]``: Meta-World's experts on MT10 here and in their package.

The same seeds are played by our evaluation, in isolated workers, and by a loop that imports Meta-World only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

from rich.console import Console
from rich.table import Table

from sims import catalog, installations
from sims.metaworld import MT10
from tests.simulators import own_metaworld
from vla_rl.evaluation.run import evaluate
from vla_rl.evaluation.seed_ranges import TEST, held_out
from vla_rl.experience.collect import ExpertPolicy


def main(count: int, show: Console) -> int:
    """Print the table; returns 1 when an episode ended differently."""
    seeds = held_out(TEST, count)
    given = json.dumps({"tasks": MT10, "seeds": seeds})
    python = installations.find("metaworld").python
    run = [str(python), own_metaworld.__file__, given]
    theirs = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    table = Table("task", "here", "in Meta-World", "episodes that differ", title=f"experts on MT10, {count} test seeds")
    differing = 0
    for task in MT10:
        with closing(catalog.make("metaworld", num_envs=8, workers=2, tasks=[task], cameras=[])) as env:
            ours = evaluate(env, ExpertPolicy(catalog.expert("metaworld", 1).act), seeds).success.tolist()
        different = sum(a != b for a, b in zip(ours, theirs[task], strict=True))
        table.add_row(task, f"{sum(ours)}/{count}", f"{sum(theirs[task])}/{count}", str(different))
        differing += different
    show.print(table)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, Console()))
