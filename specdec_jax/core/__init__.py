"""Speculative decoding itself: types, trees, sampling, verification and the decoding loop.

It depends on jax and numpy alone. Models, drafts and everything else are built on it.
"""
