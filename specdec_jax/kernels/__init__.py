"""Products that XLA does badly."""
