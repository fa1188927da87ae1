"""``vla-rl eval CHECKPOINT|RUN [--field value ...]``"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vla_rl.cli.override import override, take_option
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import mean_text, percent
from vla_rl.evaluation.run import Outcomes, evaluate
from vla_rl.evaluation.stats import MeanReturn
from vla_rl.evaluation.trace import TraceRecorder
from vla_rl.policies.flow_policy import at_temperature
from vla_rl.policies.function import Renumbered
from vla_rl.policies.pretrained import default_options
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import checkpoint_of
from vla_rl.recipes.config_files import env_config_of
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.policies import deployed
from vla_rl.recipes.terminal import bar, console
from vla_rl.serving.access import names_server
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class Evaluate:
    """Play a policy once per held-out seed.  Test seeds are for a number that will be reported, once.

    Of a run, its checkpoint "best" is played; ws://HOST:PORT is a policy server.  The environment is that of the run,
    otherwise --env names it.
    """

    seeds: str = "validation"  # or "test"
    episodes: int = 512
    num_envs: int = 64
    seed: int = 1  # of the flow's starting noise
    temperature: float | None = None  # std of that noise; None: the checkpoint's, which is 1 unless set otherwise
    out: str = ""  # write the result there as JSON
    device: str = "cpu"  # where the policy computes: "cpu", "cuda", "cuda:1", "auto"
    trace: str = ""  # write every decision there, see docs/commands.md
    env: EnvConfig = NO_ENV
    vla: VLAOptions = VLAOptions()  # how a public folder is opened; a checkpoint of ours has its own


def evaluate_checkpoint(arguments: Sequence[str]) -> None:
    """Load, check that policy and environment fit together, play, print."""
    given = list(arguments)
    if given in (["-h"], ["--help"]):
        override(Evaluate(), given, "vla-rl eval CHECKPOINT")
    if not given or given[0].startswith("-"):
        raise UserError(
            "eval needs a checkpoint or run folder, for example vla-rl eval runs/demo; or --suite NAME --policy POLICY "
            "--out FOLDER."
        )
    checkpoint = given[0] if names_server(given[0]) else str(checkpoint_of(given[0]))
    named = "".join(take_option([*given[1:], ""], name, "")[0] for name in ("--env", "--env.name"))
    default = Evaluate(env=env_config_of(checkpoint, named) or NO_ENV, vla=default_options(checkpoint))
    config: Evaluate = override(default, given[1:], "vla-rl eval CHECKPOINT")
    ranges = {"validation": seed_ranges.VALIDATION, "test": seed_ranges.TEST}
    if config.seeds not in ranges:
        raise UserError(f"there are no {config.seeds!r} seeds; {did_you_mean(config.seeds, ranges)}")
    if min(config.episodes, config.num_envs) < 1:
        raise UserError(
            f"{config.episodes} episodes in {config.num_envs} environments measure nothing; give both at least 1."
        )
    seeds = seed_ranges.held_out(ranges[config.seeds], config.episodes)
    config.env.required("eval").check()
    with deployed(checkpoint, config.env, config.device, options=config.vla) as policy:
        at_temperature(policy.policy if isinstance(policy, Renumbered) else policy, config.temperature, "--temperature")
        outcomes, remarks = _play(config, policy, seeds)
    ends = ", ".join(f"{cause.replace('_', ' ')} {count}" for cause, count in Counter(outcomes.cause).most_common())
    earned = MeanReturn.of(outcomes.returns)
    mean = f"mean return {mean_text(earned.mean, earned.low, earned.high)}"
    headline = percent(outcomes.rate) if outcomes.has_success else mean
    console.print(f"{checkpoint}: {headline} of {config.episodes} {config.seeds} episodes ({ends})")
    if outcomes.has_success and not np.array_equal(outcomes.returns, outcomes.success):  # rewards add something
        console.print(f"  {mean}")
    for remark in remarks:
        console.print(f"  {remark}")
    families = outcomes.families if outcomes.has_success and len(outcomes.families) > 1 else {}
    for name, rate in families.items():
        console.print(f"  {name}: {percent(rate)} of {rate.episodes}")
    result = {**asdict(outcomes.score), "families": {name: asdict(rate) for name, rate in families.items()}}
    result["returns"] = asdict(earned)
    if config.out:
        write_json(Path(config.out), {**result, "seeds": config.seeds, "checkpoint": checkpoint})
    else:
        print(json.dumps(result))


def _play(config: Evaluate, policy: Policy, seeds: list[int]) -> tuple[Outcomes, list[str]]:
    """Evaluate with a progress bar, and with a trace if one is wanted; also what can hardly be meant."""

    def remark(done: int, good: int) -> None:
        update(done, f"success {good / done:.0%}")

    with bar(config.seeds, len(seeds)) as update, closing(config.env.make(config.num_envs)) as env:
        if not config.trace:
            outcomes = evaluate(env, policy, seeds, config.seed, report=remark)
        else:
            recorder = TraceRecorder(Path(config.trace), env.spec.tasks, config.seed)
            outcomes = evaluate(env, policy, seeds, config.seed, report=remark, watch=recorder.watch)
        return outcomes, outcomes.remarks(env.spec.time_limit)
