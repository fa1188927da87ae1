"""The memory of a config's run: which policy it starts from, in its shapes alone."""

from __future__ import annotations

from typing import cast

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.context import StartPolicy
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.imitate_dataset import NewPolicyConfig
from vla_rl.recipes.imitation import ImitatingPolicy
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.memory import MemoryEstimate, estimate
from vla_rl.recipes.policies import names_class, new_policy


def memory_of(config: object) -> MemoryEstimate:
    """The memory of the reinforcement learning of ``config``, an ``Improve`` or ``Demo``.

    Raises UserError for another config, and when a part of the run cannot be built without values.
    """
    if not isinstance(config, Improve | Demo):
        raise UserError(
            f"a {type(config).__name__} does more than improve a policy, so its memory is not known beforehand; "
            "inspect a config of Improve with the same numbers."
        )
    improve = config if isinstance(config, Improve) else Improve(config.rl, "", env=config.env)

    def start(spec: EnvSpec) -> StartPolicy | None:
        return cast(StartPolicy, untrained(config.new, spec)) if isinstance(config, Demo) else _start(improve, spec)

    try:
        return estimate(
            config.rl, config.env, config.evaluation, start, improve.demonstrations, config.seed, config.device
        )
    except (RuntimeError, TypeError) as error:  # what torch raises where a tensor has no memory
        raise UserError(
            f"a part of the run needs values where only shapes are there ({str(error).splitlines()[0]}), so its memory "
            "is not known beforehand; watch a short run instead (--rl.loop.iterations 3)."
        ) from error


def _start(config: Improve, spec: EnvSpec) -> StartPolicy | None:
    """The starting policy, of whose weights the headers are read."""
    if not config.policy:
        return None
    if names_class(config.policy):
        return new_policy(config.policy, spec, {}, config.seed)
    return cast(StartPolicy, load_policy(config.policy, spec))


def untrained(new: NewPolicyConfig, spec: EnvSpec) -> ImitatingPolicy:
    """The policy that ``new`` makes, for its sizes."""
    state, action = (np.zeros((2, size), np.float32) for size in (spec.state.shape[0], spec.action_dim))
    none = np.zeros(2, np.int64)
    images = {name: np.zeros((2, *item.shape), np.uint8) for name, item in spec.images.items()}
    return new.build(spec, Demonstrations(images, state, none, none, action, none, none, spec.tasks, 1.0), 0)
