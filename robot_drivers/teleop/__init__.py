"""Teleoperators: devices by which a person drives an arm, one file each."""
