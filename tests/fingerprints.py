"""``python -m tests.fingerprints [NAME ...]``: SHA-256 of the weights after a small seeded run of every algorithm.

Run it before and after a change that must not change any number.  The sums are comparable on one machine, with one
version of torch and one thread only, so no test compares them with recorded ones.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from safetensors.torch import load_file

from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.recipe import run
from vla_rl.training.fit import FitConfig

IMPROVE = (
    *(f"demo.py:{name}" for name in ("last_step", "one_step", "all_steps", "flow_noise", "rloo")),
    *(f"compare.py:{name}" for name in ("grpo", "residual_td3", "residual_ppo", "dppo", "dsrl", "dsrl_na", "gorl")),
    *(f"compare.py:{name}" for name in ("rlpd", "wsrl")),
)
SMALL: dict[str, Any] = {
    "env_steps": 1500,
    "validate_steps": 700,
    "validation": 8,
    "test": 8,
    "learning_starts": 60,
    "critic_warmup": 1,
    "save_every": 1,
    "offline_steps": 20,
    "groups": 8,
    "limit": 16,
    "ahead": 1,
}


def main(names: Sequence[str]) -> None:
    """Print one line per run whose name holds one of ``names``; without names, of all runs."""
    with tempfile.TemporaryDirectory(prefix="vla-rl-fingerprints-") as folder:
        imitation = Path(folder) / "imitation"
        start = shrunk(load_config("demo.py:small"))
        recipe = shrunk(load_config("compare.py:imitate_lift"))
        recipe = replace(recipe, new=start.new, grounding=shrunk(start.grounding), imitation=start.imitation)
        recipe = replace(recipe, imitation=replace(recipe.imitation, demonstrations=20))
        run(recipe, str(imitation))
        report("imitation", (imitation / "checkpoints" / "imitation").glob("*.safetensors"))
        for name in IMPROVE:
            if wanted(name, names):
                config = shrunk(load_config(name))
                paths = {
                    "policy": imitation / "checkpoints" / "imitation",
                    "demonstrations": imitation / "demonstrations",
                }
                config = replace(config, **{key: str(path) for key, path in paths.items()})
                report(name, trained(config, Path(folder) / name.replace(":", "-")))
        if wanted("gym.py:inverted_pendulum", names):
            pendulum = load_config("gym.py:inverted_pendulum")
            pendulum = replace(pendulum, rl=replace(pendulum.rl, loop=replace(pendulum.rl.loop, iterations=5)))
            report("gym.py:inverted_pendulum", trained(pendulum, Path(folder) / "pendulum"))
        for name in ("imagine.py:lift", "imagine.py:lift_grpo"):
            if wanted(name, names):
                out = Path(folder) / name.replace(":", "-")
                report(name, trained(imagined(load_config(name), imitation), out))
                report(f"{name} (world model)", (out / "checkpoints" / "world").glob("*.safetensors"))


def wanted(name: str, names: Sequence[str]) -> bool:
    """Whether ``name`` was requested."""
    return not names or any(part in name for part in names)


def trained(config: Any, out: Path) -> list[Path]:
    """Run ``config``; returns the tensors of its last training state."""
    run(config, str(out))
    return sorted((out / "state").glob("*/*.safetensors"))[-1:]


def imagined(config: Any, imitation: Path) -> Any:
    """The imagination ``config`` with a small world model, two purchases of simulator episodes and four iterations."""
    fits = {part: FitConfig(steps=6, batch=8) for part in ("state_dynamics", "pose", "video", "mode_classifier")}
    backbone = replace(config.plan.model.backbone, width=16, deep=16, depth=1)
    plan = replace(
        config.plan,
        model=replace(config.plan.model, backbone=backbone, precision="float32"),
        imagination=replace(config.plan.imagination, horizon=10, deadline=10),
        collect=replace(
            config.plan.collect,
            policy_episodes=8,
            epsilon_random_episodes=4,
            random_episodes=2,
            calibration=3,
            held_out=2,
            num_envs=4,
        ),
        demonstrations=str(imitation / "demonstrations"),
        fit=replace(config.plan.fit, **fits),
        refit=replace(config.plan.refit, **fits),
        trust=replace(config.plan.trust, max_hallucinated=1.0, max_missed=1.0, min_imagined=0.0),
        coevolution=replace(config.plan.coevolution, budget=3, batch=2, every=1, uncertainty_rise=-1.0),
    )
    config = replace(shrunk(config), plan=plan, policy=str(imitation / "checkpoints" / "imitation"))
    loop = replace(config.rl.loop, iterations=4, env_steps=0, validate_every=2)
    experience = replace(config.rl.experience, num_envs=8)
    return replace(config, rl=replace(config.rl, loop=loop, experience=experience))


def shrunk(config: Any) -> Any:
    """``config`` with the numbers of :data:`SMALL` wherever a field has such a name."""
    changed: dict[str, Any] = {}
    if not getattr(config, "env_steps", 1):
        changed["iterations"] = 4
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in SMALL and value:
            changed[field.name] = SMALL[field.name]
        elif is_dataclass(value):
            changed[field.name] = shrunk(value)
    return replace(config, **changed)


def report(name: str, files: Iterable[Path]) -> None:
    """Print the sum of the weights of policy and critic, under any name."""
    tensors = {key: tensor for path in files for key, tensor in load_file(path).items()}
    learner = {key: tensor for key, tensor in tensors.items() if "/parameters/" in key or "/critic/" in key}
    sums = sorted(digest(tensor) for tensor in (learner or tensors).values())
    print(f"{hashlib.sha256(''.join(sums).encode()).hexdigest()[:16]}  {len(sums):4d} tensors  {name}", flush=True)


digest: Callable[[torch.Tensor], str] = lambda t: hashlib.sha256(t.numpy().tobytes()).hexdigest()  # noqa: E731

if __name__ == "__main__":
    main(sys.argv[1:])
