"""Configs check their numbers at once, before anything runs."""

from __future__ import annotations

import math

import pytest

from vla_rl.cli.override import override
from vla_rl.cli.train import Collect
from vla_rl.contract.errors import UserError
from vla_rl.policies.diffusion import DiffusionConfig
from vla_rl.policies.feed_forward import ActorConfig, CategoricalConfig, GaussianConfig
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.latent_noise import SquashedLatentConfig
from vla_rl.policies.residual import ResidualConfig
from vla_rl.policies.tiny import TinyConfig
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.train_rewards import TrainSuccess
from vla_rl.recipes.trainers import AdaptiveReplay, CriticConfig, ReplayConfig
from vla_rl.training.fit import FitConfig

BAD = [
    *((EvaluationConfig, name, 0) for name in ("validation", "test", "num_envs")),
    (EvaluationConfig, "test", 10**12),
    (EvaluationConfig, "ablation", -1),
    *((ReplayConfig, name, 0) for name in ("capacity", "n_step")),
    (ReplayConfig, "gamma", 1.5),
    (ReplayConfig, "share", math.nan),
    (AdaptiveReplay, "max_age", -1),
    (ImitateDataset, "image_size", -1),
    *((kind, "width", 0) for kind in (ActorConfig, GaussianConfig, CategoricalConfig, TinyConfig, DiffusionConfig)),
    *((kind, "depth", -1) for kind in (ActorConfig, GaussianConfig, CategoricalConfig, HeadConfig)),
    *((kind, "std", math.nan) for kind in (ActorConfig, GaussianConfig, SquashedLatentConfig)),
    (HeadConfig, "width", 1_000_000),
    (CriticConfig, "depth", 100_000),
    (GaussianConfig, "horizon", 10_000_000),
    (CriticConfig, "width", 0),
    (SquashedLatentConfig, "magnitude", 0),
    (ResidualConfig, "scale", 0),
    (ResidualConfig, "correlation", 1.5),
    (Collect, "count", 0),
    (TrainSuccess, "training", 0),
    (TrainSuccess, "precision", 1.5),
    *((FitConfig, name, 0) for name in ("steps", "batch")),
    *((FitConfig, name, -1) for name in ("lr", "warmup")),
    (FitConfig, "grad_norm", math.nan),
]


@pytest.mark.parametrize(("kind", "name", "value"), BAD, ids=lambda item: getattr(item, "__name__", str(item)))
def test_a_number_without_a_meaning_is_refused(kind, name, value):
    with pytest.raises(UserError, match=rf"{kind.__name__}.{name} is {value}, which has no meaning"):
        kind(**{name: value})


@pytest.mark.parametrize("given", ["--evaluation.test 0", "--rl.loop.iterations -3", "--rl.final-noise -1"])
def test_a_command_refuses_them_before_anything_runs(given, complaint, tmp_path):
    assert "which has no meaning" in complaint("train", "demo.py:last_step", *given.split(), "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_numbers_at_their_limits_are_fine():
    ReplayConfig(gamma=1.0, share=0.0, n_step=1)
    assert override(load_config("demo.py:last_step"), ["--evaluation.test", "1"], "test").evaluation.test == 1
