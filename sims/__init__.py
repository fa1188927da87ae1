"""Simulators behind the environment contract; part of vla-rl.

They never import the learner, a world model or a robot driver.
"""
