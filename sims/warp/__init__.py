"""The tabletop on MuJoCo-Warp: thousands of environments on one GPU, and the same code on a processor."""
