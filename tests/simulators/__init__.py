"""Simulators that have an installation of their own, for real: ``make test-sims``."""
