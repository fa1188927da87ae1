"""Reinforcement learning from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from vla_rl.contract.config import JsonMapping, JsonObject
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import Outcomes
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import save_own
from vla_rl.recipes import stages
from vla_rl.recipes.context import RunContext, Trainable, placed
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.policies import start_policy
from vla_rl.recipes.stages import EvaluationConfig, clock
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.training.device import resolve_device
from vla_rl.training.distributed import barrier, current_reducer
from vla_rl.training.sharding import sharing
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class Improve:
    """Reinforcement learning from a checkpoint, then the test seeds: the checkpoint "best"."""

    rl: TrainerConfig
    policy: str = "runs/demo/checkpoints/imitation"  # a checkpoint folder, or module:Class; "": rl builds its own
    demonstrations: str = ""  # folder of a dataset, for methods that learn from it as well
    seed: int = 1
    env: EnvConfig = field(kw_only=True)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "cpu"  # where policy, critic, learner and replay compute: "cpu", "cuda", "cuda:1", "auto"
    sharded: bool = False  # each of torchrun's processes holds a share of the weights and of the optimizer (FSDP2)
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl
    vla: VLAOptions = VLAOptions()  # how ``policy`` is opened if it is a public folder; ours have their own

    def run(self, folder: RunFolder) -> JsonObject:
        """Train and evaluate.  The starting policy is kept in the run folder, so that the run can be resumed."""
        start = folder.checkpoint("start")
        name = start if folder.resumed and start.exists() else self.policy
        policy = start_policy(name, self.env, self.seed, self.vla)
        if policy is not None and not start.exists():
            save_own(policy, start)
        return self.improve(policy, folder, {})[1]

    def improve(
        self, policy: Trainable | None, folder: RunFolder, seconds: dict[str, float]
    ) -> tuple[Outcomes, JsonObject]:
        """Train from ``policy``, in place or on top of it, and play the test seeds; returns outcomes and summary."""
        with clock(seconds, "rl"):
            device = resolve_device(self.device)
            group = sharing(self.evaluation.processes) if self.sharded else current_reducer()
            base = policy if policy is None or self.sharded else placed(policy, device)
            context = RunContext(self.env, base, self.seed, group, self.demonstrations, device)
            trained, best = stages.improve(self.rl, context, self.evaluation, folder)
        rows = folder.metrics("rl")
        with clock(seconds, "evaluation"):
            tests = seed_ranges.held_out(seed_ranges.TEST, self.evaluation.test)
            outcomes = stages.play(self.env, trained, tests, self.evaluation, self.seed, "test RL")
            barrier(group)
        summary = {
            **({"rl": asdict(outcomes.rate)} if outcomes.has_success else {"return": asdict(outcomes.score)}),
            "families": {name: asdict(rate) for name, rate in outcomes.families.items()},
            "best_iteration": best.iteration,
            "env_steps": int(rows[-1]["env/steps_total"]),
            "env_steps_at_best": _steps_at(rows, best.iteration),
            "episodes": int(sum(row.get("rollout/episodes", 0) for row in rows)),
            **exploring(rows),
            **_groups(rows),
            "seconds": seconds,
            "seed": self.seed,
        }
        return outcomes, summary


def _steps_at(rows: list[JsonObject], iteration: int) -> int:
    return int(next((row["env/steps_total"] for row in rows if row["step"] == iteration), 0))


def _groups(rows: list[JsonObject]) -> dict[str, dict[str, int]]:
    """Totals of what a source of groups counts; nothing for other sources."""
    names = sorted({name for row in rows for name in row if name.startswith("rollout/groups_")})
    totals = {name.removeprefix("rollout/groups_"): int(sum(row.get(name, 0) for row in rows)) for name in names}
    return {"groups": totals} if totals else {}


WINDOW = 64  # episodes


def windows(rows: Iterable[JsonMapping], size: int = WINDOW) -> list[tuple[float, int, int]]:
    """(success, episodes, control steps at its end) of windows in turn, from the lines of ``metrics.jsonl``.

    A window ends with the iteration in which it has ``size`` episodes; what is left in the end is none.  The deadline
    and the exploration noise of training apply, so a policy succeeds less often here than when it is evaluated.
    """
    found, good, episodes = [], 0.0, 0.0
    for row in rows:
        good += row.get("rollout/successes", 0.0)
        episodes += row.get("rollout/episodes", 0.0)
        if episodes >= size:
            found.append((good / episodes, int(episodes), int(row["env/steps_total"])))
            good, episodes = 0.0, 0.0
    return found


def exploring(rows: Iterable[JsonMapping]) -> JsonObject:
    """The first, lowest and last window of a run, for its summary; nothing for a run that is shorter than one."""
    found = windows(rows)
    if not found:
        return {}
    lowest = min(found)
    shown = {"first": found[0][0], "lowest": lowest[0], "lowest_at": lowest[2], "last": found[-1][0]}
    return {"exploring": {"windows": len(found), "episodes": WINDOW, **shown}}
