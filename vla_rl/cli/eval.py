"""``vla-rl eval``: a checkpoint on held-out seeds, a suite, two evaluations compared."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields

from vla_rl.cli.eval_checkpoint import Evaluate, evaluate_checkpoint
from vla_rl.cli.eval_compare import Compare, compare_results
from vla_rl.cli.eval_parity import Parity, check_parity
from vla_rl.cli.eval_suite import EvaluateSuite, evaluate_suite
from vla_rl.contract.errors import UserError

USAGE = """vla-rl eval CHECKPOINT|RUN [options]
vla-rl eval --suite NAME --policy POLICY --out FOLDER
vla-rl eval RESULTS --against OTHER
vla-rl eval [RESULTS] --power DIFFERENCE
vla-rl eval CHECKPOINT --parity TRACE

Play a policy once per held-out seed; compare two results of one suite.

Suites:
  --suite NAME       tabletop, metaworld-mt10, ...; or FILE.py:function
  --policy POLICY    checkpoint or run folder, module:Class, expert, or ws://HOST:PORT
  --out FOLDER       where results go; stopped, the same command goes on
  --tasks A B        some of the suite's tasks
  --seeds NAME       test, or validation to choose by
  --episodes N       of each task, instead of the suite's number
  --num-envs N       environments side by side, in each process
  --processes N      worker processes; neither number changes a result
  --engine ray       start them in a Ray cluster whose machines share a disk (default: local)
  --address ADDRESS  HOST:PORT of its head node (default: RAY_ADDRESS, or a new one on this machine)
  --gpus G           that each of them takes there (default: 0)
  --videos N         episodes of each task that are recorded
  --device NAME      where the policy computes: cpu, cuda, cuda:1, auto

Results:
  --against OTHER    the same seeds: McNemar's test, paired interval; other protocols are refused
  --power D          episodes that a difference of D takes

Another evaluator's numbers:
  --parity TRACE     replay its decisions; say at which step and key ours differ first
  --tolerance X      of the largest number of an array; 1e-4"""

_WAYS: dict[str, Callable[[Sequence[str]], None]] = {
    "--suite": evaluate_suite,
    "--against": compare_results,
    "--power": compare_results,
    "--parity": check_parity,
}


def evaluate(arguments: Sequence[str]) -> None:
    """Do what the option that only one of the ways has asks for; without one, play a checkpoint.

    Raises UserError for an option that is none but nearly that of another way.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    if given & {"-h", "--help"}:
        print(USAGE, end="\n\n", flush=True)
    for option, way in _WAYS.items():
        if option in given:
            way(arguments)
            return
    own, others = _options(Evaluate), _options(EvaluateSuite, Compare, Parity)
    for option in sorted(item for item in given - own - others if item.startswith("--") and "." not in item):
        near = difflib.get_close_matches(option, sorted(own | others), n=1)
        if near and near[0] not in own:
            raise UserError(f"eval has no option {option!r}, so nothing was evaluated; did you mean {near[0]!r}?")
    evaluate_checkpoint(arguments)


def _options(*configs: type) -> set[str]:
    """The options that set the fields of ``configs``."""
    return {f"--{field.name.replace('_', '-')}" for config in configs for field in fields(config)}
