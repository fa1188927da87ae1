"""Learned world models behind the environment contract; part of vla-rl.

An imagined world looks like a simulator to a learner.

They hold models, losses and environments; whoever trains or uses one hands it in through the contract.
"""
