"""Evaluation: fixed seeds, intervals, paired tests and a page to look at."""
