"""The real lerobot in its own environment (requirements.txt); neither vla-rl nor its tests import this file."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("SVT_LOG", "1")

import torch

# torchvision 0.25 is the last with the decoder that lerobot 0.4.4 calls, and its compiled operators do not load beside
# the CPU build of torch 2.13.  The dataset needs none of them; importing torchvision only needs one to be declared.
torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

__all__ = ["LeRobotDataset"]
