"""pi0: a flow expert beside PaliGemma."""
