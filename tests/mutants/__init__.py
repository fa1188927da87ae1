"""Deliberate faults, one line each, that the tests must notice."""
