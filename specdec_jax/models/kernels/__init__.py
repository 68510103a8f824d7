"""CPU kernels for operations that XLA executes slowly on a CPU."""
