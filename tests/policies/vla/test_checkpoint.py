"""Public folders are recognised and described by their config.json; cameras are matched or the mismatch is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.policies.vla.public_folders import SMOLVLA, copy_golden, write
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.checkpoint import is_public, match_cameras, read_public
from vla_rl.policies.vla.normalization_formulas import Modes


def spec(*cameras: str) -> EnvSpec:
    images = {name: ArraySpec((8, 8, 3), "uint8", 0, 255) for name in cameras}
    vector = ArraySpec((2,), "float32", -1.0, 1.0)
    return EnvSpec("lab", images, vector, vector, ("lift",), 0.1, 10, 8)


def smolvla(folder: Path, **changes: Any) -> Path:
    write(folder / "config.json", {**SMOLVLA, **changes})
    return folder


def test_a_lerobot_folder_is_described_by_its_features(tmp_path: Path) -> None:
    found = read_public(smolvla(tmp_path))
    assert (found.family, found.cameras) == ("smolvla", ("camera1", "wrist"))
    assert found.image_shapes == {"camera1": (256, 320), "wrist": (64, 64)}
    assert (found.state_size, found.action_size, found.chunk, found.executed) == (3, 2, 50, 10)
    assert found.tokenizer == "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    assert found.modes == Modes("QUANTILES", "MIN_MAX")
    assert found.renamed == {}


def test_a_preprocessor_renames_cameras_and_names_the_tokenizer(tmp_path: Path) -> None:
    copy_golden("mean_std", smolvla(tmp_path))
    path = tmp_path / "policy_preprocessor.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["steps"].append({"registry_name": "tokenizer_processor", "config": {"tokenizer_name": "lab/tokens"}})
    write(path, saved)
    found = read_public(tmp_path)
    assert (found.renamed, found.tokenizer) == ({"camera1": "front"}, "lab/tokens")
    assert match_cameras(found, spec("wrist", "front"), {}) == ("front", "wrist")


def test_transformers_folders(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": "pi0", "chunk_size": 50, "max_action_dim": 32})
    found = read_public(tmp_path)
    assert (found.family, found.chunk, found.executed, found.action_size) == ("pi0", 50, 50, None)
    assert found.tokenizer == "google/paligemma-3b-pt-224"
    assert match_cameras(found, spec("top", "wrist"), {}) == ("top", "wrist")  # it names none: all, in order
    assert match_cameras(found, spec("top", "wrist"), {"base": "wrist", "left": ""}) == ("wrist", None)
    write(tmp_path / "config.json", {"model_type": "openvla", "norm_stats": {}})
    found = read_public(tmp_path)
    assert (found.family, found.cameras, found.tokenizer) == ("openvla", ("image",), "")
    assert found.modes == Modes("QUANTILES", "QUANTILES")


def test_ours_other_families_and_damaged_ones(tmp_path: Path) -> None:
    assert not is_public(tmp_path)
    write(tmp_path / "config.json", {"contract_version": 5, "policy": "a:B", "type": "smolvla"})
    assert not is_public(tmp_path)
    smolvla(tmp_path, type="smolvl")
    assert is_public(tmp_path)
    with pytest.raises(UserError, match=r"holds a 'smolvl' policy.*did you mean 'smolvla'\?"):
        read_public(tmp_path)
    write(tmp_path / "config.json", {name: item for name, item in SMOLVLA.items() if name != "chunk_size"})
    with pytest.raises(UserError, match=r"config.json' lacks or mistypes 'chunk_size'.*download it again"):
        read_public(tmp_path)


def test_cameras_of_equal_names_and_mapped_ones_and_empty_ones(tmp_path: Path) -> None:
    found = read_public(smolvla(tmp_path))
    assert match_cameras(found, spec("wrist", "camera1", "side"), {}) == ("camera1", "wrist")
    assert match_cameras(found, spec("front", "wrist"), {"camera1": "front"}) == ("front", "wrist")
    full = {"observation.images.camera1": "front", "observation.images.wrist": ""}
    assert match_cameras(found, spec("front"), full) == ("front", None)
    features = {
        **SMOLVLA["input_features"],
        "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 9, 9]},
    }
    found = read_public(smolvla(tmp_path, input_features=features))
    assert match_cameras(found, spec("camera1", "wrist"), {}) == ("camera1", "wrist", None)


def test_one_camera_on_both_sides_needs_no_name(tmp_path: Path) -> None:
    only = {"observation.image": {"type": "VISUAL", "shape": [3, 96, 96]}}
    found = read_public(smolvla(tmp_path, input_features=only))
    assert match_cameras(found, spec("front"), {}) == ("front",)
    assert found.state_size is None


@pytest.mark.parametrize(
    ("cameras", "given", "problem"),
    [
        (("front", "wrist"), {}, "nothing is known for 'camera1'"),
        (("front", "wrist"), {"camera1": "top"}, "'top' is none of them"),
        (("front", "wrist"), {"camera9": "front"}, "'camera9' is none of them"),
        (("front",), {"camera1": "", "wrist": ""}, "none is left"),
    ],
)
def test_cameras_that_do_not_match_are_said_with_the_option(
    tmp_path: Path, cameras: tuple[str, ...], given: dict[str, str], problem: str
) -> None:
    found = read_public(smolvla(tmp_path))
    with pytest.raises(UserError) as caught:
        match_cameras(found, spec(*cameras), given)
    text = str(caught.value)
    assert "has the cameras camera1, wrist and" in text and f"has {', '.join(cameras)}, but {problem}" in text
    assert '--vla.cameras, for example \'{"camera1": "front", "wrist": ""}\'' in text


LEROBOT_STEPS: dict[str, list[dict[str, Any]]] = {  # as LeRobot 0.6.1 writes them
    "policy_preprocessor.json": [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "smolvla_new_line_processor", "config": {}},
        {
            "registry_name": "tokenizer_processor",
            "config": {"max_length": 24, "task_key": "task", "padding_side": "right"},
        },
        {"registry_name": "device_processor", "config": {"device": "cuda", "float_dtype": None}},
        {"registry_name": "relative_actions_processor", "config": {"enabled": False, "action_names": None}},
        {"registry_name": "normalizer_processor", "config": {"eps": 1e-8, "norm_map": {"VISUAL": "IDENTITY"}}},
    ],
    "policy_postprocessor.json": [
        {"registry_name": "unnormalizer_processor", "config": {"eps": 1e-8}},
        {"registry_name": "absolute_actions_processor", "config": {"enabled": False}},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ],
}


def with_steps(folder: Path, file: str = "", place: int = 0, step: dict[str, Any] | None = None) -> Path:
    """A folder with LeRobot's processors; ``step`` stands in the place of one of ``file``, None: it is left out."""
    for name, steps in LEROBOT_STEPS.items():
        changed = [*steps[:place], *([step] if step else []), *steps[place + 1 :]] if name == file else steps
        write(folder / name, {"name": name, "steps": changed})
    return smolvla(folder)


def test_lerobots_processors_say_how_prompts_end(tmp_path: Path) -> None:
    found = read_public(with_steps(tmp_path / "whole"))
    assert (found.longest, found.newline, found.steps) == (24, True, None)
    assert not read_public(with_steps(tmp_path / "no line", "policy_preprocessor.json", 2)).newline
    assert read_public(smolvla(tmp_path / "steps", num_steps=4)).steps == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha to True.*does not support"),
        ({"use_delta_joint_actions_aloha": True}, "use_delta_joint_actions_aloha"),
        ({"use_peft": True}, "use_peft"),
        ({"n_obs_steps": 3}, "n_obs_steps to 3.*reads the newest observation alone"),
        ({"action_smoothing": 0.5}, "action_smoothing to 0.5.*does not know"),
        ({"normalization_mapping": {"VISUAL": "MEAN_STD"}}, "normalizes pictures by 'MEAN_STD'"),
    ],
)
def test_an_unknown_field_is_refused_by_name(tmp_path, changes, named) -> None:
    with pytest.raises(UserError, match=named):
        read_public(smolvla(tmp_path, **changes))


@pytest.mark.parametrize(
    ("file", "place", "step", "named"),
    [
        ("policy_preprocessor.json", 5, ("relative_actions_processor", {"enabled": True}), "says two things.*r: True"),
        ("policy_postprocessor.json", 1, ("absolute_actions_processor", {"enabled": True}), "says two things.*r: True"),
        ("policy_preprocessor.json", 5, ("map_delta_action_to_robot_action", {}), "a step that vla-rl does not follow"),
        ("policy_postprocessor.json", 1, ("xvla_rotation_6d_to_axis_angle", {}), "does not follow, 'xvla_rotation_6d"),
        ("policy_postprocessor.json", 2, ("unnormalizer_processor", {}), "a step twice.*unnormalizer_processor"),
        ("policy_postprocessor.json", 1, ("clip_of_ours", {}), "a step that vla-rl does not follow, 'clip_of_ours'"),
        ("policy_preprocessor.json", 3, ("tokenizer_processor", {"padding_side": "left"}), "padding_side to 'left'"),
        ("policy_preprocessor.json", 3, ("tokenizer_processor", {"task_key": "goal"}), "task_key to 'goal'"),
        ("policy_preprocessor.json", 6, ("normalizer_processor", {"norm_map": {"VISUAL": "MIN_MAX"}}), "pictures"),
        ("policy_preprocessor.json", 6, ("normalizer_processor", {"clip": 5.0}), "normalizer_processor.clip to 5.0"),
        ("policy_preprocessor.json", 4, ("pi0_new_line_processor", {}), "behind 'tokenizer_proc"),
    ],
)
def test_an_unknown_processor_step_is_refused_by_name(tmp_path, file, place, step, named) -> None:
    with pytest.raises(UserError, match=named):
        read_public(with_steps(tmp_path, file, place, {"registry_name": step[0], "config": step[1]}))


NAMES = ["left_arm.pos", "left_Gripper.pos", "right_arm.pos", "right_gripper.pos"]


def relative(folder: Path, **config: Any) -> tuple[bool, ...]:
    """What is read of a folder whose processors make actions of four numbers relative."""
    steps = {name: [dict(step) for step in steps] for name, steps in LEROBOT_STEPS.items()}
    steps["policy_preprocessor.json"][5]["config"] = {"enabled": True, **config}
    steps["policy_postprocessor.json"][1]["config"] = {"enabled": True}
    for name, saved in steps.items():
        write(folder / name, {"name": name, "steps": saved})
    return read_public(smolvla(folder, output_features={"action": {"type": "ACTION", "shape": [4]}})).relative


def test_relative_actions_are_read_from_the_processors(tmp_path: Path) -> None:
    assert relative(tmp_path, exclude_joints=["gripper"], action_names=NAMES) == (True, False, True, False)
    assert relative(tmp_path, exclude_joints=["LEFT_arm.pos", ""], action_names=NAMES[:2]) == (False, True, True, True)
    assert relative(tmp_path, exclude_joints=["gripper"], action_names=None) == (True,) * 4  # as LeRobot: no names
    assert read_public(with_steps(tmp_path / "off")).relative == ()


def test_relative_actions_are_read_from_a_config_without_processors(tmp_path: Path) -> None:
    given = {"use_relative_actions": True, "relative_exclude_joints": ["b"], "action_feature_names": ["a", "b"]}
    assert read_public(smolvla(tmp_path, **given)).relative == (True, False)
    with_steps(tmp_path)
    with pytest.raises(UserError, match=r"two things of relative actions .*: False"):
        read_public(smolvla(tmp_path, **given))


def test_relative_to_a_normalized_state_is_refused(tmp_path: Path) -> None:
    steps = LEROBOT_STEPS["policy_preprocessor.json"]
    write(tmp_path / "policy_preprocessor.json", {"steps": [*steps[:5], steps[6], steps[5]]})
    with pytest.raises(UserError, match="'relative_actions_processor' behind 'normalizer_processor'"):
        read_public(smolvla(tmp_path))


def test_a_model_of_its_own_is_no_misspelt_pi0(tmp_path: Path) -> None:
    opened = "it opens smolvla, pi0, pi05, openvla, toy. LeRobot itself runs it, frozen, as lerobot:"
    with pytest.raises(UserError, match=f"'pi0_fast' policy, which vla-rl cannot open; {opened}"):
        read_public(smolvla(tmp_path, type="pi0_fast"))


PI0_PICTURES = {"image_mean": [0.5] * 3, "do_pad": True, "resample": 3, "pad_size": {"height": 224, "width": 224}}
OPENVLA_PICTURES = {"image_resize_strategy": "resize-naive", "means": [[0.485, 0.456, 0.406], [0.5] * 3]}


@pytest.mark.parametrize(
    ("config", "pictures", "field", "value"),
    [
        ({"model_type": "pi0", "chunk_size": 50}, PI0_PICTURES, "resample", 2),
        ({"model_type": "pi0", "chunk_size": 50}, PI0_PICTURES, "pad_size", {"height": 448, "width": 448}),
        ({"model_type": "pi0", "chunk_size": 50}, PI0_PICTURES, "do_center_crop", True),
        ({"model_type": "openvla"}, OPENVLA_PICTURES, "image_resize_strategy", "letterbox"),
        ({"model_type": "openvla"}, OPENVLA_PICTURES, "means", [[0.5] * 3] * 2),
    ],
)
def test_an_unknown_image_processor_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], pictures: dict[str, Any], field: str, value: Any
) -> None:
    write(tmp_path / "config.json", config)
    for file, saved in (
        ("preprocessor_config.json", pictures),
        ("processor_config.json", {"image_processor": pictures}),
    ):
        write(tmp_path / file, saved)
        read_public(tmp_path)
        changed = {**pictures, field: value}
        write(tmp_path / file, changed if file.startswith("pre") else {"image_processor": changed})
        with pytest.raises(UserError, match=f"{file}' sets (image_processor.)?{field} to"):
            read_public(tmp_path)
        (tmp_path / file).unlink()
