"""ManiSkill 3: manipulation tasks in SAPIEN, on the processor or thousands at once on a GPU (Tao et al. 2024)."""
