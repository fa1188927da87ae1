"""Writes the folders beside this file with the real lerobot 0.6.1 (Python 3.12, torch 2.13.0): ``python write.py``.

Each folder holds the processors of a robot's relative actions, as LeRobot saved them, and ``expected.json``: what they,
loaded again, make of random actions, of a network's random outputs, and of the rest of a chunk when the robot has moved
(``reanchor_relative_rtc_prefix``).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.factory import _reconnect_relative_absolute_steps
from lerobot.policies.rtc import reanchor_relative_rtc_prefix
from lerobot.processor import (
    AbsoluteActionsProcessorStep,
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    RelativeActionsProcessorStep,
    RenameObservationsProcessorStep,
    UnnormalizerProcessorStep,
)
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

HERE = Path(__file__).parent
ROWS, CHUNK = 2, 3
_ARM = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
_LONG = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
ROBOTS: dict[str, tuple[list[str], int, list[str], str]] = {  # names of the action, size of the state, excluded, mode
    "so101": ([f"{name}.pos" for name in _ARM], 6, ["gripper"], "MEAN_STD"),
    "bimanual": ([f"{side}_{name}" for side in ("left", "right") for name in _LONG], 16, ["LEFT_gripper"], "QUANTILES"),
}


def pipelines(names: list[str], size: int, excluded: list[str], mode: str) -> tuple[Any, Any]:
    """As ``processor_pi0.py`` makes them, without prompts."""
    sizes = {"observation.state": size, "action": len(names)}
    kinds = {"observation.state": FeatureType.STATE, "action": FeatureType.ACTION}
    features = {name: PolicyFeature(kinds[name], (count,)) for name, count in sizes.items()}
    draw = {name: torch.randn(4, count).sort(0).values for name, count in sizes.items()}
    stats = {
        name: {"mean": item[1], "std": item[2].abs() + 0.1, "q01": item[0], "q99": item[3]}
        for name, item in draw.items()
    }
    norm_map = dict.fromkeys((FeatureType.STATE, FeatureType.ACTION), NormalizationMode(mode))
    relative = RelativeActionsProcessorStep(True, excluded, names)
    first = [RenameObservationsProcessorStep(), AddBatchDimensionProcessorStep(), DeviceProcessorStep("cpu")]
    before = [*first, relative, NormalizerProcessorStep(features, norm_map, stats)]
    action = {"action": features["action"]}
    after = [UnnormalizerProcessorStep(action, norm_map, stats), AbsoluteActionsProcessorStep(True, relative)]
    forms = {"to_transition": policy_action_to_transition, "to_output": transition_to_policy_action}
    return (
        PolicyProcessorPipeline(before, "policy_preprocessor"),
        PolicyProcessorPipeline([*after, DeviceProcessorStep("cpu")], "policy_postprocessor", **forms),
    )


def main() -> None:
    torch.manual_seed(0)
    for robot, told in ROBOTS.items():
        folder = HERE / robot
        shutil.rmtree(folder, ignore_errors=True)
        for pipeline in pipelines(*told):
            pipeline.save_pretrained(folder)
        pre = PolicyProcessorPipeline.from_pretrained(folder, "policy_preprocessor.json")
        forms = {"to_transition": policy_action_to_transition, "to_output": transition_to_policy_action}
        post = PolicyProcessorPipeline.from_pretrained(folder, "policy_postprocessor.json", **forms)
        _reconnect_relative_absolute_steps(pre, post)
        states, actions, outputs = (torch.randn(ROWS, *size) for size in ((told[1],), *[(CHUNK, len(told[0]))] * 2))
        made = pre({"observation.state": states, "action": actions})
        absolute = post(outputs)
        moved, steps = states[:1] + 0.2 * torch.randn(1, told[1]), pre.steps
        prefix = reanchor_relative_rtc_prefix(absolute[0], moved[0], steps[3], steps[4], "cpu")
        expected = {
            "states": states,
            "actions": actions,
            "normalized_actions": made["action"],
            "outputs": outputs,
            "absolute_outputs": absolute,
            "moved": moved,
            "prefix": prefix,
        }
        listed = {name: item.tolist() for name, item in expected.items()}
        (folder / "expected.json").write_text(json.dumps(listed, indent=None) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
