"""Run by LeRobot's Python: small policies of its families, and what LeRobot's own loop does with each.

``python alone.py FOLDER`` writes FOLDER/NAME for every policy and FOLDER/NAME.npz: the observations of ``ENVS``
environments, where their episodes begin, bool [T,E], and the actions [T,E,D] when each plays alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

from vla_rl.policies.lerobot.memory import RowNoise

ENVS, STEPS = 4, 22
BEGINS = [{0}, {0, 3}, {0, 9, 10}, {0, 15}]  # of each environment
STATE, PLACE, CAMERA = "observation.state", "observation.environment_state", "observation.images.front"
SMALL = {"pretrained_backbone_weights": None}
NETWORK = {"gpt_input_dim": 32, "gpt_output_dim": 32, "gpt_hidden_dim": 32, "gpt_n_layer": 1, "gpt_n_head": 2}
ACT = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1, "chunk_size": 6}
POLICIES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "act": ("act", (STATE, PLACE), {**ACT, "n_action_steps": 6, "use_vae": False}),
    "act_ensemble": ("act", (STATE, PLACE), {**ACT, "n_action_steps": 1, "temporal_ensemble_coeff": 0.01}),
    "act_pictures": ("act", (STATE, CAMERA), {**ACT, **SMALL, "n_action_steps": 6}),
    "diffusion": (
        "diffusion",
        (STATE, PLACE),
        {"horizon": 8, "n_action_steps": 4, "down_dims": (16, 32), "n_groups": 4, "num_inference_steps": 3},
    ),
    "tdmpc": ("tdmpc", (STATE, PLACE), {"use_mpc": False, "n_action_repeats": 2}),
    "tdmpc_planned": ("tdmpc", (STATE, PLACE), {"horizon": 3, "n_gaussian_samples": 8, "n_elites": 4}),
    "vqbet": (
        "vqbet",
        (STATE, CAMERA),
        {**SMALL, **NETWORK, "use_group_norm": True, "crop_shape": (32, 32), "n_obs_steps": 2},
    ),
}
SHAPES = {STATE: (5,), PLACE: (3,), CAMERA: (3, 32, 32)}
KINDS = {STATE: FeatureType.STATE, PLACE: FeatureType.ENV, CAMERA: FeatureType.VISUAL}


def made(name: str, folder: Path) -> tuple[Any, Any, Any]:
    """The policy ``name`` with its processors, saved as LeRobot saves it."""
    family, inputs, options = POLICIES[name]
    torch.manual_seed(0)
    config = make_policy_config(
        family,
        input_features={key: PolicyFeature(KINDS[key], SHAPES[key]) for key in inputs},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device="cpu",
        push_to_hub=False,
        **options,
    )
    policy = get_policy_class(family)(config).eval()
    sizes = {**{key: SHAPES[key] for key in inputs}, "action": (2,)}
    stats = {key: _statistics(shape if len(shape) == 1 else (shape[0], 1, 1)) for key, shape in sizes.items()}
    processors = make_pre_post_processors(config, dataset_stats=stats)
    policy.save_pretrained(folder)
    for one in processors:
        one.save_pretrained(folder)
    return policy, *processors


def _statistics(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    values = {"mean": 0.1, "std": 0.7, "min": -1.0, "max": 1.5, "q01": -1.0, "q99": 1.5, "q10": -0.8, "q90": 1.2}
    return {name: torch.full(shape, value) for name, value in values.items()}


def observations(inputs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """{key: [T,E,...]} as environments have them: pictures uint8 [h,w,c]."""
    random = np.random.default_rng(0)
    found = {}
    for key in inputs:
        size = (STEPS, ENVS, *SHAPES[key])
        drawn = random.integers(0, 256, size, np.uint8) if key == CAMERA else random.normal(0, 0.5, size)
        found[key] = np.moveaxis(drawn, 2, -1) if key == CAMERA else drawn.astype(np.float32)
    return found


def played(policy: Any, before: Any, after: Any, seen: dict[str, np.ndarray], env: int) -> np.ndarray:
    """The actions [T,D] of environment ``env`` alone, by LeRobot's own loop; noise by a seed for every step."""
    found = []
    for at in range(STEPS):
        if at in BEGINS[env]:
            policy.reset()
        shown: dict[str, Any] = {key: torch.from_numpy(item[at, env : env + 1]) for key, item in seen.items()}
        if CAMERA in shown:
            shown[CAMERA] = shown[CAMERA].movedim(-1, 1).float() / 255
        with RowNoise([100 * at + env]), torch.no_grad():
            found.append(after(policy.select_action(before({**shown, "task": ["go"]})))[0].numpy())
    return np.stack(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (_, inputs, _) in POLICIES.items():
        policy, before, after = made(name, Path(sys.argv[1]) / name)
        seen = observations(inputs)
        actions = np.stack([played(policy, before, after, seen, env) for env in range(ENVS)], 1)
        begins = np.array([[at in BEGINS[env] for env in range(ENVS)] for at in range(STEPS)])
        np.savez(Path(sys.argv[1]) / f"{name}.npz", actions=actions, begins=begins, **seen)
