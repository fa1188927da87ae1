"""Every metric that a run logs is explained on its algorithm's page, and no page explains what nothing logs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.docs.conftest import ROOT
from tests.fingerprints import imagined, shrunk
from vla_rl.algorithms.guard import FallbackConfig, ReleaseConfig
from vla_rl.algorithms.offline import CalQLConfig, IQLConfig
from vla_rl.algorithms.policy_gradient import PolicyGradientConfig
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.recipe import run

# What makes the metrics that are not in every run, on top of the config that its page names.
_Change = Callable[[Any], Any]
_OFFLINE = {"num_critics": 2, "utd_ratio": 0.1, "learning_starts": 20, "batch": 16}
RUNS: dict[str, tuple[tuple[str, _Change], ...]] = {
    "ppo": (("demo.py:last_step", lambda config: config),),
    "grpo": (("compare.py:grpo", lambda config: paid(config)), ("demo.py:rloo", lambda config: paid(config))),
    "dppo": (("compare.py:dppo", lambda config: config),),
    "residual": (
        ("compare.py:residual_td3", lambda config: algorithm(config, penalty=0.1, fallback=FallbackConfig(1))),
        ("compare.py:residual_td3", lambda config: algorithm(config, release=ReleaseConfig())),
        ("compare.py:residual_ppo", lambda config: config),
    ),
    "sac": (("compare.py:rlpd", lambda config: config),),
    "offline": (
        ("compare.py:wsrl", lambda config: config),
        ("compare.py:wsrl", lambda config: learning(config, IQLConfig(**_OFFLINE))),
        ("compare.py:wsrl", lambda config: learning(config, CalQLConfig(**_OFFLINE))),
    ),
    "dsrl": (("compare.py:dsrl", lambda config: config), ("compare.py:dsrl_na", lambda config: config)),
    "corrections": (("tabletop.py:corrected", lambda config: config),),
    "gorl": (("compare.py:gorl", lambda config: algorithm(config, iterations=2, stages=3)),),
}
_EVERY_LINE = {"stage", "step", "elapsed_s"}
FAMILIES = {"rollout/episodes/FAMILY", "rollout/successes/FAMILY", "eval/FAMILY"}
# Where sources are ahead.
BESIDE = {f"collector/{name}_s" for name in ("env", "encode", "act", "sync", "wait")} | {
    "source/waiting",
    "source/restarts",
}
SHARED = {"rollout/shared"}  # where runs share their rollouts


def algorithm(config: Any, **numbers: Any) -> Any:
    return learning(config, replace(config.rl.algorithm, **numbers))


def learning(config: Any, algorithm: Any) -> Any:
    return replace(config, rl=replace(config.rl, algorithm=algorithm))


def paid(config: Any) -> Any:
    """The reward is progress, because all groups of a policy that never succeeds would be uniform and teach nothing."""
    few = replace(config.rl.experience, groups=4, size=2, ahead=1, limit=8)
    config = replace(config, rl=replace(config.rl, experience=few))
    return replace(config, env=replace(config.env, name="docs.examples.height_reward:make"))


@cache
def explained(page: str) -> frozenset[str]:
    """The metrics in the tables of an algorithm's page."""
    text = (ROOT / f"docs/algorithms/{page}.md").read_text(encoding="utf-8")
    return frozenset(" ".join(re.findall(r"<!-- metrics:([^>]*)-->", text)).split())


@pytest.fixture(scope="module")
def imitation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a barely trained policy."""
    folder = tmp_path_factory.mktemp("imitation")
    recipe, small = shrunk(load_config("compare.py:imitate_lift")), shrunk(load_config("demo.py:small"))
    fit = replace(recipe.imitation.fit, steps=30, batch=8)
    recipe = replace(
        recipe,
        new=small.new,
        grounding=replace(small.grounding, scenes=64, fit=replace(small.grounding.fit, steps=5)),
        imitation=replace(recipe.imitation, demonstrations=4, fit=fit),
    )
    run(recipe, str(folder))
    return folder


def logged(folder: Path, stage: str) -> set[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {name for line in lines if line["stage"] == stage for name in line} - _EVERY_LINE


@pytest.mark.full
@pytest.mark.parametrize("page", RUNS)
def test_a_page_explains_what_its_algorithm_logs_and_nothing_else(page, imitation, tmp_path):
    found: set[str] = set()
    for number, (name, change) in enumerate(RUNS[page]):
        config = change(shrunk(load_config(name)))
        loop = replace(config.rl.loop, env_steps=900, validate_steps=0, validate_every=100, save_every=100)
        experience = replace(config.rl.experience, num_envs=8)
        evaluation = replace(config.evaluation, validation=2, test=2, num_envs=2)
        config = replace(config, evaluation=evaluation)
        ahead = isinstance(config.rl.algorithm, PolicyGradientConfig)
        if ahead:
            loop = replace(loop, staleness=1)  # decisions of an older policy
        paths = {
            "policy": str(imitation / "checkpoints" / "imitation"),
            "demonstrations": str(imitation / "demonstrations"),
        }
        run(replace(config, rl=replace(config.rl, loop=loop, experience=experience), **paths), f"{tmp_path}/{number}")
        names = logged(tmp_path / str(number), "rl")
        assert names & BESIDE == (BESIDE if ahead else set())
        found |= names - BESIDE
    documented = (explained(page) | explained("index")) - FAMILIES - BESIDE - SHARED
    assert sorted(found - documented) == [], "not explained"
    assert sorted(documented - found) == [], "explained but not logged"


def test_the_page_on_imitation_explains_what_is_logged(imitation):
    assert logged(imitation, "imitation") == explained("imitation")


@pytest.mark.full
def test_imagination_logs_what_its_algorithm_logs_in_a_simulator(imitation, tmp_path):
    config = imagined(load_config("imagine.py:lift"), imitation)
    collect = replace(config.plan.collect, policy_episodes=3, epsilon_random_episodes=1, calibration=1, held_out=1)
    evaluation = replace(config.evaluation, validation=2, test=2, num_envs=2)
    config = replace(config, plan=replace(config.plan, collect=collect), evaluation=evaluation)
    run(replace(config, rl=replace(config.rl, loop=replace(config.rl.loop, iterations=2))), str(tmp_path))
    assert logged(tmp_path, "rl") - explained("ppo") - explained("index") == explained("imagination")
