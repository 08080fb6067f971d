"""Target models and their memory: load them, verify draft trees, keep keys and values."""
