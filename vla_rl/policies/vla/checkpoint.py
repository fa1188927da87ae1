"""Folders in public formats: what they say about their model, whichever family it is of.

LeRobot's ``config.json`` names its policy in ``type`` and its cameras, state and action as features; transformers'
names its model in ``model_type``.  Nothing is imported or executed that a folder names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.contract import trust
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.hub import LEROBOT
from vla_rl.policies.normalization import Relative
from vla_rl.policies.vla.dataset_statistics import ACTION, STATE
from vla_rl.policies.vla.normalization_formulas import Modes
from vla_rl.policies.vla.weights import is_adapter, read_json

CONFIG = "config.json"
# The class of a family's policies, by what config.json says.  It has ``from_public(folder, spec, options)``.
FAMILIES = {
    "smolvla": "vla_rl.policies.smolvla.policy:SmolVLA",
    "pi0": "vla_rl.policies.pi0.policy:Pi0",
    "pi05": "vla_rl.policies.pi05.policy:Pi05",
    "openvla": "vla_rl.policies.openvla.policy:OpenVLA",
}
_OTHERS = ("pi0_fast",)  # models of their own, for which the name of a known one would be a false guess
_PALIGEMMA = "google/paligemma-3b-pt-224"  # pi0's tokenizer
_PREPROCESSOR, _POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
_ANY = object()
# What LeRobot (0.4 to 0.6) writes into config.json: fields that are read here or by a family, fields of how the model
# was trained, run and stored, which change no action, and fields that do, with the values that are supported.
_READ = """
    type input_features output_features normalization_mapping chunk_size n_action_steps max_state_dim
    max_action_dim image_resolution resize_imgs_with_padding empty_cameras paligemma_variant
    action_expert_variant vlm_model_name add_image_special_tokens attention_mode num_expert_layers
    num_vlm_layers self_attn_every_n_layers expert_width_multiplier min_period max_period num_steps
    num_inference_steps tokenizer_max_length use_relative_actions relative_exclude_joints action_feature_names
"""
_HARMLESS = """
    device use_amp push_to_hub repo_id private tags license pretrained_path pretrained_revision dtype use_cache
    rtc_config compile_model compile_mode gradient_checkpointing freeze_vision_encoder train_expert_only
    train_state_proj load_vlm_weights pad_language_to prefix_length time_sampling_beta_alpha
    time_sampling_beta_beta time_sampling_scale time_sampling_offset optimizer_lr optimizer_betas optimizer_eps
    optimizer_weight_decay optimizer_grad_clip_norm scheduler_warmup_steps scheduler_decay_steps scheduler_decay_lr
"""
_FIELDS: Mapping[str, Any] = {
    **dict.fromkeys((*_READ.split(), *_HARMLESS.split()), _ANY),
    "n_obs_steps": (1,),
    "adapt_to_pi_aloha": (False,),
    "use_delta_joint_actions_aloha": (False,),
}
_SO = {"n_obs_steps": "and LeRobot's own class (0.6) reads the newest observation alone whatever it says"}
# The steps of its processors, with the options of each.
_NORMALIZER = {"eps": _ANY, "features": _ANY, "norm_map": _ANY, "normalize_observation_keys": _ANY}
_DEVICE = {"device": _ANY, "float_dtype": _ANY}
_NEW_LINES = ("smolvla_new_line_processor", "pi0_new_line_processor")
STATE_IN_PROMPT = "pi05_prepare_state_tokenizer_processor_step"
_NORMALIZES, _UNNORMALIZES = "normalizer_processor", "unnormalizer_processor"
_RELATIVE, _ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
# What has to come before what: prompts before their tokens, and actions relative to the state as it is measured.
_ORDER = (
    *((step, "tokenizer_processor") for step in (*_NEW_LINES, STATE_IN_PROMPT)),
    (_RELATIVE, _NORMALIZES),
    (_UNNORMALIZES, _ABSOLUTE),
)
_STEPS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    _PREPROCESSOR: {
        "rename_observations_processor": {"rename_map": _ANY},
        "to_batch_processor": {},
        **{name: {} for name in _NEW_LINES},
        STATE_IN_PROMPT: {"max_state_dim": _ANY, "task_key": ("task",)},
        "tokenizer_processor": {
            "max_length": _ANY,
            "task_key": ("task",),
            "padding_side": ("right",),
            "padding": _ANY,
            "truncation": _ANY,
            "tokenizer_name": _ANY,
        },
        "device_processor": _DEVICE,
        _RELATIVE: {"enabled": _ANY, "exclude_joints": _ANY, "action_names": _ANY},
        _NORMALIZES: _NORMALIZER,
    },
    _POSTPROCESSOR: {
        _UNNORMALIZES: _NORMALIZER,
        _ABSOLUTE: {"enabled": _ANY},
        "device_processor": _DEVICE,
    },
}
# The image processors of transformers' folders: in a file of their own or beside the statistics of PI0Processor.
_IMAGE_PROCESSORS = (("preprocessor_config.json", ""), ("processor_config.json", "image_processor"))
_OF_ANY_PROCESSOR = dict.fromkeys(("image_processor_type", "processor_class", "auto_map", "data_format"), _ANY)
_PI0_PICTURES: Mapping[str, Any] = {
    **_OF_ANY_PROCESSOR,
    "image_seq_length": _ANY,
    **dict.fromkeys(("do_convert_rgb", "do_normalize", "do_pad", "do_rescale", "do_resize"), (True,)),
    "image_mean": ([0.5] * 3,),
    "image_std": ([0.5] * 3,),
    "resample": (3,),
    "rescale_factor": (1 / 255,),
}
# Its tvf_... are made from the others whenever it is loaded; bfloat16 has rounded the numbers of some folders.
_OPENVLA_PICTURES: Mapping[str, Any] = {
    **_OF_ANY_PROCESSOR,
    **{f"tvf_{name}_params": _ANY for name in ("crop", "normalize", "resize")},
    "tvf_letterbox_fill": _ANY,
    "tvf_do_letterbox": (False,),
    "use_fused_vision_backbone": (True,),
    "image_resize_strategy": ("resize-naive",),
    "input_sizes": ([[3, 224, 224]] * 2,),
    "interpolations": (["bicubic"] * 2,),
    "means": ([[0.485, 0.456, 0.406], [0.5] * 3], [[0.484375, 0.455078125, 0.40625], [0.5] * 3]),
    "stds": ([[0.229, 0.224, 0.225], [0.5] * 3], [[0.228515625, 0.2236328125, 0.224609375], [0.5] * 3]),
}
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
    longest      tokens of a prompt that the model was trained with at most
    newline      whether a newline ends every prompt
    steps        of the flow's chain; None where the folder does not say
    modes        how state and action are normalized, where the statistics do not say
    relative     which entries of an action are relative to the state; () where none is, and where the folder cannot say
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
    longest: int = 48
    newline: bool = True
    steps: int | None = None
    modes: Modes = Modes()
    relative: Relative = ()
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
    trust.check_folder(folder)
    name = config.get("type") or config.get("model_type")
    if name not in FAMILIES:
        near = "" if name in _OTHERS else did_you_mean(str(name), FAMILIES)
        frozen = f" LeRobot itself runs it, frozen, as {LEROBOT}{folder}." if "type" in config else ""
        raise UserError(
            f"{str(folder)!r} holds a {str(name)!r} policy, which vla-rl cannot open; "
            f"{near or 'it opens ' + ', '.join(FAMILIES)}.{frozen}"
        )
    try:
        return _lerobot(folder, config) if "type" in config else _transformers(folder, config)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{str(folder / CONFIG)!r} lacks or mistypes {error}, so the model cannot be built; download it again."
        ) from error


def _lerobot(folder: Path, config: Mapping[str, Any]) -> PublicCheckpoint:
    """LeRobot: features with their shapes; the preprocessor names the tokenizer and renames cameras."""
    _check_fields(folder / CONFIG, config, {**_FIELDS, "use_peft": (False, is_adapter(folder))})
    inputs, outputs = config["input_features"] or {}, config["output_features"] or {}
    pictures = {short_name(key): item["shape"] for key, item in inputs.items() if item["type"] == "VISUAL"}
    state, action = inputs.get(STATE), outputs.get(ACTION)
    modes, usual = config.get("normalization_mapping", {}), "QUANTILES" if config["type"] == "pi05" else "MEAN_STD"
    _check_pictures(folder / CONFIG, modes)
    steps = {file: _checked_steps(folder / file) for file in _STEPS if (folder / file).is_file()}
    before = steps.get(_PREPROCESSOR, {})
    _check_state_in_prompt(folder / _PREPROCESSOR, config["type"], before)
    words = before.get("tokenizer_processor", {})
    names = before.get("rename_observations_processor", {}).get("rename_map", {})
    return PublicCheckpoint(
        folder=folder,
        family=config["type"],
        config=config,
        cameras=tuple(pictures),
        state_size=state["shape"][-1] if state else None,
        action_size=action["shape"][-1] if action else None,
        chunk=config["chunk_size"],
        executed=config["n_action_steps"],
        tokenizer=str(words.get("tokenizer_name") or config.get("vlm_model_name", _PALIGEMMA)),
        longest=words.get("max_length") or config.get("tokenizer_max_length", 48),
        newline=not before or any(name in before for name in _NEW_LINES),
        steps=config.get("num_steps", config.get("num_inference_steps")),
        modes=Modes(modes.get("STATE", usual), modes.get("ACTION", usual)),
        relative=_relative(folder, config, steps, action["shape"][-1] if action else 0),
        renamed={short_name(new): short_name(old) for old, new in names.items()},
        image_shapes={name: (shape[1], shape[2]) for name, shape in pictures.items()},
    )


def _checked_steps(path: Path) -> dict[str, Mapping[str, Any]]:
    """The options of every step of LeRobot's pipeline in ``path``, by the step's name, in their order.

    Raises UserError for a step, or an option of one, that is not known to be followed or to change nothing.
    """
    known, found = _STEPS[path.name], dict[str, Mapping[str, Any]]()
    for step in read_json(path).get("steps", []):
        name = step.get("registry_name", step.get("class"))
        if name not in known or name in found:
            problem = "a step twice" if name in found else "a step"
            raise UserError(
                f"{str(path)!r} has {problem} that vla-rl does not follow, {name!r}, so its actions would be wrong; "
                "use a checkpoint without it."
            )
        found[name] = step.get("config", {})
        _check_fields(path, found[name], known[name], f"{name}.")
        _check_pictures(path, found[name].get("norm_map", {}))
    names = list(found)
    for first, second in _ORDER:
        if first in names and second in names and names.index(first) > names.index(second):
            raise UserError(
                f"{str(path)!r} has {first!r} behind {second!r}, so prompts or actions would be misread; use a "
                "checkpoint whose steps are in LeRobot's order."
            )
    return found


def _relative(
    folder: Path, config: Mapping[str, Any], steps: Mapping[str, Mapping[str, Mapping[str, Any]]], size: int
) -> Relative:
    """Which of ``size`` entries of an action are relative to the state, by LeRobot's ``RelativeActionsProcessorStep``.

    An entry is absolute whose name has one of ``exclude_joints`` in it; without names none is.  Raises UserError where
    the two processors and ``config.json`` do not agree: it would be trained as one and act as another.
    """
    before, after = (
        steps.get(file, {}).get(name, {}) for file, name in ((_PREPROCESSOR, _RELATIVE), (_POSTPROCESSOR, _ABSOLUTE))
    )
    said = {f"{_PREPROCESSOR}'s {_RELATIVE}": bool(before.get("enabled")) if _PREPROCESSOR in steps else None}
    said[f"{_POSTPROCESSOR}'s {_ABSOLUTE}"] = bool(after.get("enabled")) if _POSTPROCESSOR in steps else None
    said[f"{CONFIG}'s use_relative_actions"] = config.get("use_relative_actions")
    known = {name: value for name, value in said.items() if value is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name}: {value}" for name, value in known.items())
        raise UserError(
            f"{str(folder)!r} says two things of relative actions ({listed}), so it is not known with which of them it "
            "was trained; use the files of one training."
        )
    if not any(known.values()):
        return ()
    source = before or {
        "exclude_joints": config.get("relative_exclude_joints"),
        "action_names": config.get("action_feature_names"),
    }
    return relative_entries(source.get("exclude_joints") or (), source.get("action_names") or (), size)


def relative_entries(excluded: Sequence[object], names: Sequence[object], size: int) -> Relative:
    """LeRobot's ``_build_mask``: of ``size`` entries with ``names`` those with ``excluded`` in them are absolute."""
    parts = [str(one).lower() for one in excluded if one]
    mask = [not any(one in str(name).lower() for one in parts) for name in names[:size]]
    return tuple(mask + [True] * (size - len(mask)))


def _check_state_in_prompt(path: Path, family: str, steps: Collection[str]) -> None:
    """Raises UserError unless the prompts of a pi0.5, and of no other family, have the state written into them."""
    if steps and (STATE_IN_PROMPT in steps) != (family == "pi05"):
        has = "has no step" if family == "pi05" else "has the step"
        writes = "no state" if family == "pi05" else "the state"
        raise UserError(
            f"{str(path)!r} {has} {STATE_IN_PROMPT!r}, so a {family!r} writes {writes} into its prompts there and "
            "vla-rl would write others; use a checkpoint with LeRobot's own steps."
        )


def _check_fields(path: Path, given: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> None:
    """Raises UserError for a field that is not ``known``, and for a value that changes what the model does."""
    for name, value in given.items():
        allowed = known.get(name, (None,))
        if allowed is not _ANY and value not in allowed:
            what = "does not support" if name in known else "does not know"
            so = _SO.get(name, "so its actions would be wrong")
            raise UserError(
                f"{str(path)!r} sets {prefix}{name} to {value!r}, which vla-rl {what}, {so}; "
                "use a checkpoint without it, or take the field out if it changes nothing for this one."
            )


def _check_pictures(path: Path, modes: Mapping[str, str]) -> None:
    """Raises UserError where pictures are normalized by statistics: every family here sees [-1, 1]."""
    if modes.get("VISUAL", "IDENTITY") != "IDENTITY":
        raise UserError(
            f"{str(path)!r} normalizes pictures by {modes['VISUAL']!r}, which vla-rl does not support, so the model "
            "would misread them; use a checkpoint whose pictures are IDENTITY."
        )


def _transformers(folder: Path, config: Mapping[str, Any]) -> PublicCheckpoint:
    """transformers: a pi0 names no cameras and pads state and action; an OpenVLA sees one picture."""
    pi0 = config["model_type"] == "pi0"
    known = dict(_PI0_PICTURES if pi0 else _OPENVLA_PICTURES)
    if pi0:
        side = config.get("vlm_config", {}).get("vision_config", {}).get("image_size", 224)
        known |= {"size": ({"max_height": side, "max_width": side},), "pad_size": ({"height": side, "width": side},)}
    for file, part in _IMAGE_PROCESSORS:
        saved = read_json(folder / file) if (folder / file).is_file() else {}
        _check_fields(folder / file, saved.get(part, {}) if part else saved, known, part and f"{part}.")
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
        steps=config.get("num_inference_steps") if pi0 else None,
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
