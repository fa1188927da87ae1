"""Learned world models behind the environment contract; part of vla-rl.

An imagined environment looks like a simulator to a learner.  This package holds models, losses and environments;
optimisers, checkpoints and RL are in ``vla_rl``.
"""
