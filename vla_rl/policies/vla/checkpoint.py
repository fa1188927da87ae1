"""Folders in public formats: what they say about their model, whichever family it is of.

LeRobot's ``config.json`` names its policy in ``type`` and its cameras, state and action as features; transformers'
names its model in ``model_type``.  Nothing is imported or executed that a folder names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.contract import trust
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.vla.dataset_statistics import ACTION, STATE, pipeline_step
from vla_rl.policies.vla.files import read_json
from vla_rl.policies.vla.normalization_formulas import Modes

CONFIG = "config.json"
# The class of a family, by what config.json says.  It has ``from_public(folder, spec, options)``.
FAMILIES = {
    "smolvla": "vla_rl.policies.smolvla.policy:SmolVLA",
    "pi0": "vla_rl.policies.pi0.policy:Pi0",
    "openvla": "vla_rl.policies.openvla.policy:OpenVLA",
}
_PALIGEMMA = "google/paligemma-3b-pt-224"  # pi0's tokenizer
_PREPROCESSOR = "policy_preprocessor.json"
_IMAGE_PREFIXES = ("observation.images.", "observation.")


@dataclass(frozen=True)
class PublicCheckpoint:
    """What a public folder says about its model.

    cameras      short names in the model's order; () where the folder names none (transformers' pi0)
    renamed      checkpoint's camera -> the name that it had in the data, where LeRobot's preprocessor renames it
    image_shapes camera -> (height, width) that the folder declares
    state_size, action_size  of the data; None where the folder does not say
    chunk        actions that the model predicts
    executed     how many of them its authors execute
    tokenizer    name on the Hugging Face hub; "" where it has to be in the folder
    modes        how state and action are normalized, where the statistics do not say
    """

    folder: Path
    family: str
    config: Mapping[str, Any]
    cameras: tuple[str, ...]
    state_size: int | None
    action_size: int | None
    chunk: int
    executed: int
    tokenizer: str
    modes: Modes = Modes()
    renamed: Mapping[str, str] = field(default_factory=dict)
    image_shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def is_public(folder: Path) -> bool:
    """Whether ``config.json`` of ``folder`` is in a public format, and none of ours or no JSON object."""
    try:
        saved = trust.read_json(folder / CONFIG)
    except (OSError, ValueError):
        return False
    return isinstance(saved, dict) and "contract_version" not in saved and ("type" in saved or "model_type" in saved)


def read_public(folder: Path) -> PublicCheckpoint:
    """The description of a public folder; raises UserError for a family that is not known and a damaged config."""
    config = read_json(folder / CONFIG)
    name = config.get("type") or config.get("model_type")
    if name not in FAMILIES:
        raise UserError(
            f"{str(folder)!r} holds a {str(name)!r} policy, which vla-rl cannot open; "
            f"{did_you_mean(str(name), FAMILIES)}"
        )
    try:
        return _lerobot(folder, config) if "type" in config else _transformers(folder, config)
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{str(folder / CONFIG)!r} lacks or mistypes {error}, so the model cannot be built; download it again."
        ) from error


def family_class(checkpoint: PublicCheckpoint) -> str:
    """ "module:Class" of the policies of its family."""
    return FAMILIES[checkpoint.family]


def _lerobot(folder: Path, config: Mapping[str, Any]) -> PublicCheckpoint:
    """LeRobot: features with their shapes; the preprocessor names the tokenizer and renames cameras."""
    inputs, outputs = config["input_features"] or {}, config["output_features"] or {}
    pictures = {short_name(key): item["shape"] for key, item in inputs.items() if item["type"] == "VISUAL"}
    state, action = inputs.get(STATE), outputs.get(ACTION)
    modes = config.get("normalization_mapping", {})
    return PublicCheckpoint(
        folder=folder,
        family=config["type"],
        config=config,
        cameras=tuple(pictures),
        state_size=state["shape"][-1] if state else None,
        action_size=action["shape"][-1] if action else None,
        chunk=config["chunk_size"],
        executed=config["n_action_steps"],
        tokenizer=_lerobot_tokenizer(folder, config),
        modes=Modes(modes.get("STATE", "MEAN_STD"), modes.get("ACTION", "MEAN_STD")),
        renamed=_renamed(folder),
        image_shapes={name: (shape[1], shape[2]) for name, shape in pictures.items()},
    )


def _lerobot_tokenizer(folder: Path, config: Mapping[str, Any]) -> str:
    if (folder / _PREPROCESSOR).is_file():
        named = pipeline_step(folder / _PREPROCESSOR, "tokenizer_processor")["config"].get("tokenizer_name")
        if named:
            return str(named)
    return str(config.get("vlm_model_name", _PALIGEMMA))


def _renamed(folder: Path) -> dict[str, str]:
    if not (folder / _PREPROCESSOR).is_file():
        return {}
    step = pipeline_step(folder / _PREPROCESSOR, "rename_observations_processor")
    return {short_name(new): short_name(old) for old, new in step["config"].get("rename_map", {}).items()}


def _transformers(folder: Path, config: Mapping[str, Any]) -> PublicCheckpoint:
    """transformers: a pi0 names no cameras and pads state and action; an OpenVLA sees one picture."""
    pi0 = config["model_type"] == "pi0"
    return PublicCheckpoint(
        folder=folder,
        family=config["model_type"],
        config=config,
        cameras=() if pi0 else ("image",),
        state_size=None,
        action_size=None,
        chunk=config["chunk_size"] if pi0 else 1,
        executed=config["chunk_size"] if pi0 else 1,
        tokenizer=_PALIGEMMA if pi0 else "",
        modes=Modes() if pi0 else Modes("QUANTILES", "QUANTILES"),
    )


def short_name(feature: str) -> str:
    """``observation.images.top`` -> ``top``."""
    for prefix in _IMAGE_PREFIXES:
        if feature.startswith(prefix):
            return feature.removeprefix(prefix)
    return feature


def match_cameras(checkpoint: PublicCheckpoint, spec: EnvSpec, given: Mapping[str, str]) -> tuple[str | None, ...]:
    """The environment's camera for each of the checkpoint's; None for one that is missing.

    ``given`` {checkpoint's: environment's or "" for none} goes first, then equal names, then the name in the
    checkpoint's data, then the only camera of both.  Cameras that LeRobot calls ``empty_camera_...`` are missing by
    design.  A checkpoint without names takes all of the environment's in order.
    Raises UserError, naming both lists, for one that stays without a camera and for unknown names in ``given``.
    """
    chosen = {short_name(ours): theirs for ours, theirs in given.items()}
    names = checkpoint.cameras or tuple(chosen) or tuple(spec.images)
    unknown = [name for name in chosen if name not in names]
    absent = [theirs for theirs in chosen.values() if theirs and theirs not in spec.images]
    if unknown or absent:
        raise _no_match(checkpoint, spec, names, f"{(unknown or absent)[0]!r} is none of them")
    found: list[str | None] = []
    for name in names:
        same = next((item for item in (name, checkpoint.renamed.get(name)) if item in spec.images), None)
        if name in chosen:
            found.append(chosen[name] or None)
        elif same is not None or name.startswith("empty_camera_"):
            found.append(same)
        elif len(names) == len(spec.images) == 1:
            found.append(next(iter(spec.images)))
        else:
            raise _no_match(checkpoint, spec, names, f"nothing is known for {name!r}")
    if not any(found):
        raise _no_match(checkpoint, spec, names, "none is left")
    return tuple(found)


def _no_match(checkpoint: PublicCheckpoint, spec: EnvSpec, names: tuple[str, ...], problem: str) -> UserError:
    example = json.dumps({name: next(iter(spec.images), "") if i == 0 else "" for i, name in enumerate(names)})
    return UserError(
        f"the checkpoint {str(checkpoint.folder)!r} has the cameras {', '.join(names)} and the environment "
        f"{spec.name!r} has {', '.join(spec.images) or 'none'}, but {problem}, so the model would see nothing there; "
        f"map them with --vla.cameras, for example '{example}' (\"\" is a missing one)."
    )
