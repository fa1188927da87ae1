"""Evaluation suites: functions that return a ``Suite``, for ``vla-rl eval --suite NAME``."""
