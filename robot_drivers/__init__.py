"""Real robots behind the environment contract: drivers, the real-time runtime and the safety supervisor.

Nothing here imports torch, so that a robot computer needs numpy and its vendor's library only.
"""
