"""What XLA does badly on a CPU."""
