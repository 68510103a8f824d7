"""Core of speculative decoding: types, trees, sampling, verification and the decoding loop.

This package needs no libraries except jax, jaxtyping and numpy. All other packages build on it.
"""
