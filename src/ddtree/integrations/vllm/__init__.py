"""Draft trees inside vLLM's engine: a worker class for the stock engine, no file of which is changed."""
