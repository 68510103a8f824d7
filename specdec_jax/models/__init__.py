"""Implementations of the `Model` contract: T5, decoder-only models, simulated acceptance."""
