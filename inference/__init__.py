"""Generation with a KV cache, evaluation, int8 weights, and the model for Transformers."""
