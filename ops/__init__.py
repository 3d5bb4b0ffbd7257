"""How the model is computed: kernels of attention and loss, float8, recomputation, sharding."""
