"""Writes the folders beside this file with the real lerobot 0.4.4: ``python write.py`` in the environment of
``tests/golden/lerobot/requirements.txt`` with transformers 4.57.6.

Each folder holds a policy's processors with the statistics that they normalize by, and ``expected.json``: what they
make of a state and of an action, and what their postprocessor makes of a network's output.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import library

# torchvision's compiled operators do not load beside the CPU build of torch; importing it needs these declared.
for name in ("nms", "qnms"):
    library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature  # noqa: E402
from lerobot.processor import (  # noqa: E402
    DeviceProcessorStep,
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
    UnnormalizerProcessorStep,
)
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action  # noqa: E402

HERE = Path(__file__).parent
MODES = ("MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY")
FEATURES = {
    "observation.images.camera1": PolicyFeature(FeatureType.VISUAL, (3, 8, 8)),
    "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
    "action": PolicyFeature(FeatureType.ACTION, (2,)),
}
# The last entry of the state never changed in the data.
STATS = {
    "observation.state": {
        "mean": [0.5, -1.25, 0.3],
        "std": [2.0, 0.125, 0.0],
        "min": [-3.0, -2.0, 0.3],
        "max": [4.0, 0.5, 0.3],
        "q01": [-2.5, -1.9, 0.3],
        "q99": [3.5, 0.4, 0.3],
        "q10": [-2.0, -1.8, 0.3],
        "q90": [3.0, 0.3, 0.3],
    },
    "action": {
        "mean": [0.1, 20.0],
        "std": [0.05, 7.0],
        "min": [-0.2, 5.0],
        "max": [0.3, 45.0],
        "q01": [-0.15, 6.0],
        "q99": [0.25, 43.0],
        "q10": [-0.1, 8.0],
        "q90": [0.2, 40.0],
    },
}
STATES = [[0.0, 0.0, 0.3], [1.5, -1.0, 0.3], [-3.0, 0.5, 0.3]]
ACTIONS = [[0.1, 20.0], [-0.2, 44.0], [0.25, 6.0]]
OUTPUTS = [[0.0, 0.0], [1.0, -1.0], [-2.5, 0.75]]


def main() -> None:
    for mode in MODES:
        folder = HERE / mode.lower()
        shutil.rmtree(folder, ignore_errors=True)
        norm_map = {FeatureType.VISUAL: NormalizationMode.IDENTITY}
        norm_map |= dict.fromkeys((FeatureType.STATE, FeatureType.ACTION), NormalizationMode(mode))
        stats = {key: {name: torch.tensor(item) for name, item in part.items()} for key, part in STATS.items()}
        rename = RenameObservationsProcessorStep(rename_map={"observation.images.front": "observation.images.camera1"})
        pre = PolicyProcessorPipeline(
            [rename, DeviceProcessorStep("cpu"), NormalizerProcessorStep(FEATURES, norm_map, stats)],
            "policy_preprocessor",
        )
        post = PolicyProcessorPipeline(
            [UnnormalizerProcessorStep({"action": FEATURES["action"]}, norm_map, stats), DeviceProcessorStep("cpu")],
            "policy_postprocessor",
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        )
        pre.save_pretrained(folder)
        post.save_pretrained(folder)
        made = pre({"observation.state": torch.tensor(STATES), "action": torch.tensor(ACTIONS)})
        expected = {
            "states": STATES,
            "normalized_states": made["observation.state"].tolist(),
            "actions": ACTIONS,
            "normalized_actions": made["action"].tolist(),
            "outputs": OUTPUTS,
            "unnormalized_outputs": post(torch.tensor(OUTPUTS)).tolist(),
        }
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
