"""Where recipes name classes of ``world_models`` themselves: imported when they are needed, and typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.contract.env import EnvSpec

if TYPE_CHECKING:
    from world_models.canvas import Canvas as Canvas
    from world_models.config import WorldModelConfig as WorldModelConfig
    from world_models.env import ImaginedEnv as ImaginedEnv
    from world_models.imagination_config import ImaginationConfig as ImaginationConfig
    from world_models.initial_states import InitialStatePool as InitialStatePool
    from world_models.initial_states import InitialStates as InitialStates
    from world_models.initial_states import OrderedPool as OrderedPool
    from world_models.initial_states import Pool as Pool
    from world_models.keyframes import KeyframeConfig as KeyframeConfig
    from world_models.keyframes import Keyframes as Keyframes
    from world_models.model import WorldModel as WorldModel
    from world_models.payment import PredictedReward as PredictedReward
    from world_models.replay import ReplayResult as ReplayResult
    from world_models.types import Context as Context
    from world_models.uncertainty import Limits as Limits


def new_model(spec: EnvSpec, config: WorldModelConfig, statistics: tuple[np.ndarray, np.ndarray]) -> WorldModel:
    """An untrained world model; ``statistics``: mean and standard deviation [S] of the recorded states."""
    from world_models.model import WorldModel

    return WorldModel(spec, config, *statistics)


def canvas(spec: EnvSpec, config: WorldModelConfig) -> Canvas:
    """The size that a new model predicts the cameras of ``spec`` at; see ``world_models.canvas.Canvas.of``."""
    from world_models.canvas import Canvas

    return Canvas.of(spec, config.resolution, config.backbone.multiple)


def context_class() -> type[Context]:
    """``world_models.types.Context``."""
    from world_models.types import Context

    return Context


def imagined_spec(model: WorldModel, config: ImaginationConfig) -> EnvSpec:
    """The spec of :func:`make_env`, without an environment."""
    from world_models.env import imagined_spec

    return imagined_spec(model, config)


def make_env(
    model: WorldModel, initial_states: Pool, num_envs: int, limits: Limits | None, config: ImaginationConfig
) -> ImaginedEnv:
    """``num_envs`` imagined environments."""
    from world_models.env import ImaginedEnv

    return ImaginedEnv(model, initial_states, num_envs, limits, config)


def replay(
    model: WorldModel,
    initial_states: InitialStates,
    actions: Sequence[np.ndarray],
    config: ImaginationConfig,
    progress: Callable[[int], None],
) -> ReplayResult:
    """See ``world_models.replay.replay``."""
    from world_models.replay import replay

    return replay(model, initial_states, actions, config, progress)


def endless_rollouts(config: ImaginationConfig, horizon: int) -> ImaginationConfig:
    """See ``world_models.replay.endless_rollouts``."""
    from world_models.replay import endless_rollouts

    return endless_rollouts(config, horizon)


def predicted_reward() -> PredictedReward:
    """See ``world_models.payment.PredictedReward``."""
    from world_models.payment import PredictedReward

    return PredictedReward()


def initial_states(pictures: np.ndarray, state: np.ndarray, task: np.ndarray, time: np.ndarray) -> InitialStates:
    """See ``world_models.initial_states.InitialStates``."""
    from world_models.initial_states import InitialStates

    return InitialStates(pictures, state, task, time)


def ordered_pool(moments: InitialStates) -> OrderedPool:
    """Seed ``i`` begins at moment ``i``."""
    from world_models.initial_states import OrderedPool

    return OrderedPool(moments)


def initial_state_pool(first: InitialStates, keyframes: InitialStates) -> InitialStatePool:
    """First moments of episodes, and keyframes."""
    from world_models.initial_states import InitialStatePool

    return InitialStatePool(first, keyframes)


def mine_keyframes(
    action: np.ndarray,
    action_range: np.ndarray,
    value: np.ndarray,
    success: np.ndarray,
    spans: Sequence[tuple[int, int]],
    config: KeyframeConfig,
) -> Keyframes:
    """See ``world_models.keyframes.mine``."""
    from world_models.keyframes import mine

    return mine(action, action_range, value, success, spans, config)


def limits(values: Sequence[float]) -> Limits:
    """Limits of uncertainty by depth."""
    from world_models.uncertainty import Limits

    return Limits(tuple(values))


def calibrate_limits(uncertainties: Sequence[np.ndarray], quantile: float) -> Limits:
    """See ``world_models.uncertainty.Limits.calibrate``."""
    from world_models.uncertainty import Limits

    return Limits.calibrate(uncertainties, quantile)
