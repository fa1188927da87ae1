"""Cameras: each is one file that grabs frames; ``camera.py`` reads it in a thread and hands out the newest one."""
