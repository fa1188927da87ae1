"""pi0.5: pi0 with the state in its prompt and adaptive norms."""
