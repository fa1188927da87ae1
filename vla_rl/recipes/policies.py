"""The policies that are trained: the starting policy itself, a new one, or a head on top of a frozen one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vla_rl.contract.errors import UserError
from vla_rl.contract.foreign import check_policy_quickly, is_foreign
from vla_rl.contract.load import load
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.diffusion import DiffusionConfig, DiffusionPolicy
from vla_rl.policies.feed_forward import GaussianPolicy, SquashedConfig, SquashedPolicy
from vla_rl.policies.flow_policy import at_temperature
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.latent_noise import GaussianLatent, LatentConfig, SquashedLatent, SquashedLatentConfig
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual, ResidualConfig
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.context import RunContext, Trainable, generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import imitate_policy
from vla_rl.serving.access import names_server
from vla_rl.training.imitation import ImitationConfig

if TYPE_CHECKING:
    from vla_rl.serving.remote import RemotePolicy


def start_policy(
    name: str | Path, env_config: EnvConfig, seed: int, options: VLAOptions | None = None
) -> Trainable | None:
    """The policy that a run in ``env_config`` starts from; None for "".

    ``name`` is a checkpoint folder, of whichever class; a run folder (its best checkpoint); a public folder, opened by
    ``options``; or ``module:Class``: a new policy ``Class(spec)``.
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


def check_if_foreign(policy: Policy, env_config: EnvConfig, seed: int, needs: Sequence[str]) -> None:
    """Raise ContractError when ``policy`` is somebody else's and breaks the contract or lacks one of ``needs``."""
    if is_foreign(policy):
        with closing(env_config.make(2)) as env:
            check_policy_quickly(policy, env, generator(seed, 0), needs)


def remote_policy(address: str, spec: EnvSpec) -> RemotePolicy:
    """The policy behind ``address``; raises UserError when nobody answers there."""
    from vla_rl.serving.remote import RemotePolicy  # needs the extra "serve"

    return RemotePolicy(spec, address)


def names_class(name: str | Path) -> bool:
    """Whether ``name`` is a "module:Class" and no folder."""
    return ":" in str(name) and not Path(name).is_dir()


def new_policy(target: str, spec: EnvSpec, options: Mapping[str, object], seed: int) -> Trainable:
    """The untrained policy that ``target``, "module:Class", makes for ``spec``."""
    torch.manual_seed(seed)  # module initialisation has no generator argument
    policy: Trainable = call(target, spec, **options)
    return policy


@dataclass(frozen=True)
class StartFrom:
    """The policy that the run starts from (``--policy``) is itself trained, in place."""

    def build(self, context: RunContext) -> Trainable:
        return context.start("this run")


@dataclass(frozen=True)
class NewPolicy:
    """A new policy of any class: ``target``, "module:Class", called with the environment's spec and ``options``."""

    target: str
    options: Mapping[str, object] = field(default_factory=dict)

    def build(self, context: RunContext) -> Trainable:
        return new_policy(self.target, context.env.spec(), self.options, context.seed)


@dataclass(frozen=True)
class TD3Residual:
    """A deterministic correction at every step, for off-policy algorithms.

    ``function``, "module:function" of an observation, is the base instead of the starting policy if given; the
    residual still reads the features of the starting policy.  ``temperature``: of the noise that a flow policy below it
    starts from, here and deployed (``FlowSampler.temperature``); None: as its checkpoint says.
    """

    residual: ResidualConfig = ResidualConfig()
    function: str = ""
    temperature: float | None = None

    def build(self, context: RunContext) -> DeterministicResidual:
        encoder = context.start("a residual policy")
        at_temperature(encoder, self.temperature, "--rl.policy.temperature")
        if not self.function:
            return DeterministicResidual(encoder, config=self.residual)
        base = FunctionPolicy(encoder.spec, load(self.function), self.function)
        return DeterministicResidual(base, encoder, self.residual)


@dataclass(frozen=True)
class PPOResidual:
    """A Gaussian correction at every step, for on-policy algorithms."""

    residual: ResidualConfig = ResidualConfig()

    def build(self, context: RunContext) -> GaussianResidual:
        return GaussianResidual(context.start("a residual policy"), config=self.residual)


@dataclass(frozen=True)
class Diffusion:
    """A diffusion policy that imitates the demonstrations, given the features of the starting policy."""

    diffusion: DiffusionConfig = DiffusionConfig()
    imitation: ImitationConfig = field(default_factory=ImitationConfig)

    def build(self, context: RunContext) -> DiffusionPolicy:
        episodes = context.episodes("a diffusion policy that imitates first")
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
