"""What ``vla-rl robot`` does: the only part of recipes that imports ``robot_drivers``.

Nothing else in recipes imports this package, and it imports torch only where a policy is loaded, so an arm is set up
and checked on a computer without it.
"""
