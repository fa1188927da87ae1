"""Where recipes name classes of ``world_models`` themselves: imported when they are used, and typed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from world_models.canvas import Canvas as Canvas
    from world_models.config import ImaginationConfig as ImaginationConfig
    from world_models.config import Limits as Limits
    from world_models.config import PredictedReward as PredictedReward
    from world_models.config import WorldModelConfig as WorldModelConfig
    from world_models.env import ImaginedEnv as ImaginedEnv
    from world_models.env import imagined_spec as imagined_spec
    from world_models.initial_states import InitialStatePool as InitialStatePool
    from world_models.initial_states import InitialStates as InitialStates
    from world_models.initial_states import KeyframeConfig as KeyframeConfig
    from world_models.initial_states import OrderedPool as OrderedPool
    from world_models.initial_states import Pool as Pool
    from world_models.initial_states import mine as mine
    from world_models.model import WorldModel as WorldModel
    from world_models.replay import ReplayResult as ReplayResult
    from world_models.replay import endless_rollouts as endless_rollouts
    from world_models.replay import replay as replay
    from world_models.types import Context as Context

_MODULES = ("types", "canvas", "config", "initial_states", "model", "env", "replay")  # in the order of their imports

if not TYPE_CHECKING:

    def __getattr__(name):
        for module in _MODULES:
            if hasattr(found := importlib.import_module(f"world_models.{module}"), name):
                return getattr(found, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
