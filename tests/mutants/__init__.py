"""Faults that the tests must notice: a table for each package, and what puts them in (``make mutants``)."""
