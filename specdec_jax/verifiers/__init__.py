"""Verifiers other than those of `core.verify`: Gumbel, K-SEQ and lossy verifiers."""
