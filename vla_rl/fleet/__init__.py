"""Many robots and one learner: experience arrives exactly once, and policies come back.

Imports the contract only, and no torch: a robot's computer runs it.
"""
