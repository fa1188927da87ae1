"""Simulators behind the environment contract.  They never import the learner, a world model or a robot driver."""
