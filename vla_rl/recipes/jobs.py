"""What worker processes do besides collecting, with policies that lie in folders."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from vla_rl.contract.config import JsonObject, from_json
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.worker import Report
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.config_files import load_kept_files
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.launchers import enter
from vla_rl.recipes.perception_ablation import check_perception
from vla_rl.recipes.progress import console
from vla_rl.recipes.suite import Block


class Jobs:
    """The jobs, by name; configs come as JSON."""

    def __init__(self, run: str) -> None:
        console.quiet = True  # progress bars are those of the process that asks
        if run:
            load_kept_files(Path(run))

    def evaluate(
        self, env: JsonObject, policy: str, seeds: list[int], num_envs: int, noise_seed: int, report: Report
    ) -> JsonObject:
        """The fields of the ``Outcomes`` of ``seeds``."""
        config: EnvConfig = from_json(env)
        with closing(config.make(num_envs)) as made:
            return vars(evaluate(made, load_policy(policy, config.spec()), seeds, noise_seed, report=report))

    def play_block(self, block: JsonObject, disk: JsonObject, report: Report) -> None:
        """Play a block of a suite; ``report`` gets the fields of every episode's result.

        Raises UserError on a machine that does not see the ``disk`` (see ``SharedDisk``) on which its files are.
        """
        enter(**disk)
        made: Block = from_json(block)
        made.play(lambda result: report(asdict(result)))

    def check_perception(
        self, env: JsonObject, policy: str, check: str, seeds: list[int], num_envs: int, noise_seed: int
    ) -> JsonObject:
        """``rates``: the fields of the rates that ``check`` finds, see there."""
        config: EnvConfig = from_json(env)
        loaded = load_policy(policy, config.spec())
        rates = check_perception(config, loaded, check, seeds, num_envs, noise_seed)
        return {"rates": [asdict(rate) for rate in rates]}
