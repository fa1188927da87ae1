"""Experience: rolling policies out, storing and reading episodes."""
