"""Reward models: progress and success of a task from frames and an instruction."""
