"""Any policy of LeRobot, run by LeRobot's own code in an installation of its own.

policy.py   the policy on this side: it checks what must match and asks the process
worker.py   the process: LeRobot's class and processors, and requests about them
memory.py   what such a policy keeps between two actions, for each environment by itself
"""
