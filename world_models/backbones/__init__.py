"""Video models: they turn noise, context frames and actions into the next frames."""
