"""Imitation of demonstrations, by new small policies that are grounded before and by any other; and while playing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import repeat
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import Chunks, HGDagger, HGDaggerConfig, ImitationPolicy, demonstrated, normalized
from vla_rl.algorithms.self_imitation import (
    FutureStates,
    FutureStatesConfig,
    SelfImitation,
    SelfImitationConfig,
    require_learning_backbone,
)
from vla_rl.contract.config import JsonObject, above_zero
from vla_rl.contract.env import EnvSpec, Observation, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.collect import collect_demonstrations
from vla_rl.experience.datasets import load_demonstrations, save_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.intervention import Escalation, HelpedEnv, PersonConfig, SupervisedEnv
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.history import with_history
from vla_rl.policies.normalization import Affine, Relative, made_relative, origin
from vla_rl.policies.openvla.decoding import OpenVLAOptions
from vla_rl.policies.openvla.heads import Regression
from vla_rl.policies.openvla.network import OpenVLAShape
from vla_rl.policies.openvla.policy import PointingOpenVLA, policy_class
from vla_rl.policies.pi05.network import Pi05Shape
from vla_rl.policies.pi05.policy import Pi05
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.flow_vla import SMALL_CHUNK, FlowVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.pointing import PointingVLM, scale_to_inputs
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.pretrained import save_own
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig, play
from vla_rl.recipes.terminal import bar, clock
from vla_rl.recipes.trainers import (
    CPU,
    PolicyConfig,
    RunContext,
    SourceConfig,
    Trainable,
    TrainerConfig,
    generator,
    placed,
)
from vla_rl.training.device import alone, resolve_device
from vla_rl.training.fit import GroundingConfig, ImitationConfig, RelativeImitationConfig, ground, imitate
from vla_rl.training.loop import LoopConfig, LoopLearner
from vla_rl.training.tracking import RunFolder

OnStep: TypeAlias = Callable[[int, dict[str, float]], None]
T = TypeVar("T", bound=Observation | None)
Pointing: TypeAlias = Callable[[nn.Module, Sequence[Tensor]], None]
"""Trains a network to point, in labelled scenes, at what its prompts [N,L] name (``training/fit.py:ground``)."""


class NewImitator:
    """Base class of the frozen dataclasses of untrained policies that imitate."""

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> ImitationPolicy:
        """The policy for ``spec``, on the host; ``episodes`` give statistics of its inputs."""
        raise NotImplementedError

    def ground(self, policy: ImitationPolicy, tasks: Tensor, fit: Pointing) -> None:
        """Let ``fit`` train the perception of what :meth:`build` returned to point; ``tasks`` [N] of its scenes."""
        raise UserError(
            f"{type(self).__name__} has no ground, so its perception cannot learn to point at objects; imitate a "
            "dataset with it, or choose another policy."
        )


@dataclass(frozen=True)
class NewTiny(TinyConfig, NewImitator):
    """A TinyVLA without training; a checkpoint of it holds a plain ``TinyConfig``."""

    smallest_scale: float = above_zero(
        1e-3
    )  # of a state's entry that demonstrations hardly vary, in its unit: a joint at rest

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> TinyVLA:
        torch.manual_seed(seed)  # module initialisation has no generator argument
        config = TinyConfig(**{item.name: getattr(self, item.name) for item in fields(TinyConfig)})
        return TinyVLA(spec, Vocabulary.from_texts(spec.tasks), *self.scales(config, episodes))

    def scales(self, config: TinyConfig, episodes: Demonstrations) -> tuple[Affine, TinyConfig, Affine | None]:
        """What the policy is made of besides words: how states are normalised, its sizes, and how actions are."""
        return Affine.from_data(torch.as_tensor(episodes.state), self.smallest_scale), config, None

    def ground(self, policy: ImitationPolicy, tasks: Tensor, fit: Pointing) -> None:
        """The backbone learns to point at the named object."""
        made: Any = policy  # of build
        fit(made.backbone, (made.tokens[tasks],))


@dataclass(frozen=True)
class NewTinyOfJoints(NewTiny):
    """The same for joint positions: actions are normalised by what was demonstrated, too.

    The bounds of a joint are many times the range in which a task moves it, so an error that is small beside them is
    large for the task.  A joint that stays still has ``smallest_scale`` (rad), lest its trembling counts.
    """

    smallest_scale: float = 0.05

    def scales(self, config: TinyConfig, episodes: Demonstrations) -> tuple[Affine, TinyConfig, Affine | None]:
        by_data = demonstrated_scale(episodes, config.relative, config.horizon, self.smallest_scale)
        return Affine.from_data(torch.as_tensor(episodes.state), self.smallest_scale), config, by_data


def demonstrated_scale(episodes: Demonstrations, relative: Relative, length: int, smallest: float = 1e-3) -> Affine:
    """Normalises actions by mean and std of what was demonstrated, the least std being ``smallest``.

    Where actions are relative, by those of all chunks of ``length``: later actions are farther from the state.
    """
    if not any(relative):
        return Affine.from_data(torch.as_tensor(episodes.action), smallest)
    actions, counts = (torch.as_tensor(item) for item in episodes.chunks(length))
    from_here = origin(relative, torch.as_tensor(episodes.state))
    return Affine.from_data(made_relative(from_here, actions)[counts], smallest)


@dataclass(frozen=True, kw_only=True)
class Imitate:
    """Collect demonstrations, ground a new policy, imitate: the checkpoint "imitation"."""

    seed: int = 1
    env: EnvConfig
    new: NewImitator = field(default_factory=NewTiny)
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "cpu"  # where the policy learns: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> JsonObject:
        seconds: dict[str, float] = {}
        policy = self.imitate(*self.ground(folder, seconds), folder, seconds)
        return {**validated(self.env, policy, self.evaluation, self.seed), "seconds": seconds, "seed": self.seed}

    def ground(self, folder: RunFolder, seconds: dict[str, float]) -> tuple[ImitationPolicy, Demonstrations]:
        """A policy that points at objects, and the demonstrations to imitate; a resumed run takes its own."""
        device = resolve_device(self.device)
        kept, grounded_at = folder.path / "demonstrations", folder.checkpoint("grounded")
        if folder.resumed and folder.checkpoint("imitation").exists():
            return placed(load_policy(grounded_at), device), load_demonstrations(kept)
        with clock(seconds, "collect"):
            episodes = collect(self.env, self.imitation.demonstrations, self.seed)
            save_demonstrations(episodes, kept, video="never")  # every pixel, for an exact repetition
        with clock(seconds, "grounding"):
            grounded = grounded_policy(self.env, episodes, self.new, self.grounding, self.seed, device)
            grounded.save_pretrained(grounded_at)
        return grounded, episodes

    def imitate(
        self, grounded: ImitationPolicy, episodes: Demonstrations, folder: RunFolder, seconds: dict[str, float]
    ) -> ImitationPolicy:
        """The policy that imitates; a resumed run takes its own."""
        imitation_at = folder.checkpoint("imitation")
        if folder.resumed and imitation_at.exists():
            return placed(load_policy(imitation_at), resolve_device(self.device))
        with clock(seconds, "imitation"):
            policy = copy.deepcopy(grounded)
            imitate_policy(policy, episodes, self.imitation, self.seed, folder)
            save_own(policy, imitation_at)
        return policy


def collect(env_config: EnvConfig, count: int, seed: int, num_envs: int = 64) -> Demonstrations:
    """``count`` successful demonstrations of the scripted expert."""
    env, expert = env_config.make(min(num_envs, count)), env_config.make_expert()
    seeds = list(seed_ranges.training_seeds(seed, "demonstrations")[:count])
    with bar("collect", count) as update:
        episodes = collect_demonstrations(env, expert.act, seeds, lambda done: update(done, "demonstrations"))
    env.close()
    return episodes


def validated(env: EnvConfig, policy: Policy, config: EvaluationConfig, seed: int) -> JsonObject:
    """How often ``policy`` succeeds on the validation seeds, in all and by family of tasks."""
    seeds = seed_ranges.held_out(seed_ranges.VALIDATION, config.validation)
    outcomes = play(env, policy, seeds, config, seed, "validate")
    families = {name: asdict(rate) for name, rate in outcomes.families.items()}
    return {"validation": asdict(outcomes.rate), "families": families}


def grounded_policy(
    env: EnvConfig,
    episodes: Demonstrations,
    new: NewImitator,
    config: GroundingConfig,
    seed: int,
    device: torch.device = CPU,
) -> ImitationPolicy:
    """The policy that ``new`` builds, grounded on scenes of ``env``."""
    policy = new.build(env.spec(), episodes, seed)
    policy = policy.to(device)  # type: ignore[attr-defined]  # a network
    images, tasks, uv, _ = env.draw_scenes(config.scenes, seed_ranges.training_seeds(seed, "grounding")[0])
    shown, named, where = (torch.as_tensor(item, device=device) for item in (images, tasks, uv))
    with progress("ground", config.fit.steps, "points within {pointing_error:.3f} half-widths") as report, alone():
        new.ground(
            policy,
            named,
            lambda network, prompts: ground(network, shown, prompts, where, config, generator(seed, 1), report),
        )
    return policy


class NewFlowVLA(NewImitator):
    """Base class of those of public families: small networks of random weights that learn to point before they act."""

    family: ClassVar[type[FlowVLA]]
    shape: Any
    options: VLAOptions

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> FlowVLA:
        torch.manual_seed(seed)  # module initialisation has no generator argument
        scale = self.action_scale(episodes)
        policy = self.family.new(spec, self.state_scale(episodes), self.shape, self.options, scale)
        scale_to_inputs(policy.network)  # type: ignore[arg-type]  # a module
        return policy

    def state_scale(self, episodes: Demonstrations) -> Affine:
        """How the family normalises a state."""
        return Affine.from_data(torch.as_tensor(episodes.state))

    def action_scale(self, episodes: Demonstrations) -> Affine | None:
        """And an action, None: by its bounds, which relative ones have not."""
        return self.demonstrated_scale(episodes) if any(self.options.relative) else None

    def demonstrated_scale(self, episodes: Demonstrations, smallest: float = 1e-3) -> Affine:
        """By what was demonstrated."""
        chunk = self.shape.chunk if self.shape else self.options.horizon or SMALL_CHUNK
        return demonstrated_scale(episodes, self.options.relative, chunk, smallest)

    def ground(self, policy: ImitationPolicy, tasks: Tensor, fit: Pointing) -> None:
        """The vision-language model learns to point at the named object; the expert stays as it is."""
        made: Any = policy  # of build
        prompts = self.prompts(made, tasks)
        vlm = PointingVLM(made.network, sum(item.shape[1] for item in prompts[2:]))
        vlm.requires_grad_(True)
        fit(vlm, prompts)
        made.network.train(False)

    def prompts(self, policy: Any, tasks: Tensor) -> tuple[Tensor, ...]:
        """What names the objects: tokens and mask [B,L] of ``tasks`` [B], and the normalised state [B,S] in them."""
        return policy.tokens[tasks], policy.token_mask[tasks]


@dataclass(frozen=True)
class NewSmolVLA(NewFlowVLA):
    """A SmolVLA of random weights; without a ``shape`` about two million of them."""

    family = SmolVLA
    shape: SmolVLAShape | None = None
    options: VLAOptions = field(default_factory=VLAOptions)


@dataclass(frozen=True)
class NewSmolVLAOfJoints(NewSmolVLA):
    """The same for joint positions, normalised as by ``NewTinyOfJoints``."""

    smallest_scale: float = 0.05

    def state_scale(self, episodes: Demonstrations) -> Affine:
        return Affine.from_data(torch.as_tensor(episodes.state), self.smallest_scale)

    def action_scale(self, episodes: Demonstrations) -> Affine:
        return self.demonstrated_scale(episodes, self.smallest_scale)


@dataclass(frozen=True)
class NewPi05(NewFlowVLA):
    """A pi0.5 of random weights; without a ``shape`` about two million of them.

    The state's numbers reach from -1 to 1 where demonstrations do, and a quarter beyond.
    """

    family = Pi05
    shape: Pi05Shape | None = None
    options: VLAOptions = field(default_factory=VLAOptions)

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> FlowVLA:
        policy = super().build(spec, episodes, seed)
        assert isinstance(policy, Pi05)
        policy.order_numbers()
        return policy

    def prompts(self, policy: Any, tasks: Tensor) -> tuple[Tensor, ...]:
        """With any state in them: the model is frozen when the states of robots come, so it learns to tell them now."""
        state = (2.0 * torch.rand(len(tasks), *policy.spec.state.shape) - 1.0).to(tasks.device)
        return *policy.prompt_of(tasks, state), state

    def state_scale(self, episodes: Demonstrations) -> Affine:
        return bounded_state_scale(episodes)


def bounded_state_scale(episodes: Demonstrations) -> Affine:
    """Of a model that reads states between -1 and 1 alone: demonstrations fill four fifths of that."""
    state = torch.as_tensor(episodes.state).double()
    low, high = state.amin(0), state.amax(0)
    return Affine(tuple(((low + high) / 2).tolist()), tuple((0.625 * (high - low)).clamp_min(1e-3).tolist()))


@dataclass(frozen=True)
class NewOpenVLA(NewImitator):
    """An OpenVLA-OFT of random weights; without a ``shape`` .4 million, with an L1 head and the state.

    Positions of patches and the scales of DINOv2's layers begin at .3, not at .02 and 1e-5 as for long training.
    """

    shape: OpenVLAShape | None = None
    options: OpenVLAOptions = field(default_factory=OpenVLAOptions)

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> ImitationPolicy:
        torch.manual_seed(seed)  # module initialisation has no generator argument
        state = bounded_state_scale(episodes)
        sizes = OpenVLAShape.small(picture=64, patch=8, depths=(2, 3))
        sizes = replace(sizes, state=len(state.offset), head=Regression(spec.action_dim, hidden=64))
        chosen = self.shape or sizes
        policy: Any = policy_class(chosen.head).new(spec, state, chosen, self.options)
        scale_to_inputs(policy.network)
        for name, item in policy.network.named_parameters():
            if name.endswith("pos_embed"):
                nn.init.normal_(item, std=0.3)
            elif name.endswith("scale_factor"):
                nn.init.constant_(item, 0.3)
        return cast(ImitationPolicy, policy)

    def ground(self, policy: ImitationPolicy, tasks: Tensor, fit: Pointing) -> None:
        """All of the network learns to point at the named object, but for the head."""
        made: Any = policy  # of build
        network = PointingOpenVLA(made.network, made.chunk_length * made.spec.action_dim)
        network.requires_grad_(True)
        fit(network, (made.tokens[tasks], made.token_mask[tasks]))
        for name, item in made.network.named_parameters():
            item.requires_grad_(name in made.trained_names)
        made.network.train(False)


def imitate_policy(
    policy: ImitationPolicy,
    episodes: Demonstrations | Iterator[Demonstrations],
    config: ImitationConfig,
    seed: int,
    folder: RunFolder | None = None,
) -> None:
    """Train ``policy.trainable()`` on the demonstrations, in place; the observations are encoded once.

    A policy whose features are too large for that, or are learnt themselves, names others: ``imitation_features``.
    ``episodes`` may come in blocks, which it goes through one after the other.
    """

    def encoded(block: Demonstrations) -> tuple[Chunks, None]:
        if hasattr(policy, "imitation_features"):
            features = policy.imitation_features(block.observation())
        else:
            features = encode_episodes(policy, block)
        length = getattr(policy, "chunk_length", policy.horizon)
        chunks = demonstrated_chunks(policy, block, features, length)
        return chunks.select(torch.as_tensor(block.time % config.stride == 0)), None

    blocks = _blocks(policy, episodes, config, seed, encoded)
    with progress("imitate", config.fit.steps, "loss {loss:.4f}", folder) as report, alone():
        imitate(policy, blocks, config, generator(seed, 2), report)


def imitate_from_pixels(
    policy: ImitationPolicy,
    episodes: Demonstrations | Iterator[Demonstrations],
    config: ImitationConfig,
    seed: int,
    folder: RunFolder,
) -> None:
    """Train all of ``policy`` on the demonstrations, perception included, in place; ``episodes`` as above."""

    def shown(block: Demonstrations) -> tuple[Chunks, Observation]:
        from_here = origin(getattr(policy, "relative", ()), torch.as_tensor(block.state))
        return demonstrated_chunks(policy, block, from_here, policy.horizon), block.observation()

    blocks = _blocks(policy, episodes, config, seed, shown)
    with progress("imitate", config.fit.steps, "loss {loss:.4f}", folder) as report:
        imitate(policy, blocks, config, generator(seed, 2), report)


def _blocks(
    policy: ImitationPolicy,
    episodes: Demonstrations | Iterator[Demonstrations],
    config: ImitationConfig,
    seed: int,
    made: Callable[[Demonstrations], tuple[Chunks, T]],
) -> Iterator[tuple[Chunks, T]]:
    """What is ``made`` of each block, or of all episodes once and for ever; each time anew where states are noisy."""
    noise = config.state_noise if isinstance(config, RelativeImitationConfig) else 0.0
    relative, random = getattr(policy, "relative", ()), np.random.default_rng((seed, 10))
    if noise and not any(relative):
        raise UserError(
            "state_noise moves the state that actions are relative to, and those of this policy are absolute, so it "
            "would change nothing; leave it out, or make actions relative (--vla.relative)."
        )
    if isinstance(episodes, Demonstrations):
        if not noise:
            return repeat(made(episodes))
        episodes = repeat(episodes)
    return (made(displaced(block, relative, noise, random)) for block in episodes)


def displaced(
    episodes: Demonstrations, relative: Relative, noise: float, random: np.random.Generator
) -> Demonstrations:
    """The same actions from states that are off, in entries that are ``relative``, by normal ``noise`` in their std.

    Whoever only follows what was demonstrated, relative to where it is, keeps every deviation: in demonstrations that
    hardly deviate, movements do not depend on the state.
    """
    entries = np.flatnonzero(relative)
    state = episodes.state.copy()
    off = random.standard_normal((len(state), len(entries))).astype(np.float32)
    state[:, entries] += noise * state[:, entries].std(axis=0) * off
    return replace(episodes, state=state)


def encode_episodes(policy: Policy, episodes: Demonstrations, part: int = 256) -> dict[str, Tensor]:
    """The policy's features {name: [N,...]} of all recorded observations, with its history where it has one."""
    obs, count = episodes.observation(), len(episodes.state)
    parts = [policy.encode(obs.select(slice(i, i + part))) for i in range(0, count, part)]
    return with_history(policy, {name: torch.cat([item[name] for item in parts]) for name in parts[0]}, obs.time)


@contextmanager
def progress(what: str, steps: int, remark: str, folder: RunFolder | None = None) -> Iterator[OnStep]:
    """A bar whose report tells every 25th of ``steps``, and the last one, with ``remark`` of its metrics.

    They go to ``folder``, if there is one, as those of the stage "imitation".
    """
    with bar(what, steps) as update:

        def report(step: int, info: dict[str, float]) -> None:
            if (step + 1) % 25 == 0 or step + 1 == steps:
                update(step + 1, remark.format(**info))
                if folder:
                    folder.log("imitation", step, info)

        yield report


def demonstrated_chunks(
    policy: ImitationPolicy, episodes: Demonstrations, features: Mapping[str, Tensor], length: int
) -> Chunks:
    """The ``length`` recorded actions from every step on, with the policy's ``features`` {name: [N,...]} before them.

    They are where the policy's weights are.
    """
    device, given = next(iter(policy.trainable().values())).device, (*episodes.chunks(length), episodes.task)
    actions, counts, task = (torch.as_tensor(item, device=device) for item in given)
    return demonstrated(features, normalized(policy, features, actions), counts, task)


# -- while playing: a person's corrections, the policy's own best episodes ---------------------------------------------


class ImitatingTrainer(TrainerConfig):
    """A trainer whose learner keeps what it imitates, so it learns in one process.

    ``policy`` builds what plays and learns, such as a Gaussian around an L1 head's output; None: the starting policy
    itself, a flow policy that explores by ``sampler``.
    """

    sampler: FlowSampler

    def build_env(self, context: RunContext) -> VecEnv:
        """Raises UserError for several processes that learn."""
        if context.group.size > 1:
            raise UserError(
                f"{type(self).__name__} keeps what is imitated in the process that learns, so several would learn "
                "different things; start one process, with collectors beside it."
            )
        return super().build_env(context)

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """Raises UserError for what is no flow policy, unless ``policy`` builds something of it."""
        if self.policy is not None:
            return super().build_policy(context, env)
        return context.start_flow("improvement by imitation", self.sampler, 1.0)

    def recorded(self, context: RunContext, policy: Trainable, needed_by: str) -> Chunks | None:
        """The demonstrations of ``context``, to imitate; None where ``alpha`` is 0 or there are none."""
        if not (context.demonstrations and self.algorithm.alpha):
            return None
        episodes: Demonstrations = context.episodes(needed_by).for_env(context.env.spec())
        features = {name: item.to(context.device) for name, item in encode_episodes(policy, episodes).items()}
        flow = cast(ImitationPolicy, policy)
        return demonstrated_chunks(flow, episodes, features, flow.horizon)


@dataclass(frozen=True)
class Corrected(ImitatingTrainer):
    """HG-DAgger, of a flow policy or of what ``policy`` builds; it learns in one process.

    A resumed run keeps weights and corrections and begins new episodes: those that a person watches have no snapshots.

    progress  "module:function" of an observation: how far the task has come, [E] from 0 to 1, as a person would see it
    sampler   of the policy while it collects; deployed it follows the ODE, and a little noise hardly differs
    help      by degrees instead of a take-over at every visible failure; None: take over
    """

    progress: str
    person: PersonConfig = field(default_factory=PersonConfig)
    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=12))
    sampler: FlowSampler = FlowSampler(FlowSde(0.1), LastStep(), 4)
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(iterations=30, validate_every=10))
    algorithm: HGDaggerConfig = field(default_factory=HGDaggerConfig)
    help: Escalation | None = None
    policy: PolicyConfig | None = None

    def build_env(self, context: RunContext) -> VecEnv:
        """Raises UserError for an environment without a scripted expert, and for several processes that learn."""
        if not isinstance(context.env, EnvConfig):
            raise UserError(
                f"{type(context.env).__name__} has no scripted expert, so nobody can correct the policy; train in an "
                "environment of the catalogue."
            )
        progress: Callable[[Observation], np.ndarray] = load(self.progress)
        env, expert = super().build_env(context), context.env.make_expert().act
        if self.help is not None:
            return HelpedEnv(env, expert, progress, self.person, self.help)
        return SupervisedEnv(env, expert, progress, self.person)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """Demonstrations, if there are any (``--demonstrations``), are imitated beside the corrections."""
        shown = self.recorded(context, policy, "HG-DAgger")
        return HGDagger(policy, policy.trainable(), shown, self.algorithm, generator(context.seed, 4))


@dataclass(frozen=True)
class SelfImitated(ImitatingTrainer):
    """Self-imitation, of a flow policy or of what ``policy`` builds; it learns in one process.

    experience  long windows: only episodes that begin and end within one count
    sampler     of the policy while it collects; deployed it follows the ODE, and a little noise hardly differs
    future      of the states that the policy's backbone learns to foresee; None: the backbone stays frozen
    """

    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=40))
    sampler: FlowSampler = FlowSampler(FlowSde(0.02), LastStep(), 4)
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(iterations=24, validate_every=8, collapse=math.inf))
    algorithm: SelfImitationConfig = field(default_factory=SelfImitationConfig)
    future: FutureStatesConfig | None = None
    policy: PolicyConfig | None = None

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """And raises UserError where a backbone is to foresee states that cannot learn."""
        policy = super().build_policy(context, env)
        if self.future is not None:
            require_learning_backbone(policy)
            cast(Any, policy).with_trained_backbone()
        return policy

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        """Demonstrations, where ``alpha`` is above 0 and there are any, are imitated beside the successes."""
        shown = self.recorded(context, policy, "self-imitation")
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        head = FutureStates(policy.feature_sizes, self.future).to(context.device) if self.future else None
        noise = generator(context.seed, 4)
        return SelfImitation(policy, policy.trainable(), shown, self.algorithm, noise, future=head)
