"""Rewards that look: models that say from frames and an instruction how far a task is and whether it is done."""
