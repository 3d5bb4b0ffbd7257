"""Generation with a KV cache, evaluation of a trained model, int8, and the model for Transformers."""
