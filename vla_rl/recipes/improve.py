"""Reinforcement learning: of a policy from a checkpoint, and of a new one from nothing; then the test seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from vla_rl.contract.batch import ExperienceSource, OneProcess
from vla_rl.contract.config import JsonMapping, JsonObject, from_json, to_json
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import NonFiniteError, Terminated
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.experience.process import ProcessSource
from vla_rl.experience.sources import CollectingSource, Collectors
from vla_rl.experience.worker import Worker
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import save_own
from vla_rl.recipes.config_files import load_kept_files
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig, play, remote_env, saved
from vla_rl.recipes.policies import check_if_foreign, start_policy
from vla_rl.recipes.terminal import Clock, bar, clock, console, mostly, patient_sigterm, steps_per_second
from vla_rl.recipes.trainers import CPU, LearnedReward, RunContext, Trainable, TrainerConfig, placed
from vla_rl.recipes.workers import workers
from vla_rl.training.device import resolve_device
from vla_rl.training.distributed import SummedCounters, anyone, barrier, current_reducer
from vla_rl.training.loop import BestWeights, Hook, Loop, LoopLearner, PolicyStore
from vla_rl.training.out_of_memory import BUILD, LEARN, naming_knobs, phase_of_memory
from vla_rl.training.sharding import ShardedGroup, sharing
from vla_rl.training.timeline import Timeline
from vla_rl.training.tracking import START, RunFolder


def improve(
    trainer: TrainerConfig,
    context: RunContext,
    evaluation: EvaluationConfig,
    folder: RunFolder,
    hook: Callable[[Trainable], Hook] = lambda policy: Hook(),
) -> tuple[Trainable, BestWeights]:
    """Reinforcement learning by ``trainer``; the policy ends with its best validated weights.

    Those are saved as the checkpoint "best" whenever they improve.  The state of the run is saved after every
    ``save_every`` iterations, after the last one and when the process is asked to terminate; a resumed run goes on from
    it.  What a run needs besides, ``hook(policy)`` does before every iteration.
    Raises UserError when memory runs out, with what to change.
    """
    with (
        naming_knobs(trainer, evaluation, context.base),
        closing(evaluation.evaluator(context.env)) as evaluator,
        closing(build(trainer, context)) as setup,
    ):
        policy, group = setup.policy, context.group
        saved = folder.load_state("rl") if folder.resumed else None
        with phase_of_memory(LEARN):
            pretrained = saved is None and trainer.pretrain(setup.learner)
        with bar("improve", trainer.loop.iterations) as update, patient_sigterm() as asked_to_stop:
            diary = _Diary(folder, update)

            def validate() -> Rate | MeanReturn:
                seeds = seed_ranges.held_out(seed_ranges.VALIDATION, evaluation.validation)
                outcomes = evaluator.evaluate(policy, seeds, context.seed)
                barrier(group)  # a checkpoint may follow, which gathers weights that processes share
                diary.validated(outcomes)
                return trainer.score(outcomes)

            def save(iteration: int) -> None:
                stopping = anyone(asked_to_stop, group)
                due = iteration % trainer.loop.save_every == 0 or loop.progress() >= 1.0
                if not unsaved and (stopping or due):
                    folder.save_state(iteration, loop.state_dict())
                if stopping:
                    raise Terminated

            loop = Loop(
                setup.source,
                setup.learner,
                setup.store,
                validate,
                trainer.loop,
                on_best=lambda iteration: save_own(policy, folder.checkpoint("best")),
                report=diary.report,
                save=save,
                timeline=diary.timeline,
                hook=hook(policy),
            )
            if hasattr(setup.learner, "report"):  # of a single update, which may take minutes
                setup.learner.report = lambda share: update(loop.iteration, f"learning from successes, {share:.0%}")
            if unsaved := loop.not_resumable():
                console.print(unsaved)
            if saved is not None:
                loop.load_state_dict(saved)
            elif pretrained and not unsaved:
                folder.save_state(-1, loop.state_dict())  # before iteration 0, which validates for the first time
            best = diary.all_of(loop)
        diary.spent.tell()
        return policy, best


class _Diary:
    """What a run tells: metrics and timeline in its folder, and remarks at the progress bar."""

    def __init__(self, folder: RunFolder, update: Callable[[int, str], None]) -> None:
        self.folder, self.update = folder, update
        self.spent, self.timeline = Clock(), Timeline.of(folder)
        self._by_family: dict[str, float] = {}
        self._score = 0.0

    def validated(self, outcomes: Outcomes) -> None:
        """Note the rates of several families of tasks, which are logged with the validation's score."""
        if len(outcomes.families) > 1:
            self._by_family = {f"eval/{name}": rate.success for name, rate in outcomes.families.items()}

    def report(self, iteration: int, metrics: dict[str, float]) -> None:
        """Log the metrics of ``iteration``; after a validation the timeline is written anew."""
        metrics |= self._by_family if "eval/score" in metrics else {}
        self.folder.log("rl", iteration, metrics)
        if "eval/score" in metrics:
            self.timeline.write(self.folder)
        self._score = metrics.get("eval/score", self._score)
        self.spent.add(metrics)
        trying = metrics.get("rollout/successes", 0.0) / max(1.0, metrics.get("rollout/episodes", 0.0))
        # A rate of success, or a mean return, which is hardly ever within 0 and 1.
        score = f"{self._score:.0%}" if 0 <= self._score <= 1 else f"{self._score:.4g}"
        speed = f"{steps_per_second(metrics):.0f} steps/s, {mostly(metrics)}"
        self.update(iteration, f"exploring {trying:.0%}, validated {score}, {speed}")
        if metrics.get("eval/collapsed"):
            console.print(f"iteration {iteration}: validation collapsed, went back to the best weights.")
        if metrics.get("policy/returned"):
            base = metrics["rollout/base_success"]
            console.print(f"iteration {iteration}: exploring succeeds less often than the base ({base:.0%}), returned.")

    def all_of(self, loop: Loop) -> BestWeights:
        try:
            return loop.run()
        except NonFiniteError as error:
            best = str(self.folder.checkpoint("best"))
            raise NonFiniteError(f"{error} The last good weights are in {best!r}.") from error
        finally:
            self.timeline.write(self.folder)


@dataclass(frozen=True, kw_only=True)
class FromPolicy:
    """What recipes of reinforcement learning have in common: how it is done, where, and from which policy."""

    rl: TrainerConfig = field(kw_only=False)
    # A checkpoint folder, a public one, or module:Class; "": none.
    policy: str = field(default="runs/demo/checkpoints/imitation", kw_only=False)
    seed: int = 1
    env: EnvConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "cpu"  # of policy, critic, learner, replay and world model: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl
    vla: VLAOptions = VLAOptions()  # how ``policy`` is opened if it is a public folder; ours have their own
    reward: LearnedReward = LearnedReward()

    def start(self, folder: RunFolder) -> Trainable | None:
        """The policy that the run starts from, kept as the checkpoint "start", so that it can be resumed."""
        kept = folder.checkpoint(START)
        policy = start_policy(kept if kept.exists() else self.policy, self.env, self.seed, self.vla)
        if policy is not None and not kept.exists():
            save_own(policy, kept)
        return policy


@dataclass(frozen=True)
class Improve(FromPolicy):
    """Reinforcement learning, from a checkpoint or from nothing, then the test seeds: the checkpoint "best".

    ``policy`` "": ``rl`` builds its own.
    """

    demonstrations: str = ""  # folder of a dataset, for methods that learn from it as well
    sharded: bool = False  # each of torchrun's processes holds a share of the weights and of the optimizer (FSDP2)

    def run(self, folder: RunFolder) -> JsonObject:
        """Train and evaluate."""
        return self.improve(self.start(folder), folder, {})[1]

    def improve(
        self, policy: Trainable | None, folder: RunFolder, seconds: dict[str, float]
    ) -> tuple[Outcomes, JsonObject]:
        """Train from ``policy``, in place or on top of it, and play the test seeds; returns outcomes and summary."""
        with clock(seconds, "rl"):
            device = resolve_device(self.device)
            group = sharing(self.evaluation.processes) if self.sharded else current_reducer()
            base = policy if policy is None or self.sharded else placed(policy, device)
            context = RunContext(self.env, base, self.seed, group, self.demonstrations, device, self.reward)
            trained, best = improve(self.rl, context, self.evaluation, folder)
        rows = folder.metrics("rl")
        with clock(seconds, "evaluation"):
            tests = seed_ranges.held_out(seed_ranges.TEST, self.evaluation.test)
            outcomes = play(self.env, trained, tests, self.evaluation, self.seed, "test RL")
            barrier(group)
        score = self.rl.score(outcomes)
        summary = {
            "rl" if isinstance(score, Rate) else "return": asdict(score),
            "best_iteration": best.iteration,
            "env_steps": int(rows[-1]["env/steps_total"]),
            "env_steps_at_best": next(
                (int(row["env/steps_total"]) for row in rows if row["step"] == best.iteration), 0
            ),
            "episodes": int(sum(row.get("rollout/episodes", 0) for row in rows)),
            **_groups(rows),
            "seconds": seconds,
            "seed": self.seed,
        }
        if outcomes.has_success:
            families = {name: asdict(rate) for name, rate in outcomes.families.items()}
            summary |= {"families": families, **exploring(rows)}
        return outcomes, summary


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


# -- the parts of a run, built from its config -------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of one training run; ``close()`` ends its environments and those who collect in them."""

    policy: Trainable
    env: VecEnv
    source: ExperienceSource
    learner: LoopLearner
    store: PolicyStore
    close: Callable[[], None]


def build(trainer: TrainerConfig, context: RunContext) -> TrainingSetup:
    """All parts of a run.

    Several collectors are processes of their own, and so is one that plays ahead of weights that processes share: to
    act with shares, all of them would have to decide together.  Raises UserError for what cannot be built.
    """
    loop, shares = trainer.loop, context.split(trainer.loop.collectors)
    with phase_of_memory(BUILD), ExitStack() as stack:
        env = trainer.build_env(shares[0])  # for its spec alone, where other processes collect
        closing_env = stack.enter_context(ExitStack())
        closing_env.callback(env.close)
        policy = trainer.build_policy(replace(context, device=CPU) if context.sharded else context, env)
        check_if_foreign(policy, context.env, context.seed)
        remote = None
        if loop.collectors > 1 or (context.sharded and loop.staleness):
            remote = stack.enter_context(closing(ProcessSources(trainer, shares)))  # it keeps the whole base
        if isinstance(context.group, ShardedGroup):
            context.group.shard(policy, context.device)
        learner = trainer.build_learner(context, env, policy)
        store = PolicyStore(policy)
        if remote is None:
            sources = [trainer.build_source(shares[0], env, policy)]
        else:
            sources = [*remote.all(lambda: store.progress)]
        source: ExperienceSource = sources[0]
        if remote is not None or loop.staleness:
            windows, remake = 1 if trainer.joins_episodes else None, None if remote is None else remote.remake
            source = stack.enter_context(closing(Collectors(sources, policy, loop.staleness, windows, remake)))
            if remote is None:
                closing_env.pop_all()  # the source closes it, in its thread
        whole = source if context.group.size == 1 else SummedCounters(source, context.group)
        return TrainingSetup(policy, env, whole, learner, store, stack.pop_all().close)


_MAKE = "vla_rl.recipes.improve:make_source"


class ProcessSources:
    """Makes the source of each of ``shares``, in a worker process of its own, and makes it again when that has died."""

    def __init__(self, trainer: TrainerConfig, shares: list[RunContext]) -> None:
        """Raises UserError for what another process cannot make."""
        self._pool, self._shares = workers(len(shares)), shares
        self._progress: Callable[[], float] = lambda: 0.0
        first = shares[0]
        self._given = {
            "trainer": to_json(trainer),
            "env": remote_env(first.env),
            "seed": first.seed,
            "parts": first.parts,
            "demonstrations": first.demonstrations,
            "device": str(first.device),
            "reward": to_json(first.reward),
        }
        self._files = ExitStack()
        self._base = "" if first.base is None else self._files.enter_context(saved(first.base))

    def all(self, progress: Callable[[], float]) -> list[ProcessSource]:
        """The sources, in the order of their shares; ``progress`` as for ``ProcessSource``."""
        self._progress = progress
        return [self._made(i, worker) for i, worker in enumerate(self._pool.all[: len(self._shares)])]

    def remake(self, i: int) -> ProcessSource:
        return self._made(i, self._pool.replaced(i))

    def close(self) -> None:
        """Remove the files that the processes read; the processes are those of the whole run."""
        self._files.close()

    def _made(self, i: int, worker: Worker) -> ProcessSource:
        with (
            self._pool.engine.placed(worker, self._base) as base,
            self._pool.engine.placed(worker, self._pool.run) as run,
        ):
            given = {"share": self._given, "base": base, "run": run, "part": self._shares[i].part}
            return ProcessSource(_MAKE, given, worker, self._progress)


def make_source(share: JsonObject, base: str, part: int, run: str) -> CollectingSource:
    """The source of share ``part``, in the process that collects it; ``share``: see ``ProcessSources``."""
    console.quiet = True  # progress bars are those of the process that learns
    if run:
        load_kept_files(Path(run))
    trainer: TrainerConfig = from_json(share["trainer"])
    env: EnvConfig = from_json(share["env"])
    device = torch.device(share["device"])
    start = placed(load_policy(base), device) if base else None
    context = RunContext(
        env,
        start,
        share["seed"],
        OneProcess(),
        share["demonstrations"],
        device,
        from_json(share["reward"]),
        collector=part,
        collectors=share["parts"],
    )
    made = trainer.build_env(context)
    return trainer.build_source(context, made, trainer.build_policy(context, made))
