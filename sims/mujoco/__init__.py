"""MuJoCo on CPU threads: one scene, one renderer, one environment, and one file per task in ``tasks/``."""
