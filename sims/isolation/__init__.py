"""Environments in processes of their own, on this machine or another: the parts of ``sims/isolated.py``."""
