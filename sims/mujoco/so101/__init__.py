"""A tabletop with an arm like the SO-101."""
