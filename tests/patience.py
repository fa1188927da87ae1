"""How long a test waits for another process or thread before it says that it hangs: wall time, on any machine."""

PATIENCE = 600.0  # seconds; what is limited by speed counts CPU time (conftest.py)
