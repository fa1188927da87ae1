"""A policy on a LeRobot folder, trained on, as a folder that LeRobot 0.6 reads: its weights, config and processors.

``lerobot-eval``, ``lerobot-rollout`` and everything else of LeRobot then plays what was learnt here, without vla-rl.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.policies.normalization import Affine, Relative
from vla_rl.policies.vla import checkpoint
from vla_rl.policies.vla.checkpoint import CONFIG, PublicCheckpoint, read_public
from vla_rl.policies.vla.dataset_statistics import ACTION, STATE
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.weights import ADAPTER, INDEX, open_tensors, read_json, weight_files

_MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}  # offset and scale of any mode as mean, std
_CAMERA = "observation.images."
_PIPELINES = "policy_preprocessor", "policy_postprocessor"
Step = dict[str, Any]


def save_lerobot(policy: Policy, folder: str | Path) -> None:
    """Write ``policy`` into ``folder`` for LeRobot: weights, ``config.json``, both processors, and what lies beside.

    Cameras by the environment's names, normalisation, relative actions, how many actions are executed and how many
    steps a flow takes are in there; but its noise has temperature 1 in LeRobot, and none is added to explore.  Raises
    UserError for a policy that is built on no LeRobot folder, for adapters (LoRA), which LeRobot's class has no place
    for, and where ``folder`` holds a policy already.
    """
    if not isinstance(policy, FlowVLA) or policy.base is None:
        raise _not_lerobot(f"a {type(policy).__name__} that is built on none of its folders")
    made, place = Path(folder), policy.base.open(Path(folder))
    if (made / CONFIG).exists():
        raise UserError(f"{folder!s} holds a policy, which would be lost; name another folder.")
    config, public = read_json(place / CONFIG), read_public(place)
    if "type" not in config:
        raise _not_lerobot(f"what builds on {str(place)!r}")
    tensors = _tensors(policy, place)
    made.mkdir(parents=True, exist_ok=True)
    _copy_beside(place, made)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    names, excluded = _named(policy.relative, policy.spec.action.names, policy.spec.action_dim)
    _write(made / CONFIG, _config(policy, config, names, excluded))
    relative = {"enabled": any(policy.relative), "exclude_joints": excluded, "action_names": names}
    _write_pipelines(policy, public, config, relative, made)


def _not_lerobot(what: str) -> UserError:
    return UserError(
        f"LeRobot has no config and tokenizer for {what}, so it could not read it; save a policy that was opened from "
        "a LeRobot folder (smolvla, pi0 or pi05), or keep vla-rl's own checkpoint."
    )


def _tensors(policy: FlowVLA, base: Path) -> dict[str, Tensor]:
    """Today's weights under the names of the base's files; what nothing here reads stays as it is there."""
    now: Mapping[str, Tensor] = policy.network.state_dict()  # type: ignore[attr-defined]  # a module
    public_name = policy.network.public_name  # type: ignore[attr-defined]  # of all networks with LeRobot's names
    found: dict[str, Tensor] = {}
    for path in weight_files(base):
        with open_tensors(path) as tensors:
            for key in tensors.keys():  # noqa: SIM118  # a file, no dict
                name = public_name(key)
                if name is not None and name not in now:
                    raise UserError(
                        f"{name} of the model has an adapter, which LeRobot's own class has no place for, so nothing "
                        "was written; train without TrainLoRA, or keep vla-rl's own checkpoint."
                    )
                here = tensors.get_tensor(key) if name is None else now[name].detach().cpu()
                found[key] = here.clone().contiguous()  # those that share a parameter must not share memory
    return found


def _copy_beside(base: Path, folder: Path) -> None:
    """The tokenizer and the like: all small files but those that are written here."""
    for path in sorted(base.rglob("*.json")) + sorted(base.rglob("*.model")):
        inside = path.relative_to(base)
        own = path.name in (CONFIG, INDEX, ADAPTER) or path.name.startswith(_PIPELINES)
        if (own and len(inside.parts) == 1) or inside.parts[0] == "meta":
            continue
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / inside)


def _named(relative: Relative, names: Sequence[str], size: int) -> tuple[list[str], list[str]]:
    """Names of an action's entries, and those of the absolute ones, as LeRobot tells them apart: by parts of names."""
    numbered = [f"entry_{i:03}" for i in range(size)]
    for chosen in (list(names) or numbered, numbered):
        excluded = [name for name, is_relative in zip(chosen, relative, strict=False) if not is_relative]
        if not any(relative) or checkpoint.relative_entries(excluded, chosen, size) == tuple(relative):
            break
    return chosen, excluded


def _config(policy: FlowVLA, base: Mapping[str, Any], names: list[str], excluded: list[str]) -> dict[str, Any]:
    sizes = policy.spec.state.shape[-1], policy.spec.action_dim
    inputs = {key: item for key, item in base["input_features"].items() if item["type"] != "STATE"}
    steps = "num_steps" if base["type"] == "smolvla" else "num_inference_steps"
    changed = {
        **base,
        "input_features": {**inputs, STATE: {"type": "STATE", "shape": [sizes[0]]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [sizes[1]]}},
        "normalization_mapping": _MODES,
        "n_action_steps": policy.horizon,
        "use_peft": False,  # an adapter of the base is merged
        steps: policy.sampler.steps,
    }
    if base["type"] != "smolvla":  # which has no such fields: its processors alone say it
        relative = any(policy.relative)
        changed |= {"use_relative_actions": relative, "relative_exclude_joints": excluded}
        changed |= {"action_feature_names": names}
    return changed


def _write_pipelines(
    policy: FlowVLA, public: PublicCheckpoint, config: Mapping[str, Any], relative: Step, folder: Path
) -> None:
    """Both processors with their statistics, in LeRobot's order: prompts are of the normalised state in pi0.5."""
    features = {STATE: {"type": "STATE", "shape": [policy.spec.state.shape[-1]]}}
    action = {ACTION: {"type": "ACTION", "shape": [policy.spec.action_dim]}}
    keys = [key for key, item in config["input_features"].items() if item["type"] == "VISUAL"]
    shown = zip(keys, policy.cameras, strict=True)
    renamed = {_CAMERA + name: key for key, name in shown if name is not None and _CAMERA + name != key}
    prompt: list[tuple[str, Step]] = []
    if public.family == "pi05":
        prompt.append((checkpoint.STATE_IN_PROMPT, {"max_state_dim": config.get("max_state_dim", 32)}))
    elif public.newline:
        prompt.append((f"{public.family}_new_line_processor", {}))
    padding = config.get("pad_language_to", "longest") if public.family == "smolvla" else "max_length"
    words = {"max_length": public.longest, "task_key": "task", "padding_side": "right", "padding": padding}
    prompt.append(("tokenizer_processor", {**words, "truncation": True, "tokenizer_name": public.tokenizer}))
    numbers = [("relative_actions_processor", relative), ("normalizer_processor", _normalizer({**features, **action}))]
    first: list[tuple[str, Step]] = [("rename_observations_processor", {"rename_map": renamed})]
    first.append(("to_batch_processor", {}))
    device = ("device_processor", {"device": config.get("device") or "cpu", "float_dtype": None})
    ordered = [*numbers, *prompt, device] if public.family == "pi05" else [*prompt, device, *numbers]
    after = [
        ("unnormalizer_processor", _normalizer(action)),
        ("absolute_actions_processor", {"enabled": relative["enabled"]}),
        ("device_processor", {"device": "cpu", "float_dtype": None}),
    ]
    scales = {STATE: policy.state_scale, ACTION: policy.action_scale}
    _write_pipeline(folder, "policy_preprocessor", [*first, *ordered], scales)
    _write_pipeline(folder, "policy_postprocessor", after, {ACTION: policy.action_scale})


def _normalizer(features: Mapping[str, Step]) -> Step:
    return {"eps": 0.0, "features": dict(features), "norm_map": _MODES}


def _write_pipeline(folder: Path, name: str, steps: Sequence[tuple[str, Step]], scales: Mapping[str, Affine]) -> None:
    written = []
    for i, (kind, config) in enumerate(steps):
        step: Step = {"registry_name": kind, "config": config}
        if "norm_map" in config:
            step["state_file"] = f"{name}_step_{i}_{kind}.safetensors"
            numbers = {
                f"{feature}.{statistic}": torch.tensor(value, dtype=torch.float32)
                for feature, scale in scales.items()
                for statistic, value in (("mean", scale.offset), ("std", scale.scale))
            }
            save_file(numbers, folder / step["state_file"])
        written.append(step)
    _write(folder / f"{name}.json", {"name": name, "steps": written})


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
