"""Benchmarks: methods of decoding measured side by side on one pair, their reports, and a load client for servers."""
