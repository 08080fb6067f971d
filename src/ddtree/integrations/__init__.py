"""Use ddtree inside transformers and vLLM."""
