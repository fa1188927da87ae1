"""Fixtures for tests of commands and recipes: a quick config, an untrained checkpoint, and a refused command."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from sims.catalog import make
from vla_rl.cli import main
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary


@pytest.fixture
def quick() -> str:
    return f"{Path(__file__).parent / 'recipes' / 'quick.py'}:improve"


@pytest.fixture
def untrained(tmp_path):
    """``untrained(**options)`` saves a policy for lift with these options and returns its folder."""
    return partial(save_untrained, tmp_path / "untrained")


def save_untrained(folder: Path, n_obs_steps: int = 1, **options) -> Path:
    """Save a small policy for lift with these options in ``folder``."""
    env = make("lift", num_envs=1, **options)
    torch.manual_seed(0)
    sampler = FlowSampler(FlowSde(0.5), LastStep(), 4)
    config = TinyConfig(width=32, blocks=1, sampler=sampler, n_obs_steps=n_obs_steps)
    spec = env.spec
    env.close()
    policy = TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), config)
    policy.save_pretrained(folder)
    return folder


@pytest.fixture
def complaint(capsys):
    """``complaint(*arguments)`` runs ``vla-rl`` and returns the one sentence with which it refuses."""

    def run(*arguments, status: int = 2) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert stop.value.code == status
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("vla-rl: ") and (said.endswith((".", "?")) or "go on with: vla-rl" in said)
        return said

    return run
