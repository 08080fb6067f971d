"""Run target models: load, verify trees, keep keys and values."""
