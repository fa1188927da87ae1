"""Say which episodes of a dataset failed: python label_dataset.py DATASET NEW 3 7 12"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from vla_rl.experience.datasets import load_demonstrations, save_demonstrations

source, target, *failed = sys.argv[1:]
episodes = load_demonstrations(source)  # numbered from 0 in their order
last = np.append(np.diff(episodes.episode) == 1, True)
success = last & ~np.isin(episodes.episode, [int(number) for number in failed])
save_demonstrations(replace(episodes, extras={**episodes.extras, "next.success": success}), Path(target))
