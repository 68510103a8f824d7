"""Core of speculative decoding: types, trees, sampling, verification and the decoding loop.

All other packages build on this one, which imports none of them.
"""
