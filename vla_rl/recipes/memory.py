"""How much memory a training run takes, before it is spent.

The run itself is played: its own policy, source, learner, loop and evaluator, for as many iterations as it takes until
the policy has learnt, on torch's device "meta" (``training/shapes_only.py``) in environments of zeros.  All tensors
that are alive at once are counted; no formula has to be kept up to date.  What is not counted: the simulators, Python
and torch themselves, what an operation takes while it computes, and the allocator's gaps.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from vla_rl.algorithms.chunks import ImitationPolicy
from vla_rl.contract.batch import OneProcess, Rollout
from vla_rl.contract.env import Array, EnvSpec, Observation, Observe, Step, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import NewImitator
from vla_rl.recipes.improve import Improve, TrainingSetup, build
from vla_rl.recipes.inspect import sizes, table
from vla_rl.recipes.policies import names_class, new_policy
from vla_rl.recipes.trainers import RunContext, Trainable, TrainerConfig
from vla_rl.training.loop import Loop
from vla_rl.training.out_of_memory import BUILD, COLLECT, LEARN, VALIDATE
from vla_rl.training.shapes_only import META, LiveBytes, bytes_of, shapes_only

_ITERATIONS = 64  # at most, until the policy has learnt
_STEPS = 2  # of the policy's optimizer: in the second one, its state and the old gradients are there
# Of algorithms that let the policy wait.
_AT_ONCE: dict[str, Any] = {"critic_warmup": 0, "learning_starts": 1, "burst": 0, "release": None, "fallback": None}


@dataclass
class Phase:
    """The bytes that are there before a phase begins, and the most while it runs."""

    before: int = 0
    peak: int = 0

    def note(self, before: int, peak: int) -> None:
        """One more time that the phase ran; the one with the highest peak counts."""
        if peak > self.peak:
            self.before, self.peak = before, peak


@dataclass
class MemoryEstimate:
    """Bytes of a run.

    policy        the policy, without memory
    phases        by name, see :class:`Phase`
    weights       of all networks, by dtype: policy, critics, their targets
    trained       of the weights that the policy's optimizer changes
    gradients, optimizer, replay, rollout  what lasts from one phase to the next
    on_disk       of the replay buffer, which are then not in ``replay`` and ``phases``
    observation, decision  {name: bytes} of one in a rollout: features, and what was chosen
    learnt        whether the policy was seen to learn
    """

    policy: object = None
    phases: defaultdict[str, Phase] = field(default_factory=lambda: defaultdict(Phase))
    weights: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    gradients: int = 0
    optimizer: int = 0
    replay: int = 0
    on_disk: int = 0
    rollout: int = 0
    observation: dict[str, int] = field(default_factory=dict)
    decision: dict[str, int] = field(default_factory=dict)
    learnt: bool = False

    @property
    def peak(self) -> int:
        """The most that is alive at once."""
        return max(phase.peak for phase in self.phases.values())


class _Learnt(Exception):
    """The policy has taken its steps."""


def estimate(
    trainer: TrainerConfig,
    env: EnvConfig,
    evaluation: EvaluationConfig,
    start: Callable[[EnvSpec], Trainable | None],
    demonstrations: str = "",
    seed: int = 1,
    device: str = "cpu",
) -> MemoryEstimate:
    """The memory of a run of ``trainer`` on ``device``, from the policy ``start(spec)``.

    Raises what building the parts of the run raises.
    """
    envs = ShapesEnvs(env.spec(), env.with_options(**env.training_options).spec())
    found, (trainer, on_disk) = MemoryEstimate(), _alone(trainer)
    with warnings.catch_warnings(), shapes_only(), LiveBytes() as live, _as_on(device):
        warnings.simplefilter("ignore")  # about values, which are not those of the run
        with torch.device(META):
            context = RunContext(envs, start(envs.spec()), seed, OneProcess(), demonstrations, META)
            with live.watch(found.phases[BUILD].note):
                setup = build(trainer, context)
        with closing(setup), closing(replace(evaluation, processes=1).evaluator(envs)) as evaluator:

            def validate() -> Rate | MeanReturn:
                with live.watch(found.phases[VALIDATE].note):
                    return evaluator.evaluate(setup.policy, range(evaluation.num_envs), seed).score

            found.policy = setup.policy
            loop = _play(found, live, trainer, setup, validate)
            with live.watch(found.phases[COLLECT].note):  # again, now that the optimizer's state is there
                setup.source.next()
            with live.watch(found.phases[VALIDATE].note):
                _keep_better(loop, validate())
            _count(found, setup, on_disk)
    return found


def _alone(given: TrainerConfig) -> tuple[TrainerConfig, bool]:
    """``given`` as it learns at once, in one process, its replay buffer in memory; whether that would be on disk."""
    trainer: Any = given  # a dataclass with an algorithm
    known = {item.name for item in fields(trainer.algorithm)}
    at_once = {name: value for name, value in _AT_ONCE.items() if name in known}
    trainer = replace(trainer, algorithm=replace(trainer.algorithm, **at_once))
    trainer = replace(trainer, loop=replace(trainer.loop, iterations=_ITERATIONS, env_steps=0, validate_every=0))
    trainer = replace(trainer, loop=replace(trainer.loop, collectors=1, staleness=0, validate_steps=0))
    on_disk = bool(getattr(getattr(trainer, "replay", None), "folder", ""))
    return (replace(trainer, replay=replace(trainer.replay, folder="")) if on_disk else trainer), on_disk


@contextmanager
def _as_on(device: str) -> Iterator[None]:
    """Optimizers on "meta" take the kernels that they take on ``device``, which need different amounts of memory."""
    on_host = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    foreach, fused = [] if on_host else [META.type], [META.type]
    optimizers = "torch.optim.optimizer."
    with (
        mock.patch(optimizers + "_get_foreach_kernels_supported_devices", lambda: ["cuda", *foreach]),
        mock.patch(optimizers + "_get_fused_kernels_supported_devices", lambda: ["cpu", "cuda", *fused]),
        torch.compiler.set_stance("force_eager"),  # nothing to compile for
    ):
        yield


def _play(
    found: MemoryEstimate,
    live: LiveBytes,
    trainer: TrainerConfig,
    setup: TrainingSetup,
    validate: Callable[[], Rate | MeanReturn],
) -> Loop:
    """Run the loop of ``setup`` until the policy has learnt; returns the loop."""
    policy = {id(item) for item in setup.policy.trainable().values()}
    taken = Counter[int]()

    def count(optimizer: torch.optim.Optimizer, *given: object) -> None:
        if any(id(item) in policy for group in optimizer.param_groups for item in group["params"]):
            taken[id(optimizer)] += 1
            if taken[id(optimizer)] == _STEPS:
                raise _Learnt

    collect, learn = setup.source.next, setup.learner.update

    def next_rollout() -> Rollout:
        with live.watch(found.phases[COLLECT].note):
            rollout = collect()
        _measure(found, rollout)
        return rollout

    def update(rollout: Rollout) -> dict[str, float]:
        with live.watch(found.phases[LEARN].note):
            return learn(rollout)

    loop = Loop(setup.source, setup.learner, setup.store, validate, trainer.loop)
    handle = register_optimizer_step_post_hook(count)
    try:
        with mock.patch.object(setup.source, "next", next_rollout), mock.patch.object(setup.learner, "update", update):
            loop.run()
    except _Learnt as learnt:
        found.learnt = True
        traceback.clear_frames(learnt.__traceback__)  # what they hold is not alive at the next validation
    finally:
        handle.remove()
    return loop


def _keep_better(loop: Loop, result: Rate | MeanReturn) -> None:
    """Copy weights that validated better, as the loop does while it still holds the earlier copies."""
    loop.best.offer(max(result.score, loop.best.score), loop.iteration, loop.learner.parameters)
    if hasattr(loop.learner, "best_state"):
        loop.best.learner = loop.learner.best_state()


def _measure(found: MemoryEstimate, rollout: Rollout) -> None:
    """Note the sizes of ``rollout``, of an observation and of a decision."""
    tensors: dict[str, Tensor] = {}
    for item in fields(rollout):
        value = getattr(rollout, item.name)
        nested = value if isinstance(value, Mapping) else {item.name: value}
        tensors |= {f"{item.name} {name}": part for name, part in nested.items() if isinstance(part, Tensor)}
    found.rollout = max(found.rollout, bytes_of(tensors.values()))
    found.observation = {name: _each(item) for name, item in rollout.features.items()}
    chosen = {"sample": rollout.sample, **rollout.aux, "executed": rollout.executed}
    found.decision = {name: _each(item) for name, item in chosen.items()}


def _each(item: Tensor) -> int:
    """The bytes of an entry of ``item`` [T,E,...]."""
    return item[0, 0].numel() * item.element_size()


def _count(found: MemoryEstimate, setup: TrainingSetup, on_disk: bool) -> None:
    """Note what lasts; a replay buffer on the disk is not in memory."""
    learner, policy = setup.learner, setup.policy
    networks = [item for item in (policy, *vars(learner).values()) if isinstance(item, nn.Module)]
    optimizers = [item for item in vars(learner).values() if isinstance(item, torch.optim.Optimizer)]
    weights = list(_distinct(item for network in networks for item in (*network.parameters(), *network.buffers())))
    for item in weights:
        found.weights[str(item.dtype).removeprefix("torch.")] += bytes_of([item])
    found.trained = bytes_of(item for item in policy.trainable().values() if item.requires_grad)
    found.gradients = bytes_of(item.grad for item in weights if item.grad is not None)
    states = [item for optimizer in optimizers for state in optimizer.state.values() for item in state.values()]
    found.optimizer = bytes_of(item for item in states if isinstance(item, Tensor))
    buffer = getattr(learner, "replay", None)
    parts = getattr(buffer, "parts", {"online": buffer})
    columns = {name: bytes_of(getattr(part, "columns", {}).values()) for name, part in parts.items()}
    found.replay = sum(columns.values())
    if on_disk:
        found.on_disk = columns["online"]
        found.replay -= found.on_disk
        for name in (COLLECT, LEARN, VALIDATE):
            found.phases[name] = Phase(*(max(0, n - found.on_disk) for n in vars(found.phases[name]).values()))


def _distinct(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """``tensors`` without those whose storage came before."""
    seen: set[int] = set()
    for item in tensors:
        key = item.untyped_storage()._cdata
        if key not in seen:
            seen.add(key)
            yield item


@dataclass(frozen=True)
class ShapesEnvs:
    """An ``EnvFactory``: episodes of ``training`` last as long as they can, those of an evaluation one decision."""

    evaluation: EnvSpec
    training: EnvSpec

    def spec(self) -> EnvSpec:
        return self.evaluation

    def make(self, num_envs: int) -> VecEnv:
        return ShapesEnv(self.evaluation, num_envs, 1)

    def make_training(self, num_envs: int) -> VecEnv:
        return ShapesEnv(self.training, num_envs, self.training.time_limit)


class ShapesEnv:
    """A ``VecEnv`` of zeros.  After ``limit`` actions every other episode succeeds and the rest are truncated."""

    def __init__(self, spec: EnvSpec, num_envs: int, limit: int) -> None:
        self.spec, self.num_envs, self.limit = spec, num_envs, limit
        self.time = np.zeros(num_envs, np.int64)

    def reset(self, env_ids: Array, seeds: Array) -> Observation:
        self.time[env_ids] = 0
        return self._observation()

    def step(self, chunk: Array, observe: Observe = "last") -> Step:
        width = len(chunk[0])
        left = (self.limit - self.time)[:, None]
        valid = np.arange(width) < left
        self.time = np.minimum(self.time + width, self.limit)
        done, good = self.time >= self.limit, np.arange(self.num_envs) % 2 == 0
        reward = np.zeros((self.num_envs, width), np.float32)
        reward[(done & good)[:, None] & (np.arange(width) == left - 1)] = 1.0
        causes = np.where(done, np.where(good, "success", "time_limit"), "")
        obs = self._observation()
        return Step(
            obs,
            reward,
            valid,
            terminated=done & good,
            truncated=done & ~good,
            cause=causes.tolist(),
            success=done & good,
            executed=np.zeros((self.num_envs, width, *self.spec.action.shape), self.spec.action.dtype),
            intervened=np.zeros((self.num_envs, width), bool),
            frames=(obs,) * width if observe == "all" else (),
        )

    def close(self) -> None:
        """Nothing is open."""

    def _observation(self) -> Observation:
        return replace(self.spec.zeros(self.num_envs), time=self.time.copy())


_WHAT = {
    "build": "the networks are made",
    "collect": "the policy acts in num_envs environments",
    "learn": "advantages, micro-batches with their graphs, optimizer steps",
    "validate": "the policy acts in evaluation.num_envs environments",
}


def memory_tables(found: MemoryEstimate) -> Iterator[Table]:
    """What lasts, what each phase takes on top, what a decision takes, and what is kept of an observation."""
    weights = sum(found.weights.values())
    rows = [(f"weights in {dtype}", megabytes(size)) for dtype, size in sorted(found.weights.items())]
    rows += [
        ("of them trained by RL", f"{megabytes(found.trained)} ({found.trained / max(1, weights):.1%})"),
        ("gradients", megabytes(found.gradients)),
        ("state of the optimizers", megabytes(found.optimizer)),
        ("replay buffer, when it is full", megabytes(found.replay)),
    ]
    rows += [("replay buffer on the disk", megabytes(found.on_disk))] if found.on_disk else []
    yield table("memory that lasts", ("", "MB"), rows)
    phases = [
        (name, *map(megabytes, (phase.before, phase.peak - phase.before, phase.peak)), _WHAT[name])
        for name, phase in found.phases.items()
    ]
    phases.append(("peak", "", "", megabytes(found.peak), "the largest of them"))
    yield table("memory of a run, estimated", ("phase", "before it", "on top", "MB in all", ""), phases)
    parts = {"observation": found.observation, "decision": found.decision}
    each = [(f"{kind}: {name}", f"{size:,}") for kind, costs in parts.items() for name, size in costs.items()]
    yield table(f"bytes in a rollout, {megabytes(found.rollout)} MB", ("of each", "bytes"), each)
    yield from _kept(found.policy)


def memory_note(found: MemoryEstimate) -> str:
    """What the estimate leaves out."""
    unseen = "" if found.learnt else "The policy did not learn in the iterations that were tried, so more is possible. "
    return (
        f"{unseen}Not counted: simulators, Python and torch (about 300 MB), what single operations take while they "
        "compute, the allocator's gaps, and other processes (loop.collectors, evaluation.processes), each of which "
        "has a policy of its own."
    )


def megabytes(size: int) -> str:
    """``size`` bytes in MB of 1,000,000 bytes."""
    return f"{size / 1e6:,.1f}"


def _kept(policy: object) -> Iterator[Table]:
    """For each vision-language-action model inside ``policy``, both that it could keep of an observation."""
    from vla_rl.policies.vla.features import PREFIX_LIMIT, KeepPictures, KeepPrefix, picture_bytes

    module: Any
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        if not isinstance(getattr(module, "kept", None), KeepPrefix | KeepPictures):
            continue
        costs = {"prefix": module.network.prefix_bytes(module.cameras, module.prompt_length)}
        costs["pictures"] = picture_bytes(module.spec, module.cameras)
        if module.config.kept != "auto":
            why = f'because kept is "{module.config.kept}"'
        elif module.config.trains.reaches_prefix:
            why = f"because {type(module.config.trains).__name__} changes the prefix"
        else:
            smaller = "at most" if costs["prefix"] <= PREFIX_LIMIT else "more than"
            why = f"because a prefix is {smaller} {PREFIX_LIMIT:,} bytes"
        chosen = "prefix" if isinstance(module.kept, KeepPrefix) else "pictures"
        rows = [(name, f"{size:,}", f"chosen, {why}" if name == chosen else "") for name, size in costs.items()]
        yield table("what could be kept of an observation", ("", "bytes", ""), rows)


def show_memory(show: Console, config: object) -> None:
    """Print what a run of ``config`` takes, or in one sentence why that is not known."""
    try:
        found = memory_of(config)
    except UserError as error:
        show.print(f"No estimate of the memory: {error}", soft_wrap=True)
        return
    show.print(sizes(found.policy))
    for item in memory_tables(found):
        show.print(item)
    show.print(memory_note(found), soft_wrap=True)


def memory_of(config: object) -> MemoryEstimate:
    """The memory of the reinforcement learning of ``config``, an ``Improve`` or ``Demo``.

    Raises UserError for another config, and when a part of the run cannot be built without values.
    """
    if not isinstance(config, Improve | Demo):
        raise UserError(
            f"a {type(config).__name__} does more than improve a policy, so its memory is not known beforehand; "
            "inspect a config of Improve with the same numbers."
        )
    demonstrations = config.demonstrations if isinstance(config, Improve) else ""
    given = config.rl, config.env, config.evaluation, lambda spec: _start(config, spec)
    try:
        return estimate(*given, demonstrations, config.seed, config.device)
    except (RuntimeError, TypeError) as error:  # what torch raises where a tensor has no memory
        raise UserError(
            f"a part of the run needs values where only shapes are there ({str(error).splitlines()[0]}), so its memory "
            "is not known beforehand; watch a short run instead (--rl.loop.iterations 3)."
        ) from error


def _start(config: Improve | Demo, spec: EnvSpec) -> Trainable | None:
    """The starting policy, of whose weights the headers are read."""
    if isinstance(config, Demo):
        return cast(Trainable, untrained(config.new, spec))
    if not config.policy:
        return None
    if names_class(config.policy):
        return new_policy(config.policy, spec, {}, config.seed)
    return cast(Trainable, load_policy(config.policy, spec))


def untrained(new: NewImitator, spec: EnvSpec) -> ImitationPolicy:
    """The policy that ``new`` makes, for its sizes."""
    seen, action = spec.zeros(2), np.zeros((2, spec.action_dim), np.float32)
    return new.build(spec, Demonstrations.of_episode(spec, seen, action, success=False), 0)
