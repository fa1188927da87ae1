"""Video models: what turns noise, frames seen and moves made into the next frames."""
