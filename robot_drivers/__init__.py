"""Real robots behind the environment contract; part of vla-rl: drivers, the real-time runtime, the safety supervisor.

Nothing here imports torch, so that a robot computer needs numpy and its vendor's library only.
"""
