"""A load client for any OpenAI-compatible endpoint: arrivals, requests, figures, report. Knows no models."""
