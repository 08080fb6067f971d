"""Lossless draft-tree decoding for Hugging Face causal language models."""
