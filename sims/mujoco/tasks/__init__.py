"""One file per task; a file holds the sampling of episodes, the rules and ``make``."""
