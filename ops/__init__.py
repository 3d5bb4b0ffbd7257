"""How the model is computed, with the same result: what is chosen here changes speed and memory only."""
