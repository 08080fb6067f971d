"""An OpenAI-compatible endpoint: the engine's thread and what talks to it, and HTTP on top."""
