"""Policies: how actions are made, and with what density."""
