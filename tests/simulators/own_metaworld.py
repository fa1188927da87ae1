"""Meta-World's experts in Meta-World alone: {task: [success of each seed]} as JSON.  It imports nothing of ours.

Arguments: a JSON object {"tasks": [...], "seeds": [...]}.
"""

from __future__ import annotations

import json
import sys
import warnings


def play(task: str, seed: int) -> bool:
    """Whether the expert of ``task`` succeeds within Meta-World's 500 steps."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
    from metaworld.policies import ENV_POLICY_MAP

    env = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-v3-goal-observable"](seed=seed)
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    env.seed(seed)
    observation, _ = env.reset()
    policy = ENV_POLICY_MAP[f"{task}-v3"]()
    for _ in range(env.max_path_length):
        observation, _, _, _, info = env.step(policy.get_action(observation))
        if info["success"]:
            return True
    return False


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    given = json.loads(sys.argv[1])
    print(json.dumps({task: [play(task, seed) for seed in given["seeds"]] for task in given["tasks"]}))
