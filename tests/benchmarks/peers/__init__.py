"""PPO of other libraries beside ours: the same task, environments and rollouts, to the same return."""
