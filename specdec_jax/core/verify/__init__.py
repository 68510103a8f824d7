"""Verifiers, one file each, with their formulas, sources and proofs of exactness."""
