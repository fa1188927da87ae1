"""Speed, as ratios to the obvious alternative measured in the same run: ``make bench``."""
