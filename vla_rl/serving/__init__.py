"""Policies across a WebSocket: ours served to an evaluation harness, and those of other people's servers as ours.

``RemotePolicy`` asks a server that speaks openpi's or the vla-eval harness's protocol; ``PolicyServer`` answers the
harness.  Arrays travel as numbers with a dtype, never as pickled objects, and every message has a size limit and a
deadline.
"""
