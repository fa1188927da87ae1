"""Imitation from recorded demonstrations: vla-rl train configs/imitate.py:from_dataset --dataset FOLDER"""

from vla_rl.recipes.imitate_dataset import ImitateDataset


def from_dataset() -> ImitateDataset:
    """Any LeRobotDataset; with --policy CHECKPOINT, on top of what a policy has learnt."""
    return ImitateDataset()
