"""An OpenAI-compatible HTTP server: routes and formats on top of one thread that runs the engine."""
