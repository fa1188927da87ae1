"""Small numpy environments with known answers, for tests."""
