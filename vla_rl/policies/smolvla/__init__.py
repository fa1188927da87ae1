"""SmolVLA: a flow expert beside SmolVLM."""
