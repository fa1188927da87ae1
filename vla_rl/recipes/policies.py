"""The policies that are trained: the starting policy itself, a new one, or a head on top of a frozen one."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vla_rl.contract.check import check_policy, check_policy_methods, is_user_defined
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.hub import LEROBOT, names_lerobot
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.experience.collect import ExpertPolicy
from vla_rl.policies.diffusion import DiffusionConfig, DiffusionPolicy
from vla_rl.policies.feed_forward import GaussianPolicy, SquashedConfig, SquashedPolicy
from vla_rl.policies.flow_policy import at_temperature
from vla_rl.policies.function import FunctionPolicy, Renumbered
from vla_rl.policies.gaussian_around import AroundConfig, GaussianAround
from vla_rl.policies.latent_noise import GaussianLatent, LatentConfig, SquashedLatent, SquashedLatentConfig
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual, ResidualConfig
from vla_rl.policies.vla.checkpoint import is_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.saving import fingerprint as base_fingerprint
from vla_rl.pretrained import checkpoint_of
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.imitate import imitate_policy
from vla_rl.recipes.trainers import RunContext, Trainable, generator, placed
from vla_rl.serving.access import names_server
from vla_rl.training.device import resolve_device
from vla_rl.training.fit import ImitationConfig

if TYPE_CHECKING:
    from vla_rl.serving.remote import RemotePolicy


TRAINED = ("save_pretrained", "trainable", "feature_sizes")  # what a policy needs to be trained


def start_policy(
    name: str | Path, env_config: EnvConfig, seed: int, options: VLAOptions | None = None
) -> Trainable | None:
    """The policy that a run in ``env_config`` starts from; None for "".

    ``name`` is a checkpoint folder, of whichever class; a run folder (its best checkpoint); a public folder, opened by
    ``options``; ``lerobot:FOLDER``, which LeRobot runs; or ``module:Class``: a new policy ``Class(spec)``.
    Raises UserError or ContractError when it does not exist, is a policy server, was trained for another environment,
    or is somebody else's and breaks the contract.
    """
    if not str(name):
        return None
    spec = env_config.spec()
    if names_server(name):
        raise UserError(
            f"the policy behind {str(name)!r} has no weights here, so it cannot be trained; evaluate it, or let a "
            "residual of your own config correct it (vla_rl/serving/remote.py)."
        )
    policy: Trainable
    policy = new_policy(str(name), spec, {}, seed) if names_class(name) else load_policy(name, spec, options)
    check_if_foreign(policy, env_config, seed, ("save_pretrained",))
    return policy


def check_if_foreign(policy: Policy, env_factory: EnvFactory, seed: int, needs: Sequence[str] = TRAINED) -> None:
    """Raise ContractError when ``policy`` is somebody else's and breaks the contract or lacks one of ``needs``."""
    if is_user_defined(policy):
        with closing(env_factory.make(2)) as env:
            check_policy_methods(policy, needs)
            check_policy(policy, env, generator(seed, 0))


def remote_policy(address: str, spec: EnvSpec) -> RemotePolicy:
    """The policy behind ``address``; raises UserError when nobody answers there."""
    from vla_rl.serving.remote import RemotePolicy  # needs the extra "serve"

    return RemotePolicy(spec, address)


def names_class(name: str | Path) -> bool:
    """Whether ``name`` is a "module:Class" and no folder."""
    return ":" in str(name) and not (names_lerobot(name) or Path(name).is_dir())


def new_policy(target: str, spec: EnvSpec, options: Mapping[str, object], seed: int) -> Trainable:
    """The untrained policy that ``target``, "module:Class", makes for ``spec``."""
    torch.manual_seed(seed)  # module initialisation has no generator argument
    return call(target, spec, **options)


@dataclass(frozen=True)
class StartFrom:
    """The policy that the run starts from (``--policy``) is itself trained, in place."""

    def build(self, context: RunContext) -> Trainable:
        return context.start("this run")


@dataclass(frozen=True)
class TD3Residual:
    """A deterministic correction at every step, for off-policy algorithms.

    ``function``, "module:function" of an observation, is the base instead of the starting policy if given; the
    residual still reads the features of the starting policy.  ``encoder`` is the checkpoint of a policy whose features
    it reads instead, such as those of pictures that a policy of LeRobot keeps to itself.  ``temperature``: of the noise
    that a flow policy below it starts from, here and deployed (``FlowSampler.temperature``); None: as its checkpoint
    says.
    """

    residual: ResidualConfig = ResidualConfig()
    function: str = ""
    temperature: float | None = None
    encoder: str = ""

    def build(self, context: RunContext) -> DeterministicResidual:
        start = context.start("a residual policy")
        at_temperature(start, self.temperature, "--rl.policy.temperature")
        encoder = load_policy(self.encoder, start.spec) if self.encoder else None
        if not self.function:
            return DeterministicResidual(start, encoder, self.residual)
        base = FunctionPolicy(start.spec, load(self.function), self.function)
        return DeterministicResidual(base, encoder or start, self.residual)


@dataclass(frozen=True)
class PPOResidual:
    """A Gaussian correction at every step, for on-policy algorithms; ``encoder`` as for :class:`TD3Residual`."""

    residual: ResidualConfig = ResidualConfig()
    encoder: str = ""

    def build(self, context: RunContext) -> GaussianResidual:
        start = context.start("a residual policy")
        encoder = load_policy(self.encoder, start.spec) if self.encoder else None
        return GaussianResidual(start, encoder, self.residual)


@dataclass(frozen=True)
class GaussianOutput:
    """A Gaussian around the output of the starting policy, which has no density: that of an L1 regression head.

    All of the starting policy that it trains itself is trained.  One that is such a Gaussian already goes on as it is.
    """

    gaussian: AroundConfig = AroundConfig()

    def build(self, context: RunContext) -> GaussianAround:
        base: Any = context.start("a Gaussian around a policy's output")
        return base if isinstance(base, GaussianAround) else GaussianAround(base, self.gaussian)


@dataclass(frozen=True)
class Diffusion:
    """A diffusion policy that imitates the demonstrations, given the features of the starting policy."""

    diffusion: DiffusionConfig = DiffusionConfig()
    imitation: ImitationConfig = field(default_factory=ImitationConfig)

    def build(self, context: RunContext) -> DiffusionPolicy:
        episodes = context.episodes("a diffusion policy that imitates first").for_env(context.env.spec())
        torch.manual_seed(context.seed)
        policy = DiffusionPolicy(context.start("a diffusion policy"), self.diffusion)
        imitate_policy(policy, episodes, self.imitation, context.seed)
        return policy


@dataclass(frozen=True)
class SquashedActor:
    """A new squashed Gaussian for SAC and RLPD: it reads the features of the starting policy, not its actions.

    Without a starting policy it reads the state alone, and so do its critics.
    """

    squashed: SquashedConfig = SquashedConfig()

    def build(self, context: RunContext) -> SquashedPolicy:
        """Raises UserError where actions are discrete."""
        if (spec := context.base.spec if context.base else context.env.spec()).discrete:
            raise UserError(
                f"a squashed Gaussian policy chooses continuous actions and those of {spec.name!r} are discrete, so it "
                "cannot act there; choose PPO (vla-rl train gym.py:task)."
            )
        return SquashedPolicy(context.base or _reads_state(spec), self.squashed)


def _reads_state(spec: EnvSpec) -> GaussianPolicy:
    """An encoder of the state as it is: heads and critics standardise what they read themselves."""
    size = spec.state.shape[0]
    return GaussianPolicy(spec, Affine((0.0,) * size, (1.0,) * size))


@dataclass(frozen=True)
class SACLatent:
    """The noise that the flow starts from, within bounds, for off-policy algorithms (DSRL)."""

    latent: SquashedLatentConfig = SquashedLatentConfig()

    def build(self, context: RunContext) -> SquashedLatent:
        return SquashedLatent(context.start("latent-noise RL"), self.latent)  # type: ignore[arg-type]  # a flow


@dataclass(frozen=True)
class PPOLatent:
    """The noise that the flow starts from, Gaussian, for on-policy algorithms; GoRL refits the flow as well."""

    latent: LatentConfig = LatentConfig()

    def build(self, context: RunContext) -> GaussianLatent:
        return GaussianLatent(context.start("latent-noise RL"), self.latent)  # type: ignore[arg-type]  # a flow


def call(target: str, *args: object, **options: object) -> Any:
    """What ``target`` returns; raises UserError when it is not there or does not take these arguments."""
    function = load(target)
    if not callable(function):
        raise UserError(f"{target!r} is a {type(function).__name__}, so it cannot be called; name a class or function.")
    try:
        inspect.signature(function).bind(*args, **options)
    except TypeError as error:
        given = ", ".join([*(type(item).__name__ for item in args), *(f"{key}=..." for key in options)])
        raise UserError(
            f"{target!r} does not take ({given}): {error}; correct the options, or its signature "
            f"{inspect.signature(function)}."
        ) from error
    except ValueError:  # built-in callables have no signature
        pass
    return function(*args, **options)


EXPERT = "expert"


def deployed_policy(
    name: str, env: EnvConfig, device: str = "cpu", seed: int = 0, options: VLAOptions | None = None
) -> Policy:
    """The policy that ``name`` means in ``env``, with its weights on ``device`` (see ``resolve_device``).

    ``name`` is a checkpoint folder; a public folder, opened by ``options``; ``lerobot:FOLDER``, which LeRobot runs; a
    run folder (its best checkpoint);
    "module:Class", called with the environment's spec after torch was seeded with ``seed``; "expert", the task's
    scripted expert; or the address of a policy server (``vla_rl/serving/access.py``).  Raises UserError when it or the
    device does not exist, and ContractError when it does not fit the environment.
    """
    if name == EXPERT:
        return ExpertPolicy(env.make_expert().act, horizon=1)
    spec = env.spec()
    if names_server(name):
        return remote_policy(name, spec)
    where = resolve_device(device)
    policy: Policy
    if names_class(name):
        policy = placed(new_policy(name, spec, {}, seed), where)
    elif names_lerobot(name) or is_public(Path(name)):
        policy = placed(load_policy(name, spec, options), where)
    else:
        policy = _checkpoint(Path(name), spec, where)
    check_if_foreign(policy, env, seed, needs=())
    return policy


@contextmanager
def deployed(
    name: str, env: EnvConfig, device: str = "cpu", seed: int = 0, options: VLAOptions | None = None
) -> Iterator[Policy]:
    """:func:`deployed_policy` for a block, after which the connections of one behind a server are closed."""
    policy = deployed_policy(name, env, device, seed, options)
    try:
        yield policy
    finally:
        if hasattr(policy, "close"):
            policy.close()


def check_instructions(name: str, tasks: Mapping[str, EnvConfig]) -> None:
    """Raise UserError when the checkpoint that ``name`` means cannot read the instructions of one of ``tasks``.

    ``tasks`` {name: environment}.  Environments that would have to be built for it are checked when they are played.
    """
    elsewhere = name == EXPERT or names_server(name) or names_class(name) or names_lerobot(name)
    if elsewhere or is_public(Path(name)):
        return  # a public one reads any instruction
    saved = read_config(Path(name)).get("spec")
    specs = {task: env.declared_spec() for task, env in tasks.items()} if isinstance(saved, dict) else {}
    readable = {task: spec is None or _reads(EnvSpec.from_json(saved or {}), spec) for task, spec in specs.items()}
    if not all(readable.values()):
        others = [task for task, fits in readable.items() if not fits]
        fitting = [task for task, fits in readable.items() if fits]
        cure = f"choose from its own: --tasks {' '.join(fitting)}" if fitting else "evaluate it on its own tasks"
        raise UserError(
            f"{name!r} was not trained for the instructions of {', '.join(others)}, so it cannot play them; {cure}."
        )


def _reads(trained: EnvSpec, spec: EnvSpec) -> bool:
    """Whether a policy for ``trained`` knows the instructions of ``spec``, whose table may have grown."""
    return spec.tasks[: len(trained.tasks)] == trained.tasks or set(spec.tasks) <= set(trained.tasks)


def fingerprint(name: str) -> str:
    """SHA-256 of the files of the checkpoint that ``name`` means; "" for what is no folder."""
    name = name.removeprefix(LEROBOT)
    if not Path(name).is_dir():
        return ""
    if is_public(Path(name)):
        return base_fingerprint(Path(name))  # all bytes of 14 GB would take minutes
    digest, folder = hashlib.sha256(), checkpoint_of(name)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _checkpoint(folder: Path, spec: EnvSpec, device: torch.device) -> Policy:
    """The policy in ``folder``; its own task table is used where it holds the environment's instructions."""
    saved = read_config(folder).get("spec")
    trained = EnvSpec.from_json(saved) if isinstance(saved, dict) else spec
    if spec.tasks[: len(trained.tasks)] == trained.tasks or not set(spec.tasks) <= set(trained.tasks):
        return placed(load_policy(folder, spec), device)
    policy = placed(load_policy(folder, replace(spec, tasks=trained.tasks, families=trained.families)), device)
    return Renumbered(policy, [trained.tasks.index(text) for text in spec.tasks])
